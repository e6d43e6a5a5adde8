"""Qwen3, dense: Llama with a norm on every head of q and k."""

from __future__ import annotations

from typing import Any

from engine.config import ModelConfig
from engine.models._hf import attention_of, dense_decoder, plain_names, text_config

canonical = plain_names


def config(hf: dict[str, Any], name: str) -> ModelConfig:
    """The geometry of a `Qwen3Config`; layers from `max_window_layers` on slide where `use_sliding_window` is set."""
    hf = text_config(hf)
    windows = None
    if hf.get("use_sliding_window") and hf.get("sliding_window"):
        first = hf.get("max_window_layers", 0)
        windows = [hf["sliding_window"] if i >= first else None for i in range(hf["num_hidden_layers"])]
    return dense_decoder(hf, name, "qwen3", attention_of(hf, name, qk_norm=True), windows)
