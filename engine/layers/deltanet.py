"""Gated DeltaNet as a mixer: one projection, the recurrence over the slot's state, one output projection."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch import Batch, StateCache
from engine.config import DeltaNet
from engine.kernels.deltanet import DeltaWeights, channels, delta_mix
from engine.layers.build import Build
from engine.layers.linear import Linear
from engine.quant import QuantWeight, permute_rows


class DeltaNetLayer:
    def __init__(self, spec: DeltaNet, build: Build, prefix: str) -> None:
        self.spec = spec
        module, heads, source = f"{prefix}.linear_attn", spec.value_heads, build.source
        self.project = _projection(spec, build, module)
        conv = source.tensor(f"{module}.conv1d.weight", (channels(spec), 1, spec.conv))
        self.weights = DeltaWeights(
            conv.squeeze(1).contiguous(),
            source.tensor(f"{module}.A_log", (heads,), torch.float32),
            source.tensor(f"{module}.dt_bias", (heads,), torch.float32),
            source.vector(f"{module}.norm.weight", (spec.value_dim,)),
            build.config.norm_eps,
        )
        self.out = build.linear([f"{module}.out_proj"], [build.config.hidden], heads * spec.value_dim)

    def __call__(self, x: Tensor, batch: Batch, cache: StateCache) -> Tensor:
        """x [T, H] -> [T, H] or Partials."""
        return self.out.partials(delta_mix(self.project.partials(x), self.spec, self.weights, batch, cache))


def _projection(spec: DeltaNet, build: Build, module: str) -> Linear:
    """Rows [q | k | v | z | b | a]; qwen3_next stores them interleaved by key head in two matrices."""
    values, hidden = spec.value_heads * spec.value_dim, build.config.hidden
    if build.config.family != "qwen3_next":
        names = [f"{module}.in_proj_{part}" for part in ("qkv", "z", "b", "a")]
        return build.linear(names, [channels(spec), values, spec.value_heads, spec.value_heads], hidden)
    names = [f"{module}.in_proj_qkvz", f"{module}.in_proj_ba"]
    weight = build.source.linear(names, [channels(spec) + values, 2 * spec.value_heads], hidden)
    order = interleaved_order(spec)
    if isinstance(weight, QuantWeight):
        weight = permute_rows(weight, order.to(weight.packed.device))
    else:
        weight = weight[order.to(weight.device)]
    layer = Linear(weight, None, build.kernels)
    build.linears["+".join(names)] = layer
    return layer


def interleaved_order(spec: DeltaNet) -> Tensor:
    """int64: row i of [q | k | v | z | b | a] is row order[i] of qwen3_next's qkvz and ba matrices, merged.

    For each key head these hold q, k, then v and z of its value heads; and b, then a of its value heads.
    """
    per_key = spec.value_heads // spec.key_heads
    widths = [spec.key_dim, spec.key_dim, per_key * spec.value_dim, per_key * spec.value_dim]
    qkvz = torch.arange(spec.key_heads * sum(widths)).reshape(spec.key_heads, -1).split(widths, dim=1)
    ba = torch.arange(2 * spec.value_heads).reshape(spec.key_heads, -1) + spec.key_heads * sum(widths)
    return torch.cat([part.reshape(-1) for part in (*qkvz, *ba.split(per_key, dim=1))])
