"""From what the user named to a geometry, a weight source and a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.config import EngineConfig, ModelConfig
from engine.models import model_config
from engine.tokens import Tokenizer
from engine.weights import WeightSource
from engine.weights.synthetic import SyntheticSource


@dataclass(frozen=True)
class Opened:
    """A model ready to be built. `notes`: what the report must say (parts skipped, precision kept)."""

    model: ModelConfig
    source: WeightSource
    tokenizer: Tokenizer | None
    notes: tuple[str, ...] = ()


def open_weights(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> Opened:
    """Opens the weights that `config.weights` names; raises EngineError."""
    model = model_config(config.model)
    source = SyntheticSource(model, config.switches.weights_dtype, device, dtype, config.seed)
    return Opened(model, source, None)
