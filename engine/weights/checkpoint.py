"""A weight source over the tensors of a checkpoint, whatever file they are in.

Matrices are read, brought to the device and quantized one merged matrix at a time, so the peak is the model plus one
matrix. A matrix that the checkpoint holds in 4 bits keeps its codes; one that a 4-bit checkpoint left in 16 bits stays,
and so does a dense output head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.config import EngineError, ModelConfig
from engine.quant import QuantWeight, group_for, pack, quantize
from engine.weights import DTYPES, kept_in_16bit

QUANTIZE_ROWS = 8192
LARGEST_GROUP = 128
HEADS = ("lm_head", "model.embed_tokens")
"""The output head, under either of its names. A dense one stays in 16 bits: rounding it to 4 (group 64) raised
perplexity by 22%."""


class MissingTensor(EngineError):
    """The checkpoint has no tensor of that name (a damaged one is a plain EngineError)."""


@dataclass(frozen=True)
class Codes:
    """A matrix [n, k] as stored 4-bit codes: uint8 [n, k]; scales, zeros [n, k / group] (zeros None: 8)."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int

    def dense(self) -> Tensor:
        """float32 [n, k]."""
        scales = self.scales.float().repeat_interleave(self.group, dim=1)
        zeros = 8.0 if self.zeros is None else self.zeros.float().repeat_interleave(self.group, dim=1)
        return (self.codes.float() - zeros) * scales


class TensorStore(Protocol):
    """The tensors of a checkpoint. `read` returns them on the CPU; both raise EngineError on a damaged file."""

    where: str

    def names(self) -> Sequence[str]: ...

    def read(self, name: str) -> Tensor: ...


class MatrixReader(Protocol):
    """Knows the stored form of 4-bit matrices."""

    def leaves_dense(self, name: str) -> bool:
        """Whether matrix `name`, which is not in 4 bits, was left so on purpose and stays in 16."""
        ...

    def parts(self, name: str) -> Sequence[str]:
        """Canonical names of the tensors that make up matrix `name` in its 4-bit form, if it is there in it."""
        ...

    def read_matrix(self, name: str, tensor: Callable[[str], Tensor], device: torch.device) -> Codes:
        """The 4-bit matrix `name` on the device; `tensor` gives a tensor by its canonical name, on the device.

        `tensor` raises MissingTensor where there is none.
        """
        ...


