"""The engine: requests in, token events out. Single-threaded; nothing happens outside `step`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from engine.cache import Cache, model_state_bytes, model_token_bytes, stored_dtype
from engine.config import EngineConfig, EngineError, Switches, switch_differences
from engine.layers.build import Build
from engine.loops import Loop, StepOutcomes
from engine.memory import free_memory, plan_memory, snapshot_slots
from engine.models.decoder import EMBEDDING, HEAD, Decoder, weight_bytes
from engine.pages import PagePool
from engine.prefix import PrefixIndex
from engine.promptcache import PromptCache
from engine.request import EngineInfo, Request, TokenEvent
from engine.scheduler import Outcome, Scheduler
from engine.stage import Stage
from engine.weights import DTYPES, WeightSource
from engine.weights.load import open_weights

# Switches that can change between two requests without touching weights or cache.
CHEAP_SWITCHES = frozenset({"loop", "decode_batching", "prefill", "prefill_batching"})


class Engine:
    """Made by `Engine.load`. Feed it with `add`, call `step` while `has_work`."""

    def __init__(self, config: EngineConfig) -> None:
        self._start(config)

    @staticmethod
    def load(config: EngineConfig) -> Engine:
        """Builds the model and everything around it; raises EngineError with one line for the user."""
        return Engine(config)

    def _start(self, config: EngineConfig) -> None:
        check(config)
        clock = _Clock()
        self.config = config
        device = torch.device(config.device)
        if device.type == "cuda":
            device = torch.device("cuda", device.index or 0)
            torch.cuda.set_device(device)
        dtype = DTYPES[config.dtype or ("bf16" if device.type == "cuda" else "fp32")]
        with clock.part("open"):
            opened = open_weights(config, device, dtype)
        self.model, self.tokenizer = opened.model, opened.tokenizer
        memory = plan_memory(self.model, config, dtype, free_memory(device))
        with clock.part("weights"), torch.inference_mode():
            decoder = self._build(opened.source, device, dtype)
        with clock.part("cache"):
            self._make_stage(decoder, memory.pages, device, dtype)
        with clock.part("graphs"):
            if config.graphs and device.type == "cuda":
                self.stage.capture(config.max_streams, config.switches.kernels)
        self._requests_seen = 0
        self._events: list[TokenEvent] = []
        self.info = self._describe(decoder, memory.pages, dtype, clock, opened.notes)

    def _build(self, source: WeightSource, device: torch.device, dtype: torch.dtype) -> Decoder:
        kernels, positions = self.config.switches.kernels, self.config.max_model_len
        decoder = Decoder(Build(self.model, source, device, dtype, kernels, positions))
        unused = source.unused()
        if unused:
            raise EngineError(
                f"{self.config.weights}: {len(unused)} tensors that {self.model.family} does not have, the first "
                f"'{unused[0]}'; is this checkpoint of another architecture?"
            )
        return decoder

    def _make_stage(self, decoder: Decoder, pages: int, device: torch.device, dtype: torch.dtype) -> None:
        config = self.config
        max_pages = -(-config.max_model_len // config.page_size)
        snapshots = snapshot_slots(self.model, config)
        prompt_cache = None
        self.pool = PagePool(pages)
        if config.switches.prompt_cache == "on":
            slots = range(config.max_streams + 1, config.max_streams + 1 + snapshots)
            self.pool.keeper = index = PrefixIndex(config.page_size, slots)
            prompt_cache = PromptCache(index, self.pool, recurrent=snapshots > 0)
        cache = Cache.allocate(
            [layer.mixer for layer in self.model.layers], pages, config.page_size, config.max_streams, max_pages,
            stored_dtype(config.switches.cache_dtype, dtype), dtype, device, snapshots,
            config.switches.cache == "contiguous",
        )  # fmt: skip
        self.stage = Stage(decoder, cache, device, config.max_streams, config.max_model_len)
        self.scheduler = Scheduler(
            self.pool, config.page_size, config.max_streams, config.max_model_len, config.prefill_tokens,
            config.switches, frozenset(self.model.eos_token_ids), prompt_cache,
        )  # fmt: skip
        self.loop = Loop(config.switches.loop, self.scheduler, self.stage)

    def _describe(
        self, decoder: Decoder, pages: int, dtype: torch.dtype, clock: _Clock, notes: tuple[str, ...]
    ) -> EngineInfo:
        total, step = weight_bytes(decoder)
        stored = stored_dtype(self.config.switches.cache_dtype, dtype)
        if stored == torch.float32:
            notes = (*notes, "the cache is kept in fp32, like the activations")
        return EngineInfo(
            model=self.model.name,
            device=_device_name(torch.device(self.config.device)),
            weight_bytes=total,
            step_weight_bytes=step,
            cache_bytes_per_token=model_token_bytes(self.model, stored),
            state_bytes_per_request=model_state_bytes(self.model, dtype),
            cache_tokens=(pages - 1) * self.config.page_size,
            quantized=_quantized(decoder),
            start_seconds=clock.parts,
            notes=notes,
        )

    # ------------------------------------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        """Queues a request; raises EngineError for one that can never run (empty, too long, a token out of range)."""
        bad = next((t for t in request.prompt if not 0 <= t < self.model.vocab), None)
        if bad is not None:
            raise EngineError(f"request '{request.id}': token {bad} is not in the vocabulary of {self.model.vocab}")
        self._requests_seen += 1
        seed = request.sampling.seed
        drawn = (self.config.seed * 1_000_003 + self._requests_seen) % 2**31
        self.scheduler.add(request, drawn if seed is None else seed % 2**63)

    def cancel(self, request_id: str) -> None:
        """Ends a request now; its last event comes with the next `step`. An unknown id is ignored."""
        outcome = self.scheduler.cancel(request_id)
        if outcome is not None:
            self._events.append(_event(outcome, time.monotonic(), None))

    def has_work(self) -> bool:
        return self.scheduler.has_work() or bool(self._events)

    @property
    def occupancy(self) -> tuple[int, int]:
        """(requests in the cache, requests that wait for room in it)"""
        return len(self.scheduler.running), len(self.scheduler.waiting)

    def step(self) -> list[TokenEvent]:
        """One scheduling iteration; blocks until the oldest step in flight is over. Empty when it made no token."""
        events, self._events = self._events, []
        done = self.loop.advance()
        if done is not None:
            events += _events(done, time.monotonic())
        if not self.scheduler.has_work():
            self.loop.drain()
        return events

    def set_switches(self, switches: Switches) -> None:
        """Changes the switches between requests: at once where nothing is stored differently, else by a new start."""
        if self.has_work():
            raise EngineError("switches can change only while no request runs")
        self.loop.drain()
        config = replace(self.config, switches=switches)
        changed = set(switch_differences(self.config.switches, switches))
        on_gpu = self.config.device.startswith("cuda")
        if not changed <= CHEAP_SWITCHES | ({"kernels"} if on_gpu else set()):
            check(config)
            self.close()
            self._start(config)
            return
        self.config = config
        if "kernels" in changed:
            self.stage.decoder.set_kernels(switches.kernels)
            if self.stage.graphs is not None:
                self.stage.capture(config.max_streams, switches.kernels)
        self.scheduler.switches = switches
        self.loop.kind = switches.loop

    def close(self) -> None:
        """Gives the memory back; the engine is of no further use."""
        self.loop.drain()
        del self.stage, self.loop
        if self.config.device.startswith("cuda"):
            torch.cuda.empty_cache()


def check(config: EngineConfig) -> None:
    """Refuses what cannot run before anything starts: EngineError with the reason."""
    switches = config.switches
    if config.stages != 1:
        raise EngineError(f"stages={config.stages}: this engine runs one stage")
    if switches.cache == "contiguous" and switches.prompt_cache == "on":
        raise EngineError("prompt_cache=on needs pages that requests can share; take cache=paged with it")
    if switches.cache == "contiguous" and config.cache_tokens is not None:
        longest = -(-config.max_model_len // config.page_size) * config.page_size
        if config.cache_tokens < longest:
            raise EngineError(
                f"cache=contiguous sets {longest} tokens aside for a stream, which a cache of {config.cache_tokens} "
                "has no room for; give more cache_tokens, a lower max_model_len, or cache=paged"
            )
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise EngineError(f"device '{config.device}': torch sees no NVIDIA GPU here; take device 'cpu'")
    if config.dtype not in (None, *DTYPES):
        raise EngineError(f"dtype '{config.dtype}': it takes {', '.join(DTYPES)}")
    for name in ("max_streams", "max_model_len", "page_size", "prefill_tokens"):
        if getattr(config, name) < 1:
            raise EngineError(f"{name} must be 1 or more, not {getattr(config, name)}")


class _Clock:
    """Seconds of each part of the start."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.parts[name] = round(time.monotonic() - begin, 3)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _quantized(decoder: Decoder) -> str:
    """Which matrices are 4-bit, in words."""
    linears = decoder.linears
    dense = [name for name, linear in linears.items() if not linear.quantized]
    if not dense:
        return "every matrix and the output head in 4 bits; embedding table and norms in 16 or 32 bits"
    if len(dense) == len(linears):
        return f"nothing: every matrix in {str(next(iter(linears.values())).weight.dtype).removeprefix('torch.')}"
    heads = {EMBEDDING, HEAD}
    kinds = sorted({part.split(".")[-1] for name in set(dense) - heads for part in name.split("+")})
    kinds += ["the output head"] if heads & set(dense) else []
    return f"every matrix in 4 bits but {', '.join(kinds)}"


def _event(outcome: Outcome, now: float, logprobs: tuple | None) -> TokenEvent:
    track = outcome.track
    tokens = () if outcome.token is None else (outcome.token,)
    cached = 0 if track.reported else track.cached_tokens or 0
    track.reported = True
    return TokenEvent(track.request.id, tokens, now, outcome.finished, cached, logprobs)


def _events(done: StepOutcomes, now: float) -> list[TokenEvent]:
    events = []
    for outcome in done.outcomes:
        row = None if done.logprobs is None else done.logprobs[outcome.index]
        events.append(_event(outcome, now, None if row is None else (row,)))
    return events
