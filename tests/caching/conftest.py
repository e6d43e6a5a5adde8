"""Tiny checkpoints: softmax attention (qwen3), DeltaNet beside it (qwen3_5), latent attention (glm4_moe_lite)."""

from __future__ import annotations

import pytest
import torch

from tests.engine.conftest import reference

torch.set_num_threads(1)
FAMILIES = ("qwen3", "qwen3_5", "glm4_moe_lite", "gpt_oss")


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Family -> the folder of its checkpoint."""
    made = {}
    for key in FAMILIES:
        made[key] = str(tmp_path_factory.mktemp("caching") / key)
        reference(key).save_pretrained(made[key])
    return made