class CheckpointSource:
    """See `engine.weights.WeightSource`. `canonical` maps stored names to canonical ones (None: not of this model)."""

    def __init__(
        self,
        store: TensorStore,
        canonical: Callable[[str], str | None],
        reader: MatrixReader | None,
        config: ModelConfig,
        weights_dtype: str,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.store = store
        self.reader = reader
        self.config = config
        self.weights_dtype = weights_dtype
        self.device = device
        self.dtype = dtype
        named = {stored: canonical(stored) for stored in store.names()}
        self._stored = {name: stored for stored, name in named.items() if name is not None}
        self.skipped = sorted(stored for stored, name in named.items() if name is None)
        self._used: set[str] = set()

    # ------------------------------------------------------------------------------------------ the protocol

    def linear(self, names: Sequence[str], out_features: Sequence[int], in_features: int) -> QuantWeight | Tensor:
        parts = [self._matrix(name, (n, in_features)) for name, n in zip(names, out_features, strict=True)]
        stored = [part for part in parts if isinstance(part, Codes)]
        if self.weights_dtype == "int4" and len(stored) == len(parts) and _alike(stored):
            return _merge(stored)
        dense = [part.dense() if isinstance(part, Codes) else part for part in parts]
        merged = dense[0] if len(dense) == 1 else torch.cat(dense)
        if self.weights_dtype != "int4":
            return merged.to(DTYPES[self.weights_dtype])
        reader = self.reader
        left = reader is not None and not stored and all(reader.leaves_dense(name) for name in names)
        head = not stored and any(name in HEADS for name in names)
        if left or head or any(kept_in_16bit(self.config, name) for name in names):
            return merged.to(self.dtype)
        return quantize_by_rows(merged, self._scale_dtype())

    def vector(self, name: str, shape: Sequence[int]) -> Tensor:
        return self.tensor(name, shape)

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        return self._read(name, shape).to(dtype or self.dtype)

    def has(self, name: str) -> bool:
        return name in self._stored or f"{name}.weight" in self._stored or self._in_4bit(name)

    def unused(self) -> list[str]:
        ignored = {"lm_head.weight"} if self.config.tied_embeddings else set()
        return sorted(set(self._stored) - self._used - ignored)

    # ------------------------------------------------------------------------------------------ reading

    def _in_4bit(self, name: str) -> bool:
        return self.reader is not None and any(part in self._stored for part in self.reader.parts(name))

    def _matrix(self, name: str, shape: tuple[int, int]) -> Codes | Tensor:
        if not self._in_4bit(name):
            weight = self._read(f"{name}.weight", shape)
            return self._scaled_fp8(name, weight) if weight.dtype.itemsize == 1 else weight
        codes = self.reader.read_matrix(name, self._any_shape, self.device)
        self._used |= {part for part in self.reader.parts(name) if part in self._stored}
        if tuple(codes.codes.shape) != tuple(shape):
            raise self._misshapen(name, codes.codes.shape, shape)
        return codes

    def _scaled_fp8(self, name: str, weight: Tensor) -> Tensor:
        """An 8-bit float matrix times its scale: one for the matrix, one a row, or one for each square block."""
        found = [s for s in (f"{name}.weight_scale_inv", f"{name}.weight_scale") if s in self._stored]
        if not found:
            raise EngineError(f"{self.store.where}: '{name}.weight' is 8-bit but has no weight_scale beside it")
        scale = self._any_shape(found[0]).float()
        if scale.dim() == 2 and scale.numel() > 1:
            for dim in (0, 1):
                block = -(-weight.shape[dim] // scale.shape[dim])
                block = 1 << (block - 1).bit_length() if scale.shape[dim] > 1 else block
                scale = scale.repeat_interleave(block, dim=dim).narrow(dim, 0, weight.shape[dim])
        return weight.float() * scale

    def _any_shape(self, name: str) -> Tensor:
        if name not in self._stored:
            raise MissingTensor(f"{self.store.where}: tensor '{name}' is missing; {self.config.family} needs it")
        self._used.add(name)
        return self.store.read(self._stored[name]).to(self.device)

    def _read(self, name: str, shape: Sequence[int]) -> Tensor:
        found = self._any_shape(name)
        if tuple(found.shape) != tuple(shape):
            raise self._misshapen(name, found.shape, shape)
        return found

    def _misshapen(self, name: str, found: Sequence[int], wanted: Sequence[int]) -> EngineError:
        return EngineError(
            f"{self.store.where}: tensor '{name}' is {list(found)}, {self.config.name} needs {list(wanted)}"
        )

    def _scale_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cpu" else self.dtype


def _alike(parts: Sequence[Codes]) -> bool:
    return len({(part.group, part.scales.dtype) for part in parts}) == 1


def _merge(parts: Sequence[Codes]) -> QuantWeight:
    """One packed matrix of the rows of all; symmetric only if all are."""
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat([torch.full_like(p.scales, 8.0) if p.zeros is None else p.zeros for p in parts])
    codes, scales = torch.cat([p.codes for p in parts]), torch.cat([p.scales for p in parts])
    return pack(codes, scales, zeros, parts[0].group)


def quantize_by_rows(weight: Tensor, scale_dtype: torch.dtype) -> QuantWeight:
    """`quantize`, some rows at a time: its float32 temporaries stay small beside the matrix."""
    group = group_for(weight.shape[1])
    blocks = [quantize(weight[i : i + QUANTIZE_ROWS], group, scale_dtype) for i in range(0, len(weight), QUANTIZE_ROWS)]
    packed, scales = torch.cat([b.packed for b in blocks]), torch.cat([b.scales for b in blocks])
    return QuantWeight(packed, scales, None, *weight.shape, group)


def split_groups(codes: Codes) -> Codes:
    """The same matrix with groups of at most 128 inputs: kernels know no longer ones."""
    if codes.group <= LARGEST_GROUP:
        return codes
    group = group_for(codes.group)
    times = codes.group // group
    zeros = None if codes.zeros is None else codes.zeros.repeat_interleave(times, dim=1)
    return Codes(codes.codes, codes.scales.repeat_interleave(times, dim=1), zeros, group)
