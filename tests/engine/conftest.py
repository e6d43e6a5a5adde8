"""Tiny models of every dense family, with weights that hide no mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

ORACLES = json.loads((Path(__file__).parents[1] / "data" / "tiny_oracles.json").read_text())
DENSE = ("llama", "smollm2(llama)", "qwen3", "mistral", "ministral3")


def reference(key: str, **overrides):
    """The transformers model of a tiny configuration, float32, every vector perturbed away from ones and zeros."""
    import transformers

    entry = ORACLES[key]
    torch.manual_seed(hash_of(key))
    kwargs = {**entry["kwargs"], **overrides}
    config = getattr(transformers, entry["config_class"])(**kwargs, attn_implementation="eager")
    model = getattr(transformers, entry["model_class"])(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() == 1:
                parameter.copy_(parameter + 0.2 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5 * 1.5)
    return model


def hash_of(key: str) -> int:
    return sum(map(ord, key))


@pytest.fixture(scope="session")
def references():
    """key -> transformers model, each made once."""
    return {key: reference(key) for key in DENSE}


@pytest.fixture(scope="session")
def checkpoints(references, tmp_path_factory):
    """key -> folder written by save_pretrained."""
    folders = {}
    for key, model in references.items():
        folders[key] = tmp_path_factory.mktemp("checkpoint") / key.strip(")").replace("(", "-")
        model.save_pretrained(folders[key])
    return folders
