"""Activation times gate."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engine.kernels.norm import whole


def silu_mul_reference(y: Tensor) -> Tensor:
    """y [T, 2I] (or Partials): silu of the first half times the second half, [T, I]; arithmetic in float32."""
    gate, up = whole(y).float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(y.dtype)


silu_mul = silu_mul_reference
