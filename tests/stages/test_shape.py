"""The pipeline's shape on stages that only sleep: the scheduler and the loop are the engine's own."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field

import pytest

from engine.config import Switches
from engine.loops import Loop
from engine.pages import PagePool
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler, StepPlan

PIECE = 64


@dataclass
class SleepingResult:
    plan: StepPlan
    over: threading.Event
    logprobs: None = None

    def ready(self):
        return self.over.is_set()

    def wait(self):
        self.over.wait()
        return [7] * sum(piece.samples for piece in self.plan.pieces)


@dataclass
class SleepingStages:
    """Stage 0 sleeps in `launch`, as a CPU computes there; each other one in a thread. `log`: (stage, step) started."""

    stages: int
    seconds: float
    resident: bool = True
    log: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self):
        self.links = [queue.Queue() for _ in range(self.stages - 1)]
        for stage in range(1, self.stages):
            threading.Thread(target=self._work, args=(stage,), daemon=True).start()

    def launch(self, plan, banned):
        result = SleepingResult(plan, threading.Event())
        self._run(0, result)
        self._hand_over(0, result)
        return result

    def _work(self, stage):
        while True:
            result = self.links[stage - 1].get()
            self._run(stage, result)
            self._hand_over(stage, result)

    def _run(self, stage, result):
        self.log.append((stage, result.plan.step))
        time.sleep(self.seconds)

    def _hand_over(self, stage, result):
        if stage == self.stages - 1:
            result.over.set()
        else:
            self.links[stage].put(result)


def read(stages, prompts, length, seconds, **switches):
    """Reads prompts of `length` tokens in pieces of 64; seconds that it took and what the stages did."""
    runner = SleepingStages(stages, seconds)
    chosen = Switches().with_(switches)
    scheduler = Scheduler(PagePool(1000), 64, 64, 4096, PIECE, chosen, stages=stages)
    loop = Loop(chosen.loop, scheduler, runner, stages)
    for i in range(prompts):
        scheduler.add(Request(str(i), [1] * length, SamplingParams(max_tokens=1, ignore_eos=True)), 0)
    begin = time.monotonic()
    while scheduler.has_work():
        loop.advance()
    return time.monotonic() - begin, runner.log


@pytest.mark.parametrize(("stages", "prompts", "pieces"), [(2, 1, 12), (4, 1, 12), (4, 6, 2), (3, 4, 3)])
def test_pieces_fill_the_stages(stages, prompts, pieces):
    ideal = (stages + prompts * pieces - 1) * 0.03
    took = min(read(stages, prompts, pieces * PIECE, 0.03)[0] for _ in range(2))
    assert ideal * 0.99 < took < ideal * 1.05


def test_a_request_that_comes_during_a_step_does_not_wait_for_its_end():
    runner = SleepingStages(2, 0.1)
    scheduler = Scheduler(PagePool(1000), 64, 8, 4096, PIECE, Switches(), stages=2)
    loop = Loop("inverted", scheduler, runner, 2)
    scheduler.add(Request("early", [1] * PIECE, SamplingParams(max_tokens=1, ignore_eos=True)), 0)
    assert loop.advance() is None
    scheduler.add(Request("late", [1] * PIECE, SamplingParams(max_tokens=1, ignore_eos=True)), 0)
    done = loop.advance()
    assert [outcome.track.request.id for outcome in done.outcomes] == ["early"]
    assert [(track.request.id, track.in_flight) for track in scheduler.running] == [("late", 1)]
    while scheduler.has_work():
        loop.advance()


def test_sequential_pieces_wait_for_the_last_stage():
    _, log = read(3, 2, 2 * PIECE, 0.002, prefill="sequential")
    assert log == [(stage, step) for step in range(4) for stage in range(3)]


def test_whole_prompts_go_one_after_the_other():
    _, log = read(3, 3, 5 * PIECE, 0.002, prefill="whole", loop="driven", prefill_batching="off")
    assert log == [(stage, step) for step in range(3) for stage in range(3)]


def test_requests_that_step_alone_fill_the_stages():
    """Driven, one request a step: two requests keep two stages busy, and none has two steps in flight."""
    runner = SleepingStages(2, 0.002)
    chosen = Switches("standard", "off", "driven", "whole", "off")
    scheduler = Scheduler(PagePool(1000), 64, 8, 4096, PIECE, chosen, stages=2)
    loop = Loop("driven", scheduler, runner, 2)
    for i in range(2):
        scheduler.add(Request(str(i), [1] * 8, SamplingParams(max_tokens=6, ignore_eos=True)), 0)
    most, alone = 0, True
    while scheduler.has_work():
        loop.advance()
        most = max(most, sum(track.in_flight for track in scheduler.running))
        alone = alone and all(track.in_flight <= 1 for track in scheduler.running)
    assert alone and most >= 1
    decodes = [entry for entry in runner.log if entry[1] >= 2]
    assert decodes.index((0, 3)) < decodes.index((0, 4))


def test_decoding_requests_go_round_in_as_many_groups_as_stages():
    scheduler = Scheduler(PagePool(1000), 64, 8, 4096, 512, Switches(), stages=2)
    for i in range(5):
        scheduler.add(Request(str(i), [1] * 8, SamplingParams(max_tokens=6, ignore_eos=True)), 0)
    scheduler.complete(scheduler.plan(), [7] * 5)
    plans = [scheduler.plan() for _ in range(4)]
    groups = [[piece.track.request.id for piece in plan.pieces] for plan in plans]
    assert groups == [["0", "1", "2"], ["0", "3", "4"], ["1", "2", "3"], ["4"]]
    assert scheduler.plan() is None


def test_a_decode_is_not_launched_ahead_while_prompts_are_read():
    scheduler = Scheduler(PagePool(1000), 64, 8, 4096, 64, Switches(), stages=2)
    scheduler.add(Request("a", [1] * 8, SamplingParams(max_tokens=9, ignore_eos=True)), 0)
    scheduler.complete(scheduler.plan(), [7])
    scheduler.add(Request("b", [1] * 256, SamplingParams(max_tokens=9, ignore_eos=True)), 0)
    plans = [scheduler.plan() for _ in range(4)]
    assert ["decode" if plan.decode else "prompt" for plan in plans] == ["decode", "prompt", "prompt", "prompt"]
