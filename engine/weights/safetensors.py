"""A Hugging Face folder, or a Hub id that is fetched into one: config.json, *.safetensors, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.config import EngineError, ModelConfig
from engine.models import family, from_hf
from engine.models._hf import eos_ids, text_config
from engine.weights.checkpoint import CheckpointSource
from engine.weights.ready_made import reader_for

INDEX = "model.safetensors.index.json"


class SafetensorsStore:
    """See `engine.weights.checkpoint.TensorStore`. Files are mapped, not read, until a tensor is wanted."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._handles = {}
        self._file_of: dict[str, str] = {}
        self._open = ExitStack()
        for file in _files(folder):
            handle = self._map(file)
            self._handles[file.name] = handle
            self._file_of |= dict.fromkeys(handle.keys(), file.name)
        self._check_index(folder)

    def _map(self, file: Path) -> Any:
        try:
            return self._open.enter_context(safe_open(file, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise EngineError(f"{file}: cannot be read ({error}); is the download complete?") from None

    def _check_index(self, folder: Path) -> None:
        if not (folder / INDEX).exists():
            return
        wanted = read_json(folder / INDEX)["weight_map"]
        lost = next((name for name in wanted if name not in self._file_of), None)
        if lost is not None:
            raise EngineError(f"{folder}: tensor '{lost}' of {INDEX} is missing; file {wanted[lost]} lacks it")

    def names(self) -> Sequence[str]:
        return list(self._file_of)

    def read(self, name: str) -> Tensor:
        file = self._file_of[name]
        try:
            return self._handles[file].get_tensor(name)
        except SafetensorError as error:
            raise EngineError(f"{self.where}/{file}: tensor '{name}' cannot be read ({error})") from None


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.exists():
        files = sorted({folder / name for name in read_json(index)["weight_map"].values()})
        lost = next((file for file in files if not file.exists()), None)
        if lost is not None:
            raise EngineError(f"{lost}: the file is missing; is the download complete?")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        hint = "; convert its .bin files to safetensors" if list(folder.glob("*.bin")) else ""
        raise EngineError(f"{folder}: no .safetensors file there{hint}")
    return files


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise EngineError(f"{path}: the file is missing; is this a model's folder?") from None
    except ValueError as error:
        raise EngineError(f"{path}: is no valid JSON ({error})") from None


def folder_config(folder: Path, name: str) -> ModelConfig:
    """The geometry of the model in a folder, with the end-of-text tokens of its generation_config.json."""
    hf = read_json(folder / "config.json")
    config = from_hf(hf, name)
    generation = folder / "generation_config.json"
    if not generation.exists():
        return config
    stops = dict.fromkeys((*config.eos_token_ids, *eos_ids(read_json(generation))))
    return replace(config, eos_token_ids=tuple(stops))


def open_folder(
    folder: Path, config: ModelConfig, weights_dtype: str, device: torch.device, dtype: torch.dtype
) -> tuple[CheckpointSource, tuple[str, ...]]:
    """The weight source of a folder and what the report must say about it."""
    hf = read_json(folder / "config.json")
    reader = reader_for(text_config(hf).get("quantization_config"), str(folder))
    canonical = family(hf["model_type"]).canonical
    source = CheckpointSource(SafetensorsStore(folder), canonical, reader, config, weights_dtype, device, dtype)
    notes = []
    if source.skipped:
        notes.append(f"{len(source.skipped)} tensors outside the language model were skipped ({source.skipped[0]} ...)")
    return source, tuple(notes)


def fetch(hub_id: str) -> Path:
    """Downloads a model from the Hugging Face Hub (or finds it in the local cache) and returns its folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja", "*.txt"]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise EngineError(f"weights '{hub_id}': no such folder, and the Hub does not give it ({reason})") from None
