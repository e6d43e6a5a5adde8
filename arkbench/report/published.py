"""The published tables, and how far each published figure was from the limit of the GPU it was measured on."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from arkbench.paths import published_dir
from arkbench.published import tests

PACKAGE = Path(__file__).resolve().parents[1]
PUBLISHED_GPU = "RTX 5090"
RTX_5090_BYTES_S = 1792e9  # memory bandwidth of NVIDIA's data sheet
NOTE_MODELS = {"fused-kernels": "Qwen3.8-27B", "pipelined-prefill": "Qwen3.5-122B-A10B"}


@cache
def table(name: str) -> pd.DataFrame:
    """A published table by file name; an empty cell (not published) is NaN."""
    return pd.read_csv(published_dir() / name)


@cache
def texts(name: str) -> list[dict[str, str]]:
    """The rows of a published table as they were printed; an empty cell is ''."""
    return pd.read_csv(published_dir() / name, dtype=str, keep_default_na=False).to_dict("records")


def place(note: str) -> str:
    """What a note's figures were measured on: `RTX 5090`, `4 × RTX 5090`."""
    held = tests().notes[note]
    return held.gpu if held.gpus == 1 else f"{held.gpus} × {held.gpu}"


@cache
def _models() -> dict[str, dict[str, Any]]:
    entries = json.loads((PACKAGE.parent / "engine" / "models" / "published.json").read_text(encoding="utf-8"))
    return {name: entry for key, entry in entries.items() for name in (key, *entry["aliases"])}


def canonical(model: str) -> str:
    """One spelling for a model's aliases (`Qwen3.6-35B` and `Qwen3.6-35B-A3B` are one)."""
    for name, entry in _models().items():
        if name == model:
            return entry["aliases"][0] if entry["aliases"] else name
    return model


def published_limit_fraction(model: str, decode_tok_s: float | None, streams: float) -> tuple[float | None, bool]:
    """Fraction of the memory limit that a published decode figure reached on its RTX 5090s, and whether it is a floor.

    limit = streams x 1,792 GB/s / bytes of 4-bit weights one token needs. GPUs that hold parts of a model take turns
    on a token, so their number does not raise it. Cache reads are not counted, nor the further experts that a batch
    of a mixture-of-experts model reads: both would raise the fraction, hence the floor.
    """
    entry = _models().get(model)
    if entry is None or decode_tok_s is None:
        return None, False
    limit = streams * RTX_5090_BYTES_S / entry["decode_bytes_4bit"]
    mixture = entry["active_parameters"] < entry["parameters"]
    return decode_tok_s / limit, mixture and streams > 1


def model_names() -> list[str]:
    """The published models, one spelling each."""
    return list(dict.fromkeys(canonical(name) for name in _models()))
