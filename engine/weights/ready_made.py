"""Ready-made 4-bit checkpoints: GPTQ, AWQ and compressed-tensors (pack-quantized), read to plain codes.

All pack eight 4-bit values into an int32, lowest bits first; they differ in the axis, in the order within a word, and
in how zero points are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.config import EngineError
from engine.weights.checkpoint import Codes, MatrixReader, MissingTensor, split_groups

# AWQ stores columns 0 2 4 6 1 3 5 7 of each eight in the nibbles of a word.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack_int32(words: Tensor, dim: int) -> Tensor:
    """int32 words -> uint8 codes, eight along `dim` for each word, lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(dim + 1) >> shifts.reshape([8 if i == dim + 1 else 1 for i in range(3)])) & 15
    return codes.to(torch.uint8).flatten(dim, dim + 1)


def _tidy_zeros(zeros: Tensor, scales: Tensor) -> Tensor | None:
    """None where every zero point is 8 (symmetric), else in the dtype of the scales."""
    return None if bool((zeros == 8).all()) else zeros.to(scales.dtype)


@dataclass(frozen=True)
class GptqReader:
    """qweight [k/8, n], qzeros [k/g, n/8], scales [k/g, n], g_idx [k]. The first format stores zero points less 1."""

    where: str
    group: int
    zero_offset: int

    def leaves_dense(self, name: str) -> bool:
        return True

    def parts(self, name: str) -> Sequence[str]:
        return [f"{name}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")]

    def read_matrix(self, name: str, tensor: Callable[[str], Tensor], device: torch.device) -> Codes:
        codes = unpack_int32(tensor(f"{name}.qweight"), 0).t()
        scales = tensor(f"{name}.scales").t().contiguous()
        n, k = codes.shape
        group = k if self.group == -1 else self.group
        self._check_order(name, tensor, k, group)
        zeros = unpack_int32(tensor(f"{name}.qzeros"), 1).t()[:n].int() + self.zero_offset
        return split_groups(Codes(codes.contiguous(), scales, _tidy_zeros(zeros, scales), group))

    def _check_order(self, name: str, tensor: Callable[[str], Tensor], k: int, group: int) -> None:
        try:
            order = tensor(f"{name}.g_idx")
        except MissingTensor:
            return
        if not torch.equal(order.long(), torch.arange(k, device=order.device) // group):
            raise EngineError(
                f"{self.where}: '{name}' was quantized with desc_act (its inputs are reordered), which is not "
                "supported; take a checkpoint made with desc_act=false"
            )


@dataclass(frozen=True)
class AwqReader:
    """qweight [k, n/8], qzeros [k/g, n/8], scales [k/g, n]; columns in AWQ's order within a word."""

    group: int

    def leaves_dense(self, name: str) -> bool:
        return True

    def parts(self, name: str) -> Sequence[str]:
        return [f"{name}.{part}" for part in ("qweight", "qzeros", "scales")]

    def read_matrix(self, name: str, tensor: Callable[[str], Tensor], device: torch.device) -> Codes:
        codes = _awq_columns(tensor(f"{name}.qweight"))
        scales = tensor(f"{name}.scales").t().contiguous()
        zeros = _awq_columns(tensor(f"{name}.qzeros"))
        group = codes.shape[1] if self.group == -1 else self.group
        return split_groups(Codes(codes, scales, _tidy_zeros(zeros, scales), group))


def _awq_columns(words: Tensor) -> Tensor:
    """int32 [rows, n/8] -> uint8 [n, rows], columns put back in order."""
    codes = unpack_int32(words, 1)
    place = torch.tensor(AWQ_ORDER, device=words.device).argsort()
    return codes.reshape(codes.shape[0], -1, 8)[:, :, place].flatten(1).t().contiguous()


@dataclass(frozen=True)
class PackedReader:
    """compressed-tensors: weight_packed [n, k/8], weight_scale [n, k/g], weight_zero_point [n/8, k/g] or none."""

    def leaves_dense(self, name: str) -> bool:
        return True

    def parts(self, name: str) -> Sequence[str]:
        suffixes = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
        return [f"{name}.{suffix}" for suffix in suffixes]

    def read_matrix(self, name: str, tensor: Callable[[str], Tensor], device: torch.device) -> Codes:
        n, k = tensor(f"{name}.weight_shape").tolist()
        codes = unpack_int32(tensor(f"{name}.weight_packed"), 1)[:, :k].contiguous()
        scales = tensor(f"{name}.weight_scale").reshape(n, -1)
        try:
            zeros = _tidy_zeros(unpack_int32(tensor(f"{name}.weight_zero_point"), 0)[:n], scales)
        except MissingTensor:
            zeros = None
        return split_groups(Codes(codes, scales, zeros, k // scales.shape[1]))


def reader_for(quantization: dict[str, Any] | None, where: str) -> MatrixReader | None:
    """The reader for a config.json's `quantization_config`, or None for plain and fp8 matrices and MXFP4 experts."""
    if not quantization:
        return None
    method = quantization.get("quant_method")
    if method in ("gptq", "awq"):
        bits = quantization.get("bits", quantization.get("w_bit", 4))
        group = quantization.get("group_size", quantization.get("q_group_size", 128))
        if bits != 4:
            raise EngineError(f"{where}: {method} with {bits} bits is not supported; 4 bits are")
        if method == "gptq":
            return GptqReader(where, group, 0 if quantization.get("checkpoint_format") == "gptq_v2" else 1)
        version = quantization.get("version", "gemm").lower()
        if version != "gemm":
            raise EngineError(f"{where}: AWQ version '{version}' is not supported; 'gemm' is")
        return AwqReader(group)
    if method == "compressed-tensors" and quantization.get("format") == "pack-quantized":
        bits = {g["weights"]["num_bits"] for g in quantization["config_groups"].values() if g.get("weights")}
        if bits != {4}:
            raise EngineError(f"{where}: compressed-tensors with {sorted(bits)} bits is not supported; 4 bits are")
        return PackedReader()
    if method in ("fp8", "mxfp4"):
        return None
    raise EngineError(
        f"{where}: quantization '{method}' is not supported; "
        "gptq, awq, fp8, mxfp4 and compressed-tensors (pack-quantized) are"
    )
