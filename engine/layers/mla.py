"""Latent attention (MLA) as a mixer, in the absorbed form for prompts and for decode alike.

The up-projections of keys and values are held dense, by head, in the activation dtype: one is absorbed into the
query, the other follows the attention, so that only latents are ever cached or read.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.batch import Batch, LayerCache
from engine.config import LatentAttention
from engine.kernels.mla import absorb, latent_values, latent_write
from engine.layers.build import Build
from engine.quant import QuantWeight, dequantize


@dataclass
class HeadMatrices:
    """Dense matrices of every head, counted among the weights that a step reads."""

    weights: tuple[Tensor, Tensor]
    kernels: str = "fused"
    quantized: bool = False

    @property
    def nbytes(self) -> int:
        return sum(weight.numel() * weight.element_size() for weight in self.weights)


class LatentAttentionLayer:
    def __init__(self, spec: LatentAttention, build: Build, prefix: str) -> None:
        self.spec = spec
        module, hidden = f"{prefix}.self_attn", build.config.hidden
        self.project = build.linear(
            [f"{module}.q_a_proj", f"{module}.kv_a_proj_with_mqa"],
            [spec.q_rank, spec.kv_rank + spec.rope_dim],
            hidden,
        )
        self.q_norm = build.source.vector(f"{module}.q_a_layernorm.weight", (spec.q_rank,))
        self.kv_norm = build.source.vector(f"{module}.kv_a_layernorm.weight", (spec.kv_rank,))
        self.query = build.linear([f"{module}.q_b_proj"], [spec.heads * (spec.nope_dim + spec.rope_dim)], spec.q_rank)
        up = _dense(build, f"{module}.kv_b_proj", spec.heads * (spec.nope_dim + spec.value_dim), spec.kv_rank)
        key_up, value_up = up.reshape(spec.heads, -1, spec.kv_rank).split([spec.nope_dim, spec.value_dim], dim=1)
        self.key_up, self.value_down = key_up.contiguous(), value_up.transpose(1, 2).contiguous()
        build.linears[f"{module}.kv_b_proj"] = HeadMatrices((self.key_up, self.value_down))
        self.out = build.linear([f"{module}.o_proj"], [hidden], spec.heads * spec.value_dim)
        self.table = build.rope_table(spec.rope)

    def __call__(self, x: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        """x [T, H] -> [T, H] or Partials."""
        spec, rows = self.spec, x.shape[0]
        latents = latent_write(
            self.project.partials(x), spec, self.q_norm, self.kv_norm, self.table, batch, cache, x.dtype
        )
        query = self.query(latents).reshape(rows, spec.heads, -1)
        nope, rope = query.split([spec.nope_dim, spec.rope_dim], dim=-1)
        absorbed = absorb(nope, self.key_up)
        return self.out.partials(latent_values(absorbed, rope, self.value_down, spec, self.table, batch, cache))


def _dense(build: Build, name: str, n: int, k: int) -> Tensor:
    """A matrix [n, k] in the activation dtype, whatever form its source has it in."""
    weight = build.source.linear([name], [n], k)
    return dequantize(weight, build.dtype) if isinstance(weight, QuantWeight) else weight.to(build.dtype)
