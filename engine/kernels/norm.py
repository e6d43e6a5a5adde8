"""Root-mean-square norms."""

from __future__ import annotations

import torch
from torch import Tensor


def whole(y: Tensor) -> Tensor:
    """[T, N] as it is, or Partials [S, T, N] summed in float32."""
    return y if y.dim() == 2 else y.sum(0)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """x [..., D] / rms(x) * weight (or 1 + weight) in float32, rounded once to the dtype of x."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (weight.float() + 1.0 if plus_one else weight.float())).to(x.dtype)


def add_rms_norm_reference(y: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """Adds y ([T, H] or Partials) to the residual [T, H] in place; returns the norm of the sum."""
    residual.copy_((residual.float() + whole(y).float()).to(residual.dtype))
    return rms_norm_reference(residual, weight, eps, plus_one)


rms_norm = rms_norm_reference
add_rms_norm = add_rms_norm_reference
