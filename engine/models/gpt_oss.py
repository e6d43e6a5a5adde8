"""gpt-oss: sinks, a window of 128 tokens in every other layer, biases, YaRN, clamped SwiGLU, experts in MXFP4."""

from __future__ import annotations

from typing import Any

from engine.config import LayerSpec, ModelConfig, MoeFfn
from engine.models._hf import attention_of, model_of, plain_names, required, text_config, with_window


def canonical(tensor_name: str) -> str | None:
    name = plain_names(tensor_name)
    return None if name is None else name.replace(".mlp.router.", ".mlp.gate.")


def config(hf: dict[str, Any], name: str) -> ModelConfig:
    """The geometry of a `GptOssConfig`. Published in 4 bits it keeps all but the experts in 16."""
    hf = text_config(hf)
    attention = attention_of(hf, name, sinks=True)
    moe = MoeFfn(
        required(hf, "num_local_experts", name),
        required(hf, "num_experts_per_tok", name),
        required(hf, "intermediate_size", name),
        router="topk_softmax",
        router_bias=True,
        bias=True,
        clamp=hf.get("swiglu_limit", 7.0),
        alpha=hf.get("swiglu_alpha", 1.702),
        interleaved_gate_up=True,
        codes="mxfp4",
    )
    count = required(hf, "num_hidden_layers", name)
    kinds = hf.get("layer_types") or ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]
    window = required(hf, "sliding_window", name)
    layers = tuple(
        LayerSpec(with_window(attention, window if kind == "sliding_attention" else None), moe) for kind in kinds
    )
    keep = ("self_attn", "embed_tokens", "lm_head")
    return model_of(hf, name, "gpt_oss", layers, keep_16bit=keep)
