"""Running the engine with a prompt cache in tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.batch import LayerCache
from engine.engine import Engine
from engine.request import Request, SamplingParams


@dataclass
class Answer:
    """What came of a request. `cached`: the cached_tokens of its first event."""

    tokens: list[int] = field(default_factory=list)
    cached: int | None = None
    finished: str | None = None


def serve(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int = 8, **sampling) -> list[Answer]:
    """All requests at once. Afterwards every page is free or kept, every slot and every snapshot accounted for."""
    serve.count = getattr(serve, "count", 0) + 1
    names = [f"{serve.count}-{i}" for i in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add(Request(name, prompt, SamplingParams(max_tokens=tokens, **{"ignore_eos": True, **sampling})))
    answers = {name: Answer() for name in names}
    while engine.has_work():
        for event in engine.step():
            answer = answers[event.request_id]
            if event.tokens and answer.cached is None:
                answer.cached = event.cached_tokens
            else:
                assert event.cached_tokens == 0
            answer.tokens += event.tokens
            answer.finished = event.finished
    check_rest(engine)
    return [answers[name] for name in names]


def check_rest(engine: Engine) -> None:
    """With no request left nothing is owned and nothing is lost."""
    pool, scheduler = engine.pool, engine.scheduler
    assert pool.free == pool.capacity
    assert not any(pool._references)
    assert sorted(scheduler._free_slots) == list(range(1, scheduler.max_streams + 1))
    cache = scheduler.prompt_cache
    if cache is None:
        assert pool.kept == 0
        return
    index = cache.index
    assert pool.kept == len(index) == len(index._by_page)
    slots = index._free_snapshots + [node.snapshot for node in index._snapshots]
    first = engine.config.max_streams + 1
    states = engine.stage.cache.states
    assert sorted(slots) == (list(range(first, states[0].shape[1])) if states else [])


def poison(engine: Engine) -> None:
    """Fills every page that nobody owns or keeps with NaN (the scales, where values have 8 bits)."""

    def fill(pages):
        for layer in engine.stage.cache.layers:
            if isinstance(layer, LayerCache):
                held = (layer.k, layer.v) if layer.k_scale is None else (layer.k_scale, layer.v_scale)
                for tensor in held:
                    tensor[pages] = math.nan

    fill(list(range(engine.pool.capacity + 1)))
    engine.pool.on_free = fill


def poison_states(engine: Engine) -> None:
    """Fills every recurrent state with NaN, those of snapshot slots too."""
    for states in engine.stage.cache.states:
        states.fill_(math.nan)
