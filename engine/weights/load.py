"""From what the user named to a geometry, a weight source and a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.config import EngineConfig, EngineError, ModelConfig
from engine.models import model_config
from engine.tokens import Tokenizer, load_tokenizer
from engine.weights import WeightSource
from engine.weights.synthetic import SyntheticSource


@dataclass(frozen=True)
class Opened:
    """A model ready to be built. `notes`: what the report must say (parts skipped, what the file held)."""

    model: ModelConfig
    source: WeightSource
    tokenizer: Tokenizer | None
    notes: tuple[str, ...] = ()


def open_weights(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> Opened:
    """Opens the weights that `config.weights` names; raises EngineError.

    A checkpoint brings its own geometry; `config.model` must then be empty, the same place, or a model of that shape.
    """
    if config.weights == "random":
        model = model_config(config.model)
        return Opened(model, SyntheticSource(model, config.switches.weights_dtype, device, dtype, config.seed), None)
    path = Path(config.weights).expanduser()
    if path.suffix == ".gguf":
        return _open_gguf(path, config, device, dtype)
    return _open_folder(path, config, device, dtype)


def _open_gguf(path: Path, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> Opened:
    from engine.weights.gguf import GgufFile, open_gguf
    from engine.weights.gguf_tokens import gguf_tokenizer

    if not path.is_file():
        raise EngineError(f"weights '{path}': no such file")
    file = GgufFile(path)
    model = _agreed(file.geometry(path.stem), config)
    source, notes = open_gguf(path, model, file, config.switches.weights_dtype, device, dtype)
    return Opened(model, source, gguf_tokenizer(file), notes)


def _open_folder(path: Path, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> Opened:
    from engine.weights.safetensors import fetch, folder_config, open_folder

    folder = path if path.is_dir() else fetch(_hub_id(config.weights))
    name = config.weights if folder is not path else path.resolve().name
    model = _agreed(folder_config(folder, name), config)
    source, notes = open_folder(folder, model, config.switches.weights_dtype, device, dtype)
    return Opened(model, source, load_tokenizer(folder, model.eos_token_ids), notes)


def _hub_id(weights: str) -> str:
    if weights.count("/") != 1 or weights.startswith((".", "/", "~")):
        raise EngineError(
            f"weights '{weights}': no such folder; give 'random', a folder, a .gguf file or a Hub id (owner/name)"
        )
    return weights


def _agreed(found: ModelConfig, config: EngineConfig) -> ModelConfig:
    """The checkpoint's geometry under the name that the user gave, if that name is of the same shape."""
    if not config.model or config.model == config.weights:
        return found
    named = model_config(config.model)
    shapes = [(c.hidden, c.vocab, len(c.layers)) for c in (found, named)]
    if shapes[0] != shapes[1]:
        raise EngineError(
            f"weights '{config.weights}' (hidden {found.hidden}, vocabulary {found.vocab}, {len(found.layers)} layers) "
            f"are not of model '{config.model}' ({named.hidden}, {named.vocab}, {len(named.layers)})"
        )
    return replace(found, name=named.name)
