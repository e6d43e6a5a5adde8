"""Llama 3.1, 3.2, 3.3 and everything of that shape (SmolLM2)."""

from __future__ import annotations

from typing import Any

from engine.config import ModelConfig
from engine.models._hf import attention_of, dense_decoder, plain_names, text_config

canonical = plain_names


def config(hf: dict[str, Any], name: str) -> ModelConfig:
    """The geometry of a `LlamaConfig`."""
    hf = text_config(hf)
    return dense_decoder(hf, name, "llama", attention_of(hf, name))
