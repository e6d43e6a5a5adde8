"""Mixture of experts as a feed-forward part: router, chosen experts, and the expert that every token visits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import Batch
from engine.config import MoeFfn
from engine.kernels.moe import Experts, choose_experts, moe_experts
from engine.layers.build import Build
from engine.layers.linear import Linear
from engine.weights.experts import read_experts


@dataclass
class ExpertMatrices:
    """The experts of one layer among the linear layers of a model: what is stored, and what one token reads."""

    experts: Experts
    visited: int
    kernels: str

    @property
    def quantized(self) -> bool:
        return not isinstance(self.experts.gate_up, Tensor)

    @property
    def nbytes(self) -> int:
        return self.experts.nbytes

    @property
    def step_nbytes(self) -> int:
        """Bytes that one token's step reads: the experts it visits."""
        return self.experts.nbytes * self.visited // self.experts.count


class MoeLayer:
    """The shared expert is stored as one more expert where its weights have the same form, else as linear layers."""

    def __init__(self, spec: MoeFfn, build: Build, prefix: str) -> None:
        self.spec = spec
        module, hidden, source = f"{prefix}.mlp", build.config.hidden, build.source
        router = source.tensor(f"{module}.gate.weight", (spec.experts, hidden))
        if spec.shared and spec.shared_gate:
            gate = source.tensor(f"{module}.shared_expert_gate.weight", (1, hidden))
            router = torch.cat([router, gate])
        self.router = router
        self.router_bias = source.vector(f"{module}.gate.bias", (spec.experts,)) if spec.router_bias else None
        self.selection_bias = None
        if spec.selection_bias:
            name = f"{module}.gate.e_score_correction_bias"
            self.selection_bias = source.tensor(name, (spec.experts,), torch.float32)
        read = read_experts(source, module, spec, hidden)
        merged = spec.shared > 0 and read.shared is None
        self.experts = Experts(read.gate_up, read.down, read.gate_up_bias, read.down_bias, shared=merged)
        self.matrices = ExpertMatrices(self.experts, spec.top_k + merged, build.kernels)
        build.linears[f"{module}.experts"] = self.matrices
        self.shared = None if read.shared is None else [Linear(w, None, build.kernels) for w in read.shared]
        for part, linear in zip(("gate", "up", "down"), self.shared or (), strict=False):
            build.linears[f"{module}.shared_expert.{part}_proj"] = linear

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, H] -> [T, H] or Partials."""
        logits, ids, weights = choose_experts(
            x, self.router, self.spec, self.router_bias, self.selection_bias, self.experts.shared
        )
        y = moe_experts(x, ids, weights, self.experts, self.spec, grouped=self.matrices.kernels == "fused")
        if self.shared is None:
            return y
        gate, up, down = self.shared
        shared = down(F.silu(gate(x)) * up(x)).float()
        if self.spec.shared_gate:
            shared = shared * torch.sigmoid(logits[:, self.spec.experts :])
        return torch.cat([y, shared[None]]) if y.dim() == 3 else (y + shared).to(x.dtype)
