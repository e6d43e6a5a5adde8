"""What a model takes, from its geometry alone: refused before anything is allocated when it does not fit."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.cache import model_state_bytes, model_token_bytes, stored_dtype
from engine.config import (
    Attention,
    DeltaNet,
    DenseFfn,
    EngineConfig,
    EngineError,
    Ffn,
    LatentAttention,
    Mixer,
    ModelConfig,
    MoeFfn,
)

SHARED_SNAPSHOTS = 8
WORKSPACE = 1 << 30
CPU_WORKSPACE = 256 << 20
CPU_CACHE_SHARE = 4
"""Unasked, the cache takes at most one part in so many of a CPU's free memory: others live there too."""
BYTES_PER_4BIT_WEIGHT = 0.5 + 2 / 128
CACHE_TO_AHEAD = 15
"""Two unpacked matrices are held where the cache still gets that many times their bytes."""

_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0}


def mixer_weights(mixer: Mixer, hidden: int) -> int:
    """Elements of a mixer's matrices."""
    if isinstance(mixer, Attention):
        queries = mixer.heads * (2 if mixer.output_gate else 1)
        return hidden * mixer.head_dim * (queries + 2 * mixer.kv_heads + mixer.heads)
    if isinstance(mixer, DeltaNet):
        key, value = mixer.key_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim
        return hidden * (2 * key + 2 * value + 2 * mixer.value_heads + value)
    assert isinstance(mixer, LatentAttention)
    query = hidden * mixer.q_rank + mixer.q_rank * mixer.heads * (mixer.nope_dim + mixer.rope_dim)
    latent = hidden * (mixer.kv_rank + mixer.rope_dim) + mixer.kv_rank * mixer.heads * (
        mixer.nope_dim + mixer.value_dim
    )
    return query + latent + mixer.heads * mixer.value_dim * hidden


def ffn_weights(ffn: Ffn, hidden: int) -> int:
    """Elements of a feed-forward part's matrices, all experts counted."""
    if isinstance(ffn, DenseFfn):
        return 3 * hidden * ffn.intermediate
    assert isinstance(ffn, MoeFfn)
    shared_gate = hidden if ffn.shared_gate else 0
    return hidden * (3 * (ffn.experts * ffn.intermediate + ffn.shared) + ffn.experts) + shared_gate


def largest_matrix(config: ModelConfig) -> int:
    """Elements of the largest matrix that prompts of many rows unpack (experts are never unpacked whole)."""
    hidden = config.hidden

    def mixer(spec: Mixer) -> int:
        if isinstance(spec, Attention):
            return hidden * spec.head_dim * (spec.heads * (2 if spec.output_gate else 1) + 2 * spec.kv_heads)
        if isinstance(spec, DeltaNet):
            return hidden * 2 * (spec.key_heads * spec.key_dim + spec.value_heads * (spec.value_dim + 1))
        down = hidden * (spec.q_rank + spec.kv_rank + spec.rope_dim)
        up = spec.q_rank * spec.heads * (spec.nope_dim + spec.rope_dim)
        return max(down, up, spec.heads * spec.value_dim * hidden)

    def ffn(spec: Ffn) -> int:
        return hidden * (2 * spec.intermediate if isinstance(spec, DenseFfn) else spec.shared)

    return max(max(mixer(spec.mixer), ffn(spec.ffn)) for spec in config.layers)


