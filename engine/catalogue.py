"""The published models as a table: what each weighs, reads for a token and keeps in its cache, in 4-bit form."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.cache import model_state_bytes, model_token_bytes
from engine.config import DenseFfn, LatentAttention, LayerSpec, ModelConfig, MoeFfn
from engine.memory import BYTES_PER_4BIT_WEIGHT, WORKSPACE, ffn_weights, mixer_weights
from engine.models import catalogue_entries, model_config
from engine.weights import kept_in_16bit

MXFP4_BYTES = 0.5 + 1 / 32


@dataclass(frozen=True)
class CatalogueRow:
    """One model. Bytes are of the stored form that synthetic 4-bit weights take; `fits`: on one GPU of this machine,
    None where it has none."""

    name: str
    parameters: int
    active_parameters: int
    weight_bytes: int
    token_bytes: int
    cache_bytes_16bit: int
    cache_bytes_8bit: int
    state_bytes: int
    fits: bool | None


def catalogue() -> list[CatalogueRow]:
    """Every published model, in the order of engine/models/published.json."""
    room = largest_gpu()
    return [_row(name, entry, room) for name, entry in catalogue_entries().items()]


def largest_gpu() -> int | None:
    """Bytes of the largest GPU's memory, or None without one."""
    if not torch.cuda.is_available():
        return None
    return max(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))


def _row(name: str, entry: dict, room: int | None) -> CatalogueRow:
    config = model_config(name)
    weights = matrix_bytes(config, every_expert=True) + config.vocab * config.hidden * 2
    return CatalogueRow(
        name=name,
        parameters=entry["parameters"],
        active_parameters=entry["active_parameters"],
        weight_bytes=weights,
        token_bytes=matrix_bytes(config, every_expert=False),
        cache_bytes_16bit=model_token_bytes(config, torch.bfloat16),
        cache_bytes_8bit=model_token_bytes(config, torch.int8),
        state_bytes=model_state_bytes(config, torch.bfloat16),
        fits=None if room is None else weights + WORKSPACE < room,
    )


def matrix_bytes(config: ModelConfig, every_expert: bool) -> int:
    """Bytes of the matrices, the output head counted: all of them, or (`every_expert` False) those one token reads."""
    layers = sum(_layer_bytes(spec, config, every_expert) for spec in config.layers)
    return int(layers + config.vocab * config.hidden * _weight_bytes(config, "lm_head"))


def _layer_bytes(spec: LayerSpec, config: ModelConfig, every_expert: bool) -> float:
    module = "linear_attn" if type(spec.mixer).__name__ == "DeltaNet" else "self_attn"
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
