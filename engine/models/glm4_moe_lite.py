"""GLM-4.7-Flash: latent attention, a dense first layer, sigmoid router with a selection bias, one shared expert."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from engine.config import DenseFfn, EngineError, LatentAttention, LayerSpec, ModelConfig, MoeFfn
from engine.models._hf import model_of, plain_names, required, rope_of, text_config


def canonical(tensor_name: str) -> str | None:
    name = plain_names(tensor_name)
    return None if name is None else name.replace(".shared_experts.", ".shared_expert.")


def config(hf: dict[str, Any], name: str) -> ModelConfig:
    """The geometry of a `Glm4MoeLiteConfig`. The two latent norms keep eps 1e-6 whatever `rms_norm_eps` says."""
    hf = text_config(hf)
    if (hf.get("n_group") or 1) != 1:
        raise EngineError(f"{name}: routing by groups of experts (n_group = {hf['n_group']}) is not supported")
    if hf.get("q_lora_rank") is None:
        raise EngineError(f"{name}: latent attention without a query rank (q_lora_rank) is not supported")
    if hf.get("attention_bias"):
        raise EngineError(f"{name}: biases in latent attention (attention_bias) are not supported")
    count = required(hf, "num_hidden_layers", name)
    mixer, moe = _attention(hf, name), _moe(hf, name)
    dense = DenseFfn(required(hf, "intermediate_size", name))
    kinds = hf.get("mlp_layer_types") or ["dense"] * hf.get("first_k_dense_replace", 1) + ["sparse"] * count
    layers = tuple(LayerSpec(mixer, moe if kind == "sparse" else dense) for kind in kinds[:count])
    return model_of(hf, name, "glm4_moe_lite", layers)


def _attention(hf: dict[str, Any], name: str) -> LatentAttention:
    nope, rope_dim = required(hf, "qk_nope_head_dim", name), required(hf, "qk_rope_head_dim", name)
    given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    rope = rope_of({**hf, "partial_rotary_factor": None}, rope_dim, name)
    rope = replace(rope, rotary_dim=rope_dim, interleaved=bool(hf.get("rope_interleave", True)))
    scale = (nope + rope_dim) ** -0.5
    if rope.kind == "yarn" and given.get("mscale_all_dim"):
        scale *= (0.1 * given["mscale_all_dim"] * math.log(given["factor"]) + 1.0) ** 2
    return LatentAttention(
        required(hf, "num_attention_heads", name), hf["q_lora_rank"], required(hf, "kv_lora_rank", name), nope,
        rope_dim, required(hf, "v_head_dim", name), rope, scale,
    )  # fmt: skip


def _moe(hf: dict[str, Any], name: str) -> MoeFfn:
    width = required(hf, "moe_intermediate_size", name)
    return MoeFfn(
        required(hf, "n_routed_experts", name),
        required(hf, "num_experts_per_tok", name),
        width,
        shared=width * (hf.get("n_shared_experts") or 0),
        router="sigmoid",
        selection_bias=True,
        renormalize=bool(hf.get("norm_topk_prob", True)),
        routed_scale=hf.get("routed_scaling_factor", 1.0),
    )