def model_weights(config: ModelConfig) -> tuple[int, int]:
    """(elements of the matrices a step multiplies by, output head included; elements of the embedding table)."""
    layers = sum(
        mixer_weights(spec.mixer, config.hidden) + ffn_weights(spec.ffn, config.hidden) for spec in config.layers
    )
    table = config.vocab * config.hidden
    return layers + table, table


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes, and the pages that the cache gets (the null page counted). `ahead`: whether two unpacked matrices of long
    prompts are held as well (engine/kernels/w4_ahead.py)."""

    weights: int
    state: int
    cache: int
    pages: int
    ahead: bool = False


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be taken on the device now; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        line = next((x for x in meminfo.read_text().splitlines() if x.startswith("MemAvailable")), None)
        return None if line is None else int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def plan_memory(
    model: ModelConfig,
    config: EngineConfig,
    activations: torch.dtype,
    free: int | None,
    layers: tuple[int, int] | None = None,
) -> MemoryPlan:
    """How the memory is divided; raises EngineError, naming what would fit, when the model does not.

    `layers`: the (first, last) that a stage holds, `last` exclusive; the whole model by default.
    """
    first, last = layers or (0, len(model.layers))
    embeds, samples = first == 0, last == len(model.layers)
    model = replace(model, layers=model.layers[first:last])
    matrices, table = model_weights(model)
    per_weight = _BYTES.get(config.switches.weights_dtype, BYTES_PER_4BIT_WEIGHT)
    shared = model.tied_embeddings and samples and _BYTES.get(config.switches.weights_dtype) == activations.itemsize
    weights = int((matrices if samples else matrices - table) * per_weight)
    weights += 0 if shared or not embeds else table * activations.itemsize
    if config.weights != "random" and config.switches.weights_dtype == "int4" and not model.tied_embeddings and samples:
        weights += int(table * (activations.itemsize - per_weight))  # checkpoints keep a dense head as it is
    stored = stored_dtype(config.switches.cache_dtype, activations)
    state = model_state_bytes(model, activations) * (config.max_streams + 1 + snapshot_slots(model, config))
    page_bytes = model_token_bytes(model, stored) * config.page_size
    longest = -(-config.max_model_len // config.page_size)
    wanted = _wanted_pages(config)
    if free is None or page_bytes == 0:
        return MemoryPlan(weights, state, wanted * page_bytes, wanted)
    on_gpu = config.device.startswith("cuda")
    workspace = WORKSPACE if on_gpu else CPU_WORKSPACE
    room = free - weights - state - workspace
    needed = wanted if config.cache_tokens is not None else longest + 1
    unpacked = 2 * largest_matrix(model) * activations.itemsize
    ahead = on_gpu and config.switches.weights_dtype == "int4"
    ahead = ahead and room - unpacked >= max(needed * page_bytes, CACHE_TO_AHEAD * unpacked)
    affordable = (room - unpacked if ahead else room) // page_bytes
    if affordable < needed:
        raise EngineError(_does_not_fit(model, config, weights, state, needed * page_bytes, workspace, free))
    if not on_gpu and config.cache_tokens is None:
        affordable = min(affordable, max(free // CPU_CACHE_SHARE // config.stages // page_bytes, needed))
    pages = min(wanted, affordable)
    return MemoryPlan(weights, state, pages * page_bytes, pages, ahead)


def snapshot_slots(model: ModelConfig, config: EngineConfig) -> int:
    """Slots for snapshots of recurrent states: one for each stream's answer, and some that prompts leave."""
    if config.switches.prompt_cache == "off" or model_state_bytes(model, torch.float32) == 0:
        return 0
    return config.max_streams + SHARED_SNAPSHOTS


def _wanted_pages(config: EngineConfig) -> int:
    """Pages for cache_tokens, or for every stream at full length; one more each for the null page."""
    if config.cache_tokens is not None:
        return -(-config.cache_tokens // config.page_size) + 1
    return config.max_streams * -(-config.max_model_len // config.page_size) + 1


def _does_not_fit(
    model: ModelConfig, config: EngineConfig, weights: int, state: int, cache: int, workspace: int, free: int
) -> str:
    gib = 1 << 30
    parts = f"weights {weights / gib:.1f} + cache {(cache + state) / gib:.1f} + workspace {workspace / gib:.1f} GiB"
    if weights + workspace > free and config.switches.weights_dtype != "int4":
        mend = "take weights_dtype=int4"
    elif weights + workspace > free:
        elements = int(max(free - workspace, 0) / (BYTES_PER_4BIT_WEIGHT + 0.05))
        mend = f"models of up to about {elements / 1e9:.1f} billion parameters in 4 bits fit here"
    else:
        per_token = cache / max(_cache_tokens(config), 1)
        mend = f"about {int((free - weights - state - workspace) / per_token):,} tokens of cache fit here"
    return f"{model.name} does not fit {config.device}: {parts} are needed, {free / gib:.1f} GiB are free; {mend}"


def _cache_tokens(config: EngineConfig) -> int:
    return config.cache_tokens if config.cache_tokens is not None else config.max_model_len
