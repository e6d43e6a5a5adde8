"""What drives the steps: the two ends of one question.

`driven`: the host drives. It launches a step, waits for it, reads the sampled tokens, and only then prepares the next
step, which gets its tokens from the host. This is what a straightforward server does, without sleeps or needless
copies: steps are captured graphs here too, the token is chosen by a kernel on the device, and four bytes a request come
back, not the logits.

`inverted`: the device drives. A step is a captured graph; the token that it samples stays on the device, where the
next step finds it, so the host launches step n + 1 while step n runs and reads the tokens of step n behind it. The
host learns of an end-of-text token one step late: that one step is wasted, its token dropped, its pages held back
until it is over.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, Protocol

from engine.request import SamplingParams
from engine.sampler import TokenLogprobs
from engine.scheduler import Outcome, Scheduler, StepPlan

PATIENCE_S = 0.002
"""How long a loop with room for more steps waits for the oldest one before it looks for new requests."""

POLL_S = 100e-6


class Result(Protocol):
    """A step in flight."""

    plan: StepPlan
    logprobs: list[TokenLogprobs | None] | None

    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> list[int]:
        """The sampled tokens; `logprobs` is set from then on."""
        ...


class Runner(Protocol):
    """What executes steps: a stage that is the whole model, or a pipeline of stages."""

    resident: bool

    def launch(self, plan: StepPlan, banned: list[tuple[int, frozenset[int]]]) -> Result: ...


def steps_ahead(loop: str, stages: int) -> int:
    """Most steps in flight."""
    return stages if loop == "driven" else 2 * stages


@dataclass
class StepOutcomes:
    """The outcomes of one step and the log probabilities of its sampled rows, where they were asked for."""

    outcomes: list[Outcome]
    logprobs: list[TokenLogprobs | None] | None


@dataclass
class Loop:
    """Keeps up to `steps_ahead(kind, stages)` steps in flight."""

    kind: Literal["driven", "inverted"]
    scheduler: Scheduler
    runner: Runner
    stages: int = 1
    _flying: deque[Result] = field(default_factory=deque)

    def advance(self) -> StepOutcomes | None:
        """Launches what can be launched, then waits for the oldest step.

        None when nothing is in flight, or when there is room for another step and the oldest is not over within
        `PATIENCE_S`: a request that comes meanwhile must not wait for it.
        """
        self.runner.resident = self.kind == "inverted"
        while self._has_room():
            plan = self.scheduler.plan()
            if plan is None:
                break
            self._flying.append(self.runner.launch(plan, self._banned(plan)))
            if self._flying[0].ready():
                break
        if not self._flying or (self._has_room() and not self._is_over(self._flying[0])):
            return None
        result = self._flying.popleft()
        tokens = result.wait()
        return StepOutcomes(self.scheduler.complete(result.plan, tokens), result.logprobs)

    def _has_room(self) -> bool:
        return len(self._flying) < steps_ahead(self.kind, self.stages)

    def _is_over(self, step: Result) -> bool:
        give_up = time.monotonic() + PATIENCE_S
        while not step.ready():
            if time.monotonic() > give_up:
                return False
            time.sleep(POLL_S)
        return True

    def drain(self) -> None:
        """Waits for the steps in flight, so that what they held back is free; for when no request is left."""
        while self._flying:
            result = self._flying.popleft()
            self.scheduler.complete(result.plan, result.wait())

    def _banned(self, plan: StepPlan) -> list[tuple[int, frozenset[int]]]:
        """(sampled row, stop tokens) of the requests that have stop tokens and not made `min_tokens` yet."""
        sampling = [piece for piece in plan.pieces if piece.samples]
        return [
            (row, stops)
            for row, piece in enumerate(sampling)
            if _made_before(piece.start + piece.count, piece.track.prompt_length, piece.track.request.sampling)
            and (stops := self.scheduler.stops(piece.track))
        ]


def _made_before(position: int, prompt_length: int, sampling: SamplingParams) -> bool:
    """Whether the token at `position` belongs to the first min_tokens of the answer."""
    return position - prompt_length < sampling.min_tokens
