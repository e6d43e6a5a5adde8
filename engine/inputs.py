"""The numbers a step needs on the device, packed into one buffer so that one copy brings them there."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch
from engine.kernels.sample import SamplingTensors


@dataclass(frozen=True)
class StepShape:
    """T token rows, R requests, S sampled rows."""

    rows: int
    requests: int
    samples: int


@dataclass
class StepInputs:
    """Views into one buffer; int64 fields first so that all are aligned. See `engine.batch.Batch` for most of them.

    seeds int64 [S]; sample_slots int64 [S]: the slot whose next token a row yields; ring int64 [1]: the row of the
    output ring; sample_positions int32 [S]: the position of the token that is chosen; temperature, top_p float32 [S];
    top_k int32 [S].
    """

    seeds: Tensor
    sample_slots: Tensor
    ring: Tensor
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    query_start: Tensor
    kv_len: Tensor
    state_slots: Tensor
    sample_rows: Tensor
    sample_positions: Tensor
    top_k: Tensor
    temperature: Tensor
    top_p: Tensor

    @staticmethod
    def sizes(shape: StepShape) -> dict[str, tuple[int, torch.dtype]]:
        """Field -> (elements, dtype)."""
        t, r, s = shape.rows, shape.requests, shape.samples
        wide = {"seeds": s, "sample_slots": s, "ring": 1}
        narrow = {
            "tokens": t, "positions": t, "slots": t, "query_start": r + 1, "kv_len": r, "state_slots": r,
            "sample_rows": s, "sample_positions": s, "top_k": s,
        }  # fmt: skip
        real = {"temperature": s, "top_p": s}
        return (
            {name: (n, torch.int64) for name, n in wide.items()}
            | {name: (n, torch.int32) for name, n in narrow.items()}
            | {name: (n, torch.float32) for name, n in real.items()}
        )

    @staticmethod
    def nbytes(shape: StepShape) -> int:
        return sum(n * dtype.itemsize for n, dtype in StepInputs.sizes(shape).values())

    @staticmethod
    def over(buffer: Tensor, shape: StepShape) -> StepInputs:
        """The views of a uint8 buffer of at least `nbytes(shape)` bytes."""
        views, at = {}, 0
        for name, (n, dtype) in StepInputs.sizes(shape).items():
            views[name] = buffer[at : at + n * dtype.itemsize].view(dtype)
            at += n * dtype.itemsize
        return StepInputs(**views)

    def numpy(self) -> dict[str, np.ndarray]:
        """The same memory as arrays, for the host to fill."""
        return {f.name: getattr(self, f.name).numpy() for f in fields(self)}

    def batch(self, page_table: Tensor, decode: bool, max_query: int, max_kv: int) -> Batch:
        return Batch(
            self.tokens, self.positions, self.slots, self.query_start, self.kv_len, page_table, self.state_slots,
            self.sample_rows, decode, max_query, max_kv,
        )  # fmt: skip

    def sampling(self, greedy: bool) -> SamplingTensors:
        return SamplingTensors(self.temperature, self.top_k, self.top_p, self.seeds, self.sample_positions, greedy)
