"""Softmax attention with grouped key/value heads over the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch import Batch, LayerCache
from engine.config import Attention
from engine.kernels.attention_decode import decode_attention
from engine.kernels.attention_prefill import prefill_attention
from engine.kernels.rope import qk_norm_rope_write
from engine.layers.build import Build


class AttentionLayer:
    """q, k and v in one product; norm, rotation and cache write in one kernel; attention; output projection."""

    def __init__(self, spec: Attention, build: Build, prefix: str) -> None:
        self.spec = spec
        hidden, inner = build.config.hidden, spec.heads * spec.head_dim
        self.eps, self.plus_one = build.config.norm_eps, build.config.norm_plus_one
        module = f"{prefix}.self_attn"
        names = [f"{module}.{part}_proj" for part in "qkv"]
        key_rows = spec.kv_heads * spec.head_dim
        rows = [inner * (2 if spec.output_gate else 1), key_rows, key_rows]
        self.qkv = build.linear(names, rows, hidden)
        self.qkv.hands_over_one_row = True
        self.qkv_bias = build.bias(names, rows) if spec.bias else None
        self.out = build.linear([f"{module}.o_proj"], [hidden], inner, bias=spec.output_bias)
        vector, per_head = build.source.vector, (spec.head_dim,)
        self.q_norm = vector(f"{module}.q_norm.weight", per_head) if spec.qk_norm else None
        self.k_norm = vector(f"{module}.k_norm.weight", per_head) if spec.qk_norm else None
        self.sinks = vector(f"{module}.sinks", (spec.heads,)) if spec.sinks else None
        self.table = build.rope_table(spec.rope)

    def __call__(self, x: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        """x [T, H] -> [T, H] or Partials."""
        q, gate = qk_norm_rope_write(
            self.qkv.partials(x), self.spec, self.q_norm, self.k_norm, self.qkv_bias, self.eps, self.plus_one,
            self.table, batch, cache, x.dtype,
        )  # fmt: skip
        attend = decode_attention if batch.decode else prefill_attention
        out = attend(q, cache, batch, self.spec.scale, self.spec.window, self.sinks, cache.contiguous)
        if gate is not None:
            out = out * torch.sigmoid(gate)
        return self.out.partials(out.reshape(x.shape[0], -1))
