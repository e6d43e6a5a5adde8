"""The models: the published ones by name, and every family by its `model_type`."""

from __future__ import annotations

import difflib
import importlib
import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.config import EngineError, ModelConfig

FAMILIES: dict[str, str] = {
    "llama": "llama",
    "qwen3": "qwen3",
    "mistral": "ministral3",
    "ministral3": "ministral3",
    "mistral3": "ministral3",
    "qwen3_moe": "qwen3_moe",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
    "qwen3_next": "qwen3_5",
    "glm4_moe_lite": "glm4_moe_lite",
    "gpt_oss": "gpt_oss",
}


def family(model_type: str) -> ModuleType:
    """The module of engine/models/ that serves a `model_type`: `config(hf, name)` and `canonical(tensor_name)`."""
    if model_type not in FAMILIES:
        raise EngineError(f"unknown architecture '{model_type}': the engine has {', '.join(sorted(FAMILIES))}")
    return importlib.import_module(f"engine.models.{FAMILIES[model_type]}")


@lru_cache(maxsize=1)
def catalogue_entries() -> dict[str, dict[str, Any]]:
    """engine/models/published.json: name -> entry (hf_id, family, aliases, parameters, bytes, config)."""
    return json.loads((Path(__file__).parent / "published.json").read_text())


def _key(name: str) -> str:
    """A spelling without what people vary: case, the owner, '-', '_', ' ', and '.' kept for versions."""
    return name.split("/")[-1].lower().replace("-", "").replace("_", "").replace(" ", "")


@lru_cache(maxsize=1)
def _spellings() -> dict[str, str]:
    spellings = {}
    for name, entry in catalogue_entries().items():
        for spelling in (entry["hf_id"], *entry["aliases"], name):
            spellings[_key(spelling)] = name
    return spellings


def published_name(name: str) -> str:
    """The published spelling of a model's name; raises EngineError with the nearest names."""
    found = _spellings().get(_key(name))
    if found is None:
        near = difflib.get_close_matches(_key(name), _spellings(), n=3, cutoff=0.5)
        names = list(dict.fromkeys(_spellings()[key] for key in near))
        if names:
            raise EngineError(f"unknown model '{name}': did you mean {' or '.join(names)}?")
        raise EngineError(f"unknown model '{name}': the models are {', '.join(sorted(catalogue_entries()))}")
    return found


def published(name: str) -> dict[str, Any]:
    """The entry of a published model, by its name or an alias, however it is spelled."""
    return catalogue_entries()[published_name(name)]


def from_hf(hf: dict[str, Any], name: str) -> ModelConfig:
    """The geometry that a Hugging Face config.json describes."""
    model_type = hf.get("model_type")
    if model_type is None:
        raise EngineError(f"{name}: config.json names no model_type; is this a language model's folder?")
    return family(model_type).config(hf, name)


def model_config(name_or_path: str) -> ModelConfig:
    """The geometry of a published model (`Qwen3-8B`), of one cut to its first layers (`Qwen3-8B@layers=2`), or of the
    model in a folder with a config.json."""
    base, _, cut = name_or_path.partition("@layers=")
    folder = Path(base)
    if (folder / "config.json").is_file():
        config = from_hf(json.loads((folder / "config.json").read_text()), folder.name)
    else:
        name = published_name(base)
        entry = catalogue_entries()[name]
        config = from_hf({"model_type": entry["family"], **entry["config"]}, name)
    return _first_layers(config, cut) if cut else config


def _first_layers(config: ModelConfig, cut: str) -> ModelConfig:
    if not cut.isdigit() or not 1 <= int(cut) <= len(config.layers):
        raise EngineError(f"'{config.name}@layers={cut}': layers must be a number from 1 to {len(config.layers)}")
    return replace(config, name=f"{config.name}@layers={cut}", layers=config.layers[: int(cut)])
