"""The published models' figures against those that follow from the engine's own geometry and stored forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.cache import model_token_bytes
from engine.config import DeltaNet, DenseFfn, LatentAttention, LayerSpec, ModelConfig, MoeFfn
from engine.memory import BYTES_PER_4BIT_WEIGHT, ffn_weights, mixer_weights
from engine.models import catalogue_entries, model_config
from engine.weights import kept_in_16bit

MXFP4_BYTES = 0.5 + 1 / 32


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen3-32B", "Qwen3.6-27B", "Qwen3-Coder-30B", "Qwen3.6-35B-A3B"])
def test_bytes_read_for_a_token(name):
    """All in 4 bits: within 2.5% of the published shapes' sum (routers are kept in 16 bits here)."""
    found = matrix_bytes(model_config(name), every_expert=False)
    assert found == pytest.approx(catalogue_entries()[name]["decode_bytes_4bit"], rel=0.025)


def test_published_precision_of_gpt_oss():
    """MXFP4 experts and 16 bits elsewhere: 3.71 GB a token, 13.8 GB in all (the published files are 13.8 GB)."""
    config = model_config("gpt-oss-20b")
    table = 2 * config.vocab * config.hidden
    assert matrix_bytes(config, every_expert=False) == pytest.approx(3.71e9, rel=0.005)
    assert matrix_bytes(config, every_expert=True) + table == pytest.approx(13.76e9, rel=0.005)


@pytest.mark.parametrize(
    ("name", "of_16bit", "of_8bit"),
    [("Llama-3.1-8B", 131072, 67584), ("GLM-4.7-Flash", 54144, 27448), ("Qwen3.6-27B", 65536, 33280)],
)
def test_cache_bytes(name, of_16bit, of_8bit):
    """The 8-bit forms hold one float32 scale a head (or a latent) for each of k and v besides."""
    config = model_config(name)
    assert (model_token_bytes(config, torch.bfloat16), model_token_bytes(config, torch.int8)) == (of_16bit, of_8bit)


def matrix_bytes(config: ModelConfig, every_expert: bool) -> int:
    """Bytes of the matrices, the output head counted: all of them, or (`every_expert` False) those one token reads."""
    layers = sum(_layer_bytes(spec, config, every_expert) for spec in config.layers)
    return int(layers + config.vocab * config.hidden * _weight_bytes(config, "lm_head"))


def _layer_bytes(spec: LayerSpec, config: ModelConfig, every_expert: bool) -> float:
    module = "linear_attn" if isinstance(spec.mixer, DeltaNet) else "self_attn"
    mixer = mixer_weights(spec.mixer, config.hidden) * _weight_bytes(config, module)
    if isinstance(spec.mixer, LatentAttention):
        up = spec.mixer.kv_rank * spec.mixer.heads * (spec.mixer.nope_dim + spec.mixer.value_dim)
        mixer += up * (2 - _weight_bytes(config, module))  # held dense by head
    return mixer + _ffn_bytes(spec.ffn, config, every_expert)


def _ffn_bytes(ffn: DenseFfn | MoeFfn, config: ModelConfig, every_expert: bool) -> float:
    if isinstance(ffn, DenseFfn):
        return ffn_weights(ffn, config.hidden) * _weight_bytes(config, "mlp")
    router = config.hidden * (ffn.experts + ffn.shared_gate)
    experts = ffn_weights(replace(ffn, shared=0), config.hidden) - router
    shared = 3 * config.hidden * ffn.shared
    share = 1.0 if every_expert else ffn.top_k / ffn.experts
    expert_bytes = MXFP4_BYTES if ffn.codes == "mxfp4" else _weight_bytes(config, "mlp.experts")
    return experts * share * expert_bytes + shared * _weight_bytes(config, "mlp.shared_expert") + 2 * router


def _weight_bytes(config: ModelConfig, name: str) -> float:
    return 2.0 if kept_in_16bit(config, name) else BYTES_PER_4BIT_WEIGHT
