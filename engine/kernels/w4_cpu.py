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


@dataclass(frozen=True)
class PlainWeight:
    """codes uint8 [n, k / 2]: byte j of a row holds input j (low) and j + k/2 (high); k is padded to an even number.

    scales and offsets [n, groups, 1] in the compute dtype: w = code * scale + offset.
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

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[n, k] in dtype."""
        half = self.codes.shape[1]
        codes = torch.empty((self.n, 2 * half), dtype=torch.uint8)
        torch.bitwise_and(self.codes, 15, out=codes[:, :half])
        torch.bitwise_right_shift(self.codes, 4, out=codes[:, half:])
        groups = self.scales.shape[1]
        padded = F.pad(codes, (0, groups * self.group - 2 * half)).to(self.scales.dtype).view(self.n, groups, -1)
        return torch.addcmul(self.offsets, padded, self.scales).view(self.n, -1)[:, : self.k].to(dtype)


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
    codes = F.pad(codes, (0, weight.k % 2))
    low, high = codes.chunk(2, dim=1)
    offsets = (-zeros * scales)[..., None].contiguous()
    return PlainWeight(low | (high << 4), scales[..., None].contiguous(), offsets, weight.n, weight.k, weight.group)


def _by_group(weight: QuantWeight, values: Tensor) -> Tensor:
    """Scales or zeros as float32 [n, groups]."""
    return expand_groups(values.float(), weight)[:, :: weight.group].contiguous()


def matmul(x: Tensor, weight: CpuWeight) -> Tensor:
    """x [T, k] -> [T, n] in the dtype of x."""
    if isinstance(weight, PlainWeight):
        return F.linear(x, weight.dense(x.dtype))
    product = torch.ops.aten._weight_int4pack_mm_for_cpu
    return product(x.bfloat16(), weight.packed, weight.group, weight.scale_offset).to(x.dtype)
