"""Qwen3.5, 3.6 and 3.8, dense and mixtures of experts, and Qwen3-Next: three layers of Gated DeltaNet, one of full
attention with output gate and partial rotary. Text only: vision tower and multi-token prediction are left out."""

from __future__ import annotations

from typing import Any

from engine.config import DeltaNet, DenseFfn, Ffn, LayerSpec, ModelConfig, MoeFfn
from engine.models._hf import attention_of, model_of, plain_names, required, text_config

canonical = plain_names


def config(hf: dict[str, Any], name: str) -> ModelConfig:
    """The geometry of a `Qwen3_5TextConfig`, `Qwen3_5MoeTextConfig` or `Qwen3NextConfig`, or of a wrapper of one.

    For text the three rotary position streams of the multimodal model are one: plain rotary embedding.
    """
    hf = text_config(hf)
    attention = attention_of(hf, name, qk_norm=True, output_gate=True)
    delta = DeltaNet(
        required(hf, "linear_num_key_heads", name),
        required(hf, "linear_num_value_heads", name),
        required(hf, "linear_key_head_dim", name),
        required(hf, "linear_value_head_dim", name),
        hf.get("linear_conv_kernel_dim", 4),
    )
    count = required(hf, "num_hidden_layers", name)
    interval = hf.get("full_attention_interval", 4)
    kinds = hf.get("layer_types") or [
        "linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)
    ]
    layers = tuple(
        LayerSpec(attention if kind == "full_attention" else delta, _ffn(hf, name, i)) for i, kind in enumerate(kinds)
    )
    family = "qwen3_next" if hf.get("model_type") == "qwen3_next" else "qwen3_5"
    return model_of(hf, name, family, layers, norm_plus_one=True)


def _ffn(hf: dict[str, Any], name: str, layer: int) -> Ffn:
    step = hf.get("decoder_sparse_step") or 1
    if not hf.get("num_experts") or layer in (hf.get("mlp_only_layers") or []) or (layer + 1) % step:
        return DenseFfn(required(hf, "intermediate_size", name))
    return MoeFfn(
        hf["num_experts"],
        required(hf, "num_experts_per_tok", name),
        required(hf, "moe_intermediate_size", name),
        shared=hf.get("shared_expert_intermediate_size") or 0,
        shared_gate=True,
        renormalize=bool(hf.get("norm_topk_prob", True)),
    )
