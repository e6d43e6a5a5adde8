"""Mistral, Ministral-3 and Devstral Small 2: Llama with an optional window; Ministral-3 scales q by its position."""

from __future__ import annotations

from typing import Any

from engine.config import ModelConfig
from engine.models._hf import attention_of, dense_decoder, plain_names, text_config

canonical = plain_names


def config(hf: dict[str, Any], name: str) -> ModelConfig:
    """The geometry of a `MistralConfig`, a `Ministral3Config`, or a `Mistral3Config` wrapper around one."""
    hf = text_config(hf)
    attention = attention_of(hf, name, bias=False, output_bias=False)
    windows = [hf.get("sliding_window")] * hf["num_hidden_layers"]
    return dense_decoder(hf, name, "ministral3", attention, windows)
