"""Qwen3 mixtures of experts (Qwen3-Coder-30B-A3B): Qwen3's attention, softmax router, no shared expert."""

from __future__ import annotations

from typing import Any

from engine.config import DenseFfn, LayerSpec, ModelConfig, MoeFfn
from engine.models._hf import attention_of, model_of, plain_names, required, text_config

canonical = plain_names


def config(hf: dict[str, Any], name: str) -> ModelConfig:
    """The geometry of a `Qwen3MoeConfig`; layers named in `mlp_only_layers`, or off the sparse step, are dense."""
    hf = text_config(hf)
    attention = attention_of(hf, name, qk_norm=True)
    moe = MoeFfn(
        hf.get("num_experts") or required(hf, "num_local_experts", name),
        required(hf, "num_experts_per_tok", name),
        required(hf, "moe_intermediate_size", name),
        renormalize=bool(hf.get("norm_topk_prob", False)),
    )
    dense, step = hf.get("mlp_only_layers") or [], hf.get("decoder_sparse_step") or 1
    layers = tuple(
        LayerSpec(attention, DenseFfn(hf["intermediate_size"]) if i in dense or (i + 1) % step else moe)
        for i in range(required(hf, "num_hidden_layers", name))
    )
    return model_of(hf, name, "qwen3_moe", layers)
