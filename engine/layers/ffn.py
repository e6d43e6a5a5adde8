"""The dense feed-forward part: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from torch import Tensor

from engine.batch import Batch
from engine.config import DenseFfn
from engine.kernels.activation import silu_mul
from engine.layers.build import Build


class DenseFfnLayer:
    def __init__(self, spec: DenseFfn, build: Build, prefix: str) -> None:
        module, hidden = f"{prefix}.mlp", build.config.hidden
        names = [f"{module}.gate_proj", f"{module}.up_proj"]
        self.gate_up = build.linear(names, [spec.intermediate] * 2, hidden)
        self.gate_up.hands_over_one_row = True
        self.down = build.linear([f"{module}.down_proj"], [hidden], spec.intermediate)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, H] -> [T, H] or Partials."""
        return self.down.partials(silu_mul(self.gate_up.partials(x), x.dtype))
