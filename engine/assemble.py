"""Builds what one process holds of a model: its layers, their cache, the captured steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.cache import Cache, stored_dtype
from engine.config import EngineConfig, EngineError, ModelConfig
from engine.layers.build import Build
from engine.layers.linear import unpack_ahead
from engine.loops import steps_ahead
from engine.memory import free_memory, plan_memory, snapshot_slots
from engine.models.decoder import EMBEDDING, HEAD, Decoder, weight_bytes
from engine.split import stage_layers
from engine.stage import Stage
from engine.tokens import Tokenizer
from engine.weights import DTYPES, WeightSource
from engine.weights.load import open_weights


class Clock:
    """Seconds of each part of a start."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.parts[name] = round(time.monotonic() - begin, 3)


@dataclass(frozen=True)
class StageFacts:
    """What one stage says of itself. `dense`, `quantized`: names of its linear layers of either kind; `dtype`: of the
    dense ones, where there are any."""

    weight_bytes: int
    step_weight_bytes: int
    dense: tuple[str, ...]
    quantized: tuple[str, ...]
    dtype: str


@dataclass(frozen=True)
class Assembled:
    """`model`: the whole model's geometry, whatever part of it `stage` holds. `pages`: of the cache, the null page
    counted."""

    stage: Stage
    model: ModelConfig
    tokenizer: Tokenizer | None
    notes: tuple[str, ...]
    pages: int
    dtype: torch.dtype
    facts: StageFacts
    seconds: dict[str, float]


@dataclass(frozen=True)
class Place:
    """Where a stage stands. `free`: bytes that it may take; `agree` turns the pages that this stage can have into the
    number that all have."""

    device: torch.device
    rank: int = 0
    free: int | None = None
    agree: Callable[[int], int] = lambda pages: pages


def activation_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    return DTYPES[config.dtype or ("bf16" if device.type == "cuda" else "fp32")]


def alone(device: torch.device) -> Place:
    """The place of a model that is not split."""
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
    return Place(device, free=free_memory(device))


def assemble(config: EngineConfig, place: Place) -> Assembled:
    """Raises EngineError with one line for the user."""
    clock, device = Clock(), place.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dtype = activation_dtype(config, device)
    with clock.part("open"):
        opened = open_weights(config, device, dtype)
    layers = stage_layers(opened.model, config.stages)[place.rank]
    plan = plan_memory(opened.model, config, dtype, place.free, layers)
    pages = place.agree(plan.pages)
    with clock.part("weights"), torch.inference_mode():
        decoder = _decoder(config, opened.model, opened.source, device, dtype, layers)
        if plan.ahead:
            # The head multiplies the sampled rows alone.
            unpack_ahead([x for x in decoder.linears.values() if x is not decoder.head], dtype, device)
    with clock.part("cache"):
        stage = _stage(config, decoder, pages, device, dtype)
    with clock.part("graphs"):
        if config.graphs and device.type == "cuda":
            stage.capture(config.switches.kernels)
    facts = _facts(decoder)
    return Assembled(stage, opened.model, opened.tokenizer, opened.notes, pages, dtype, facts, clock.parts)


def _decoder(
    config: EngineConfig,
    model: ModelConfig,
    source: WeightSource,
    device: torch.device,
    dtype: torch.dtype,
    layers: tuple[int, int],
) -> Decoder:
    decoder = Decoder(Build(model, source, device, dtype, config.switches.kernels, config.max_model_len), *layers)
    unused = [name for name in source.unused() if not _elsewhere(name, decoder)]
    if unused:
        raise EngineError(
            f"{config.weights}: {len(unused)} tensors that {model.family} does not have, the first "
            f"'{unused[0]}'; is this checkpoint of another architecture?"
        )
    return decoder


def _elsewhere(name: str, decoder: Decoder) -> bool:
    """Whether a tensor belongs to another stage's part of the model."""
    if decoder.is_first and decoder.is_last:
        return False
    if name.startswith("model.layers."):
        index = name.split(".")[2]
        return index.isdigit() and int(index) < len(decoder.config.layers) and not (
            decoder.first <= int(index) < decoder.last
        )  # fmt: skip
    return name.startswith((EMBEDDING, HEAD, "model.norm"))


def _stage(config: EngineConfig, decoder: Decoder, pages: int, device: torch.device, dtype: torch.dtype) -> Stage:
    max_pages = -(-config.max_model_len // config.page_size)
    cache = Cache.allocate(
        [layer.mixer for layer in decoder.config.layers[decoder.first : decoder.last]], pages, config.page_size,
        config.max_streams, max_pages, stored_dtype(config.switches.cache_dtype, dtype), dtype, device,
        snapshot_slots(decoder.config, config), config.switches.cache == "contiguous",
    )  # fmt: skip
    depth = steps_ahead("inverted", config.stages) + 2
    return Stage(decoder, cache, device, dtype, config.max_streams, config.max_model_len, depth)


def _facts(decoder: Decoder) -> StageFacts:
    total, step = weight_bytes(decoder)
    dense = {name: linear for name, linear in decoder.linears.items() if not linear.quantized}
    quantized = tuple(name for name in decoder.linears if name not in dense)
    dtypes = [str(linear.weight.dtype).removeprefix("torch.") for linear in dense.values() if hasattr(linear, "weight")]
    return StageFacts(total, step, tuple(dense), quantized, dtypes[0] if dtypes else "")


def joined_facts(parts: Sequence[StageFacts]) -> StageFacts:
    """Of all stages together."""
    return StageFacts(
        sum(part.weight_bytes for part in parts),
        sum(part.step_weight_bytes for part in parts),
        tuple(name for part in parts for name in part.dense),
        tuple(name for part in parts for name in part.quantized),
        next((part.dtype for part in parts if part.dtype), ""),
    )


def quantized_in_words(facts: StageFacts) -> str:
    """Which matrices are 4-bit."""
    if not facts.dense:
        return "every matrix and the output head in 4 bits; embedding table and norms in 16 or 32 bits"
    if not facts.quantized:
        return f"nothing: every matrix in {facts.dtype}"
    heads = {EMBEDDING, HEAD}
    kinds = sorted({part.split(".")[-1] for name in set(facts.dense) - heads for part in name.split("+")})
    kinds += ["the output head"] if heads & set(facts.dense) else []
    return f"every matrix in 4 bits but {', '.join(kinds)}"
