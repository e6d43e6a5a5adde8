"""4-bit products on a CPU: what the `kernels` switch means where there is no Triton.

`standard` unpacks the weight to the activation dtype and multiplies. `fused` is torch's own int4 product, which
unpacks in registers; it is fast in bfloat16 only (in float32 torch runs a scalar loop), so activations are rounded to
bfloat16 on the way in and products on the way out: about 3e-3 of the largest output. Both forms take 4 bits a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.quant import QuantWeight, expand_groups, unpack

# Weights unpacked at a time: small enough to be multiplied while they are in the cache.
BLOCK_WEIGHTS = 1 << 18


@dataclass(frozen=True)
class PlainWeight:
    """codes uint8 [n, width / 2]: byte j of a row holds input j (low) and j + width/2 (high), width = groups * group.

    scales and offsets float32 [n, groups, 1]: w = code * scale + offset.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor
    n: int
    k: int
    group: int

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scales, self.offsets))

    def dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """Rows first to last (exclusive), float32 [rows, width]."""
        codes = self.codes[first:last]
        rows, half = codes.shape
        weights = torch.empty((rows, 2 * half))
        weights[:, :half] = codes & 15
        weights[:, half:] = codes >> 4
        grouped = weights.view(rows, -1, self.group)
        return grouped.mul_(self.scales[first:last]).add_(self.offsets[first:last]).view(rows, -1)


@dataclass(frozen=True)
class TorchWeight:
    """torch's packed form: packed uint8 [n, k / 2], scale_offset bfloat16 [k / group, n, 2], w = (code - 8) * s + o."""

    packed: Tensor
    scale_offset: Tensor
    n: int
    k: int
    group: int

    @property
    def nbytes(self) -> int:
        return self.packed.numel() + 2 * self.scale_offset.numel()


CpuWeight = PlainWeight | TorchWeight


def torch_can_multiply(weight: QuantWeight) -> bool:
    """Whether torch's int4 product takes this shape."""
    available = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
    return available and weight.k % weight.group == 0 and weight.n % 16 == 0 and weight.group in (32, 64, 128, 256)


def store(weight: QuantWeight, kernels: Literal["standard", "fused"]) -> CpuWeight:
    """The form of `weight` that the switch's product reads; `fused` takes the plain form where torch cannot."""
    codes = unpack(weight)
    scales = _by_group(weight, weight.scales)
    zeros = torch.full_like(scales, 8.0) if weight.zeros is None else _by_group(weight, weight.zeros)
    if kernels == "fused" and torch_can_multiply(weight):
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        pair = torch.stack([scales.t(), ((8.0 - zeros) * scales).t()], dim=-1)
        return TorchWeight(packed, pair.bfloat16().contiguous(), weight.n, weight.k, weight.group)
    low, high = F.pad(codes, (0, scales.shape[1] * weight.group - weight.k)).chunk(2, dim=1)
    offsets = (-zeros * scales)[..., None].contiguous()
    return PlainWeight(low | (high << 4), scales[..., None].contiguous(), offsets, weight.n, weight.k, weight.group)


def _by_group(weight: QuantWeight, values: Tensor) -> Tensor:
    """Scales or zeros as float32 [n, groups]."""
    return expand_groups(values.float(), weight)[:, :: weight.group].contiguous()


def matmul(x: Tensor, weight: CpuWeight) -> Tensor:
    """x [T, k] -> [T, n] in the dtype of x."""
    if isinstance(weight, PlainWeight):
        return _unpack_and_multiply(x, weight)
    product = torch.ops.aten._weight_int4pack_mm_for_cpu
    return product(x.bfloat16(), weight.packed, weight.group, weight.scale_offset).to(x.dtype)


def _unpack_and_multiply(x: Tensor, weight: PlainWeight) -> Tensor:
    width = 2 * weight.codes.shape[1]
    wide = F.pad(x.float(), (0, width - weight.k))
    rows = max(BLOCK_WEIGHTS // width, 1)
    blocks = [F.linear(wide, weight.dense(i, i + rows)) for i in range(0, weight.n, rows)]
    return (blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)).to(x.dtype)
