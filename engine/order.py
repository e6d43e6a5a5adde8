"""A step as stages receive it: what the scheduler planned, as numbers ready for the device. It travels by pickle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.graphs import GraphShapes
from engine.inputs import StepInputs, StepShape
from engine.sampler import is_greedy, is_plain
from engine.scheduler import Piece, StepPlan

Banned = list[tuple[int, frozenset[int]]]


@dataclass(frozen=True)
class StepOrder:
    """`packed` uint8: the step's `StepInputs` of `shape`. `samples`: rows that yield a token (the rest of a graph's
    rows are padding). `graph`: replay the captured step of that shape; `resident`: decode rows take their tokens from
    the token pool. `banned`: (sampled row, tokens that may not be chosen there). `logprobs`: wanted for each sampled
    row, where any are. For the others see `StepPlan` and `Batch`.
    """

    step: int
    shape: StepShape
    packed: np.ndarray
    samples: int
    decode: bool
    graph: bool
    resident: bool
    greedy: bool
    max_query: int
    max_kv: int
    fresh_slots: tuple[int, ...]
    new_pages: tuple[tuple[int, int, int], ...]
    restores: tuple[tuple[int, int], ...]
    snapshots: tuple[tuple[int, int], ...]
    banned: tuple[tuple[int, frozenset[int]], ...]
    logprobs: tuple[int | None, ...]

    @property
    def rows(self) -> int:
        """Token rows, those of padding counted."""
        return self.shape.rows

    def sample_slots(self) -> Tensor:
        """The slots whose next tokens the step yields, int64 [samples], on the host."""
        return StepInputs.over(torch.from_numpy(self.packed), self.shape).sample_slots[: self.samples]


def make_order(
    plan: StepPlan, banned: Banned, page_size: int, ring_depth: int, resident: bool, shapes: GraphShapes | None
) -> StepOrder:
    """`shapes`: of the captured steps (None: there are none)."""
    sampling = [piece.track.request.sampling for piece in plan.pieces if piece.samples]
    plain = not banned and all(map(is_plain, sampling))
    captured = shapes.holding(plan) if plain and shapes is not None else None
    shape = captured or plan_shape(plan)
    packed = np.empty(StepInputs.nbytes(shape), dtype=np.uint8)
    fill(StepInputs.over(torch.from_numpy(packed), shape).numpy(), plan, plan.step % ring_depth, page_size)
    wanted = tuple(params.logprobs for params in sampling)
    return StepOrder(
        step=plan.step,
        shape=shape,
        packed=packed,
        samples=len(sampling),
        decode=plan.decode,
        graph=captured is not None,
        resident=resident,
        greedy=is_greedy(sampling),
        max_query=max(piece.count for piece in plan.pieces),
        max_kv=max(piece.start + piece.count for piece in plan.pieces),
        fresh_slots=plan.fresh_slots,
        new_pages=plan.new_pages,
        restores=plan.restores,
        snapshots=plan.snapshots,
        banned=tuple(banned),
        logprobs=wanted if any(n is not None for n in wanted) else (),
    )


def plan_shape(plan: StepPlan) -> StepShape:
    return StepShape(
        rows=sum(piece.count for piece in plan.pieces),
        requests=len(plan.pieces),
        samples=sum(piece.samples for piece in plan.pieces),
    )


def fill(arrays: dict[str, np.ndarray], plan: StepPlan, ring_row: int, page_size: int) -> None:
    """Writes a plan into the host's arrays; rows past the plan's (of a captured shape) are padding: all zeros."""
    pieces, count = plan.pieces, len(plan.pieces)
    for array in arrays.values():
        array[...] = 0
    arrays["ring"][0] = ring_row
    arrays["state_slots"][:count] = [piece.slot for piece in pieces]
    arrays["kv_len"][:count] = [piece.start + piece.count for piece in pieces]
    ends = np.cumsum([piece.count for piece in pieces])
    starts = arrays["query_start"]
    starts[1 : count + 1] = ends
    starts[count + 1 :] = ends[-1] + (np.arange(1, len(starts) - count) if plan.decode else 0)
    if plan.decode:
        _fill_decode_rows(arrays, pieces, page_size)
    else:
        _fill_prompt_rows(arrays, pieces, page_size)
    _fill_samples(arrays, [(piece, end) for piece, end in zip(pieces, ends.tolist(), strict=True) if piece.samples])


def _fill_decode_rows(arrays: dict[str, np.ndarray], pieces: Sequence[Piece], page_size: int) -> None:
    count = len(pieces)
    arrays["positions"][:count] = [piece.start for piece in pieces]
    arrays["slots"][:count] = [
        piece.track.pages[piece.start // page_size] * page_size + piece.start % page_size for piece in pieces
    ]
    arrays["tokens"][:count] = [
        piece.track.tokens[piece.start] if piece.start < len(piece.track.tokens) else 0 for piece in pieces
    ]


def _fill_prompt_rows(arrays: dict[str, np.ndarray], pieces: Sequence[Piece], page_size: int) -> None:
    begin = 0
    for piece in pieces:
        stop, end = piece.start + piece.count, begin + piece.count
        positions = np.arange(piece.start, stop)
        pages = np.asarray(piece.track.pages[: -(-stop // page_size)])
        arrays["positions"][begin:end] = positions
        arrays["slots"][begin:end] = pages[positions // page_size] * page_size + positions % page_size
        arrays["tokens"][begin:end] = piece.track.tokens[piece.start : stop]
        begin = end


def _fill_samples(arrays: dict[str, np.ndarray], sampled: list[tuple[Piece, int]]) -> None:
    count = len(sampled)
    params = [piece.track.request.sampling for piece, _ in sampled]
    arrays["sample_rows"][:count] = [end - 1 for _, end in sampled]
    arrays["sample_slots"][:count] = [piece.slot for piece, _ in sampled]
    arrays["sample_positions"][:count] = [piece.start + piece.count for piece, _ in sampled]
    arrays["seeds"][:count] = [piece.track.seed for piece, _ in sampled]
    arrays["temperature"][:count] = [p.temperature for p in params]
    arrays["top_k"][:count] = [p.top_k for p in params]
    arrays["top_p"][:count] = [p.top_p for p in params]
