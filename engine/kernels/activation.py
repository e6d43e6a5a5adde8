"""Activation times gate, between the two products of a feed-forward layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels._launch import launch, partials_of, power_of_2, whole


def output_dtype(y: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype asked for, else that of y; bfloat16 for Partials, whose own dtype is no activation dtype."""
    if dtype is not None:
        return dtype
    return y.dtype if y.dim() == 2 else torch.bfloat16


def silu_mul_reference(y: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """y [T, 2I] or Partials -> silu(first half) * second half, [T, I], arithmetic in float32."""
    gate, up = whole(y).float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(output_dtype(y, dtype))


def silu_mul(y: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """See silu_mul_reference."""
    return (silu_mul_triton if y.is_cuda else silu_mul_reference)(y, dtype)


def clamped_swiglu_reference(
    y: Tensor, clamp: float, alpha: float, interleaved: bool = True, dtype: torch.dtype | None = None
) -> Tensor:
    """gpt-oss: y [T, 2I] or Partials -> (u + 1) * g * sigmoid(alpha * g), [T, I], arithmetic in float32.

    g = min(gate, clamp), u = up within +-clamp; gate and up are the even and odd columns when `interleaved`, else the
    two halves.
    """
    wide = whole(y).float()
    gate, up = (wide[:, 0::2], wide[:, 1::2]) if interleaved else wide.chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(output_dtype(y, dtype))


def clamped_swiglu(
    y: Tensor, clamp: float, alpha: float, interleaved: bool = True, dtype: torch.dtype | None = None
) -> Tensor:
    """See clamped_swiglu_reference."""
    function = clamped_swiglu_triton if y.is_cuda else clamped_swiglu_reference
    return function(y, clamp, alpha, interleaved, dtype)


def silu_mul_triton(y: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """silu_mul in one launch; reads y once, writes half as many elements."""
    return _launch_gated(y, dtype, clamped=False, clamp=0.0, alpha=1.0, interleaved=False)


def clamped_swiglu_triton(
    y: Tensor, clamp: float, alpha: float, interleaved: bool = True, dtype: torch.dtype | None = None
) -> Tensor:
    """clamped_swiglu in one launch; reads y once, writes half as many elements."""
    return _launch_gated(y, dtype, clamped=True, clamp=clamp, alpha=alpha, interleaved=interleaved)


def _launch_gated(
    y: Tensor, dtype: torch.dtype | None, clamped: bool, clamp: float, alpha: float, interleaved: bool
) -> Tensor:
    from engine.kernels.activation_triton import gated_activation_kernel

    rows, width = y.shape[-2], y.shape[-1] // 2
    out = torch.empty((rows, width), dtype=output_dtype(y, dtype), device=y.device)
    splits, split_stride, row_stride = partials_of(y)
    if rows:
        block = min(256 if rows <= 16 else 1024, power_of_2(width))
        launch(
            gated_activation_kernel, (rows, -(-width // block)), y, out, width, split_stride, row_stride, clamp, alpha,
            SPLITS=splits, BLOCK=block, CLAMPED=clamped, INTERLEAVED=interleaved, num_warps=max(1, block // 256),
        )  # fmt: skip
    return out
