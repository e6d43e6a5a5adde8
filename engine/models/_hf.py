"""What the families share in reading a Hugging Face config.json."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from engine.config import Attention, DenseFfn, EngineError, LayerSpec, ModelConfig, Rope


def text_config(hf: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config: itself, or `text_config` of a multimodal wrapper.

    The wrapper's `tie_word_embeddings` governs where it has one.
    """
    if "text_config" not in hf:
        return hf
    inner = dict(hf["text_config"])
    for key in ("tie_word_embeddings", "eos_token_id", "quantization_config"):
        if hf.get(key) is not None:
            inner[key] = hf[key]
    return inner


def required(hf: dict[str, Any], key: str, name: str) -> Any:
    if hf.get(key) is None:
        raise EngineError(f"{name}: its config.json has no '{key}'")
    return hf[key]


def rope_of(hf: dict[str, Any], head_dim: int, name: str) -> Rope:
    """The rotary embedding, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = given.get("rope_type", given.get("type", "default"))
    theta = float(given.get("rope_theta") or hf.get("rope_theta") or 1e4)
    fraction = given.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    rotary_dim = int(head_dim * fraction)
    if kind in ("default", "mrope"):
        return Rope("default", theta, rotary_dim)
    original = given.get("original_max_position_embeddings") or hf.get("original_max_position_embeddings")
    original = int(original or hf["max_position_embeddings"])
    if kind == "llama3":
        return Rope(
            "llama3", theta, rotary_dim, factor=given["factor"], low_freq_factor=given["low_freq_factor"],
            high_freq_factor=given["high_freq_factor"], original_max=original,
        )  # fmt: skip
    if kind == "yarn":
        return Rope(
            "yarn", theta, rotary_dim, factor=given["factor"], original_max=original,
            beta_fast=given.get("beta_fast") or 32.0, beta_slow=given.get("beta_slow") or 1.0,
            truncate=given.get("truncate", True), cos_sin_scale=_yarn_scale(given),
            query_scale_beta=given.get("llama_4_scaling_beta") or 0.0,
        )  # fmt: skip
    raise EngineError(f"{name}: rope type '{kind}' is not supported (default, llama3 and yarn are)")


def _yarn_scale(given: dict[str, Any]) -> float:
    """YaRN's attention factor: given, or 0.1 m ln(factor) + 1 for mscale over the same for mscale_all_dim."""
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])

    def scale(m: float) -> float:
        return 1.0 if given["factor"] <= 1 else 0.1 * m * math.log(given["factor"]) + 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return scale(given["mscale"]) / scale(given["mscale_all_dim"])
    return scale(1.0)


def eos_ids(hf: dict[str, Any]) -> tuple[int, ...]:
    eos = hf.get("eos_token_id")
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)


def head_dim_of(hf: dict[str, Any], name: str) -> int:
    return hf.get("head_dim") or required(hf, "hidden_size", name) // required(hf, "num_attention_heads", name)


def attention_of(hf: dict[str, Any], name: str, **extra: Any) -> Attention:
    """Plain grouped attention; `extra` sets the fields in which a family differs."""
    heads, head_dim = required(hf, "num_attention_heads", name), head_dim_of(hf, name)
    bias = bool(hf.get("attention_bias", False))
    given = {"rope": rope_of(hf, head_dim, name), "bias": bias, "output_bias": bias, **extra}
    return Attention(heads, hf.get("num_key_value_heads") or heads, head_dim, scale=head_dim**-0.5, **given)


def dense_decoder(
    hf: dict[str, Any], name: str, family: str, attention: Attention, windows: list[int | None] | None = None
) -> ModelConfig:
    """A decoder whose layers all have `attention` (with the window of each layer, if given) and a dense ffn."""
    if hf.get("mlp_bias"):
        raise EngineError(f"{name}: biases in the feed-forward part (mlp_bias) are not supported")
    count = required(hf, "num_hidden_layers", name)
    ffn = DenseFfn(required(hf, "intermediate_size", name))
    layers = tuple(LayerSpec(with_window(attention, windows[i] if windows else None), ffn) for i in range(count))
    return model_of(hf, name, family, layers)


def with_window(attention: Attention, window: int | None) -> Attention:
    return replace(attention, window=window)


def model_of(hf: dict[str, Any], name: str, family: str, layers: tuple[LayerSpec, ...], **extra: Any) -> ModelConfig:
    """The fields every family reads alike; `extra` sets the rest of ModelConfig."""
    return ModelConfig(
        name=name, family=family, hidden=required(hf, "hidden_size", name), vocab=required(hf, "vocab_size", name),
        layers=layers, norm_eps=hf.get("rms_norm_eps", 1e-6), max_positions=hf.get("max_position_embeddings", 4096),
        tied_embeddings=bool(hf.get("tie_word_embeddings", False)), eos_token_ids=eos_ids(hf), **extra,
    )  # fmt: skip


# Stored beside weights, used by none of the engine's layers: rotary frequencies, scales for 8-bit activations or cache.
_NOT_WEIGHTS = ("rotary_emb.inv_freq", ".input_scale", ".activation_scale", ".k_scale", ".v_scale")


def plain_names(tensor_name: str) -> str | None:
    """The canonical name of a checkpoint's tensor (`model.layers...`, `lm_head...`), or None for one that is no part
    of the language model (vision tower, projector, multi-token prediction, stored rotary frequencies)."""
    name = tensor_name.replace("model.language_model.", "model.", 1)
    if name.startswith("language_model."):
        name = name.removeprefix("language_model.")
    foreign = ("vision_tower.", "multi_modal_projector.", "visual.", "mtp.", "model.vision", "model.visual")
    if name.startswith((*foreign, "model.multi_modal_projector.")) or name.endswith(_NOT_WEIGHTS):
        return None
    return name
