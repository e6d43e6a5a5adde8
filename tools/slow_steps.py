"""A planted fault: an engine whose decode steps take longer by a known share, for trying the regression gate.

`tools/gpu_gate.sh` puts this file into the engine of the head that the gate must catch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

PAUSE_S = 0.5
"""Steps further apart than this were not one after the other: the engine had waited for requests."""


def gpu_rest() -> Callable[[float], None]:
    """A function that keeps the GPU's current stream busy for some seconds while the host goes on."""
    cycles = 20_000_000
    torch.cuda._sleep(cycles)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    per_second = cycles / (begin.elapsed_time(end) / 1000)
    return lambda seconds: torch.cuda._sleep(int(seconds * per_second))


def slowed(
    step: Callable[[Any], list[Any]],
    share: float,
    rest: Callable[[float], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[Any], list[Any]]:
    """`step` with a rest after it, so that steps one after the other take 1 + `share` of their time.

    The time between two steps, T, holds the rest of the one before: T = S + T * share / (1 + share) = S * (1 + share).
    """
    last = float("-inf")

    def slow_step(engine: Any) -> list[Any]:
        nonlocal last, rest
        if rest is None:
            rest = gpu_rest() if engine.config.device.startswith("cuda") else time.sleep
        events = step(engine)
        between, last = clock() - last, clock()
        if between < PAUSE_S and engine.has_work():
            rest(between * share / (1 + share))
        return events

    return slow_step
