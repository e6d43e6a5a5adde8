"""The engine: requests in, token events out. Single-threaded; nothing happens outside `step`."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from engine.assemble import Assembled, StageFacts, alone, assemble, quantized_in_words
from engine.cache import model_state_bytes, model_token_bytes, stored_dtype
from engine.config import EngineConfig, EngineError, Switches, switch_differences
from engine.loops import Loop, StepOutcomes
from engine.memory import snapshot_slots
from engine.models import model_config
from engine.pages import PagePool
from engine.prefix import PrefixIndex
from engine.promptcache import PromptCache
from engine.request import EngineInfo, Request, TokenEvent
from engine.scheduler import Outcome, Scheduler
from engine.split import attention_ratio, stage_layers
from engine.weights import DTYPES

if TYPE_CHECKING:
    from engine.pipeline import Pipeline

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
        self.config = config
        self.pipeline: Pipeline | None = None
        device = torch.device(config.device)
        if config.stages == 1:
            own = assemble(config, alone(device))
            facts, runner = own.facts, own.stage
        else:
            from engine.pipeline import Pipeline

            self.pipeline = runner = Pipeline(config)
            own, facts = runner.own, runner.facts
        self.model, self.tokenizer, self.stage = own.model, own.tokenizer, own.stage
        self.pool = PagePool(own.pages)
        self.scheduler = Scheduler(
            self.pool, config.page_size, config.max_streams, config.max_model_len, config.prefill_tokens,
            config.switches, frozenset(self.model.eos_token_ids), self._prompt_cache(), config.stages,
            attention_ratio(self.model),
        )  # fmt: skip
        self.loop = Loop(config.switches.loop, self.scheduler, runner, config.stages)
        self._requests_seen = 0
        self._events: list[TokenEvent] = []
        self.info = self._describe(own, facts)

    def _prompt_cache(self) -> PromptCache | None:
        if self.config.switches.prompt_cache == "off":
            return None
        first, snapshots = self.config.max_streams + 1, snapshot_slots(self.model, self.config)
        self.pool.keeper = index = PrefixIndex(self.config.page_size, range(first, first + snapshots))
        return PromptCache(index, self.pool, recurrent=snapshots > 0)

    def _describe(self, own: Assembled, facts: StageFacts) -> EngineInfo:
        stored = stored_dtype(self.config.switches.cache_dtype, own.dtype)
        notes = own.notes
        if stored == torch.float32:
            notes = (*notes, "the cache is kept in fp32, like the activations")
        if self.pipeline is not None:
            notes = (*notes, self.pipeline.described)
        return EngineInfo(
            model=self.model.name,
            device=_device_name(own.stage.device),
            weight_bytes=facts.weight_bytes,
            step_weight_bytes=facts.step_weight_bytes,
            cache_bytes_per_token=model_token_bytes(self.model, stored),
            state_bytes_per_request=model_state_bytes(self.model, own.dtype),
            cache_tokens=(own.pages - 1) * self.config.page_size,
            quantized=quantized_in_words(facts),
            start_seconds=own.seconds,
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

    def requests(self) -> list[str]:
        """The ids of the requests that have not ended."""
        return self.scheduler.requests()

    @property
    def occupancy(self) -> tuple[int, int]:
        """(requests in the cache, requests that wait for room in it)"""
        return len(self.scheduler.running), len(self.scheduler.waiting)

    def step(self) -> list[TokenEvent]:
        """One scheduling iteration: waits for the oldest step in flight, briefly where another could be launched.

        Empty when no token came of it; new requests are taken up by the next call.
        """
        events, self._events = self._events, []
        done = self.loop.advance()
        if done is not None:
            events += _events(done, time.monotonic())
        if not self.scheduler.has_work():
            self.loop.drain()
            if self.pipeline is not None:
                self.pipeline.write_timeline()
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
            (self.pipeline or self.stage).set_kernels(switches.kernels)
        self.scheduler.switches = switches
        self.loop.kind = switches.loop

    def close(self) -> None:
        """Gives the memory back; the engine is of no further use."""
        with suppress(EngineError):
            self.loop.drain()
        if self.pipeline is not None:
            self.pipeline.close()
        self.pipeline = None
        del self.stage, self.loop
        if self.config.device.startswith("cuda"):
            torch.cuda.empty_cache()


def check(config: EngineConfig) -> None:
    """Refuses what cannot run before anything starts: EngineError with the reason."""
    switches = config.switches
    if config.stages < 1:
        raise EngineError(f"stages={config.stages}: a model has at least one stage")
    if config.stages > 1 and config.model not in ("", config.weights):
        stage_layers(model_config(config.model), config.stages)  # before as many processes are started
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


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


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
