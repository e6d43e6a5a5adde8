"""Root-mean-square norm, alone or after adding a sublayer's output to the residual."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.kernels.norm import add_rms_norm, rms_norm


@dataclass(frozen=True)
class RmsNorm:
    """x / rms(x) * weight, or * (1 + weight) where `plus_one`; arithmetic in float32."""

    weight: Tensor
    eps: float
    plus_one: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] -> the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps, self.plus_one)

    def add(self, y: Tensor, residual: Tensor) -> Tensor:
        """Adds y ([T, H] or Partials) to the residual [T, H] in place and returns the norm of the sum."""
        return add_rms_norm(y, residual, self.weight, self.eps, self.plus_one)
