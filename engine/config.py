"""What a model is (geometry), how the engine runs it (switches), and the presets that reproduce releases.

Everything here is frozen data: it travels between processes and into `run.json` unchanged.
This module imports no torch.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_type_hints


class EngineError(Exception):
    """A mistake of the user's that the engine found; the message is one line with the mend."""


# ---------------------------------------------------------------------------------------------- geometry


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of one layer.

    `kind`: "default", "llama3" or "yarn". `rotary_dim` values of each head are rotated, the rest pass through.
    `interleaved`: pairs are (2i, 2i+1) instead of (i, i + rotary_dim/2).
    `cos_sin_scale` multiplies cos and sin (YaRN's attention factor).
    `query_scale_beta`: after the rotation, q times 1 + beta * ln(1 + floor(pos / original_max)) (Ministral-3).
    """

    kind: Literal["default", "llama3", "yarn"] = "default"
    theta: float = 1e4
    rotary_dim: int = 0
    interleaved: bool = False
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    cos_sin_scale: float = 1.0
    query_scale_beta: float = 0.0


@dataclass(frozen=True)
class Attention:
    """Softmax attention with grouped key/value heads over a paged cache."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    scale: float
    qk_norm: bool = False
    window: int | None = None
    sinks: bool = False
    bias: bool = False
    output_bias: bool = False
    output_gate: bool = False


@dataclass(frozen=True)
class DeltaNet:
    """Gated DeltaNet: a recurrent fp32 state [value_heads, key_dim, value_dim] and `conv` - 1 past columns."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int = 4


@dataclass(frozen=True)
class LatentAttention:
    """MLA: the cache holds kv_rank latents and rope_dim rotated values a token, shared by all heads."""

    heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope: Rope
    scale: float
    latent_eps: float = 1e-6


@dataclass(frozen=True)
class DenseFfn:
    """down(act(gate(x)) * up(x))."""

    intermediate: int


@dataclass(frozen=True)
class MoeFfn:
    """Mixture of experts. `shared` is the width of the expert that every token visits (0: none).

    `codes`: the 4-bit form in which the published checkpoint holds the experts (see engine/quant.py).
    """

    experts: int
    top_k: int
    intermediate: int
    shared: int = 0
    shared_gate: bool = False
    router: Literal["softmax", "sigmoid", "topk_softmax"] = "softmax"
    renormalize: bool = True
    router_bias: bool = False
    selection_bias: bool = False
    routed_scale: float = 1.0
    bias: bool = False
    clamp: float | None = None
    alpha: float = 1.0
    interleaved_gate_up: bool = False
    codes: Literal["int4", "mxfp4"] = "int4"


Mixer = Attention | DeltaNet | LatentAttention
Ffn = DenseFfn | MoeFfn


@dataclass(frozen=True)
class LayerSpec:
    mixer: Mixer
    ffn: Ffn


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: `x += mixer(norm(x)); x += ffn(norm(x))` for each layer, final norm, output head.

    `family` names the file in engine/models/. `norm_plus_one`: norms multiply by (1 + w).
    `keep_16bit`: names of the linear layers (as engine/models/ names them) that a published 4-bit checkpoint of
    this model keeps in 16 bits; synthetic weights follow it.
    """

    name: str
    family: str
    hidden: int
    vocab: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tied_embeddings: bool
    max_positions: int
    norm_plus_one: bool = False
    embedding_scale: float = 1.0
    keep_16bit: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()


# ---------------------------------------------------------------------------------------------- switches


@dataclass(frozen=True)
class Switches:
    """One field a technique; every field changes speed (or stated precision), never the meaning of an answer."""

    kernels: Literal["standard", "fused"] = "fused"
    decode_batching: Literal["off", "on"] = "on"
    loop: Literal["driven", "inverted"] = "inverted"
    prefill: Literal["whole", "sequential", "pipelined"] = "pipelined"
    prefill_batching: Literal["off", "on"] = "on"
    cache: Literal["contiguous", "paged"] = "paged"
    cache_dtype: Literal["bf16", "fp16", "fp8", "int8"] = "bf16"
    prompt_cache: Literal["off", "on"] = "off"
    weights_dtype: Literal["int4", "bf16", "fp16", "fp32"] = "int4"

    @staticmethod
    def choices() -> dict[str, tuple[str, ...]]:
        """Every switch with its values, in the order in which they are printed."""
        return {name: get_args(values) for name, values in get_type_hints(Switches).items()}

    def with_(self, values: dict[str, str]) -> Switches:
        """These switches with some of them set; raises EngineError naming an unknown switch or value."""
        choices = self.choices()
        for name, value in values.items():
            if name not in choices:
                raise EngineError(f"unknown switch '{name}': the switches are {', '.join(choices)}")
            if value not in choices[name]:
                raise EngineError(f"switch '{name}' cannot be '{value}': it takes {' or '.join(choices[name])}")
        return replace(self, **values)  # type: ignore[arg-type]

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


PRESETS: dict[str, Switches] = {
    "ark-1.0": Switches("standard", "off", "driven", "whole", "off"),
    "ark-1.1": Switches("standard", "off", "driven", "whole", "off"),
    "ark-2.0": Switches("fused", "on", "inverted", "sequential", "on"),
    "ark-2.1": Switches("fused", "on", "inverted", "pipelined", "on"),
    "best": Switches("fused", "on", "inverted", "pipelined", "on"),
}


# ---------------------------------------------------------------------------------------------- the engine


def _seconds(variable: str, default: float) -> float:
    """A time from the environment; raises EngineError where it is none."""
    text = os.environ.get(variable)
    try:
        seconds = default if text is None else float(text)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise EngineError(f"{variable}={text}: it takes a number of seconds above 0")
    return seconds


@dataclass(frozen=True)
class EngineConfig:
    """How one engine is started.

    `weights`: "random", a folder, a GGUF file or a Hub id. `device`: "cuda", "cuda:1" or "cpu".
    `dtype`: activations; None takes bf16 on a GPU and fp32 on a CPU. `cache_tokens`: room of the KV cache in tokens
    (None: what memory allows, on a CPU a quarter of what is free, or max_streams * max_model_len where that is less).
    `max_model_len`: longest prompt plus answer. `prefill_tokens`: most prompt tokens in one step. `join_timeout_s`: how
    long the processes of the stages may take to find each other; `silence_s`: after how long without a sign of life a
    stage is taken to be gone.
    `timeline`: a file to which is appended which stage worked on which piece when.
    """

    model: str
    weights: str = "random"
    device: str = "cpu"
    dtype: str | None = None
    switches: Switches = field(default_factory=Switches)
    max_streams: int = 64
    max_model_len: int = 4096
    cache_tokens: int | None = None
    page_size: int = 64
    prefill_tokens: int = 8192
    stages: int = 1
    seed: int = 0
    graphs: bool = True
    join_timeout_s: float = field(default_factory=lambda: _seconds("ARKBENCH_JOIN_TIMEOUT", 30.0))
    silence_s: float = field(default_factory=lambda: _seconds("ARKBENCH_STAGE_TIMEOUT", 15.0))
    timeline: str | None = None


def switch_differences(a: Switches, b: Switches) -> dict[str, tuple[str, str]]:
    """The switches in which two sets differ: name -> (value in a, value in b)."""
    pairs = ((f.name, getattr(a, f.name), getattr(b, f.name)) for f in fields(Switches))
    return {name: (x, y) for name, x, y in pairs if x != y}


def to_plain(value: Any) -> Any:
    """A dataclass of this module as plain dicts and lists, each spec with its kind, for run.json."""
    if hasattr(value, "__dataclass_fields__"):
        plain = {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
        return {"kind_of": type(value).__name__, **plain} if isinstance(value, Mixer | Ffn) else plain
    if isinstance(value, tuple | list):
        return [to_plain(v) for v in value]
    return value
