"""Loads: which request of a cell is sent when. Distinct prompts come from `prompts.py`."""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from arkbench import prompts
from arkbench.scenario import Cell, Limits
from arkbench.targets.base import Load, PlannedRequest

CLOSED_LOOP_TOK_S = 400.0
"""The stream speed for which a closed loop of fixed duration has requests enough; a faster stream ends early."""

MOST_CLOSED_LOOP_TOKENS = 8_000_000
"""Bound on the prompt tokens of one closed loop, so that a plan never fills the memory."""

WARM_UP_TOKENS = 8
"""Tokens that a request of a warm-up makes: enough to have run every step of the cell's shape."""

WARM_UP_CONTEXT = 512
"""Longest prompt of a decode cell's warm-up."""


@dataclass(frozen=True)
class PromptSource:
    """Where a cell and repetition takes its prompts from: numbers from `first_number` on (see `prompts.py`)."""

    vocab: int
    seed: int
    first_number: int

    def prompt(self, number: int, length: int) -> list[int]:
        return prompts.prompt(self.first_number + number, length, self.vocab, self.seed)


def request_count(cell: Cell) -> int:
    """How many prompts a cell plans in one repetition."""
    if cell.workload == "sustained":
        return (cell.streams or 1) * _requests_per_stream(cell)
    if cell.workload == "conversation":
        return (cell.users or 1) * (cell.turns or 1)
    return cell.requests or cell.streams or cell.at_once or 1


def _requests_per_stream(cell: Cell) -> int:
    wanted = int((cell.duration_s or 0) * CLOSED_LOOP_TOK_S / (cell.output_tokens or 1)) + 2
    affordable = MOST_CLOSED_LOOP_TOKENS // ((cell.streams or 1) * max(cell.longest_prompt, 1))
    return max(2, min(wanted, affordable))


def rounds(
    cell: Cell, source: PromptSource, limits: Limits
) -> Generator[Load, Mapping[int, Sequence[int] | None] | None, None]:
    """The loads of one repetition, one after the other; all but conversations have one.

    A conversation is a generator that is sent the answers of each round (request -> tokens, or None where the target
    gives none) and makes the next turn's prompts from them.
    """
    if cell.workload == "conversation":
        yield from _turns(cell, source, limits)
    else:
        yield _single_load(cell, source, limits)


def _single_load(cell: Cell, source: PromptSource, limits: Limits) -> Load:
    count = request_count(cell)
    output = cell.output_tokens or 1
    lengths = _prompt_lengths(cell, count)
    offsets = _arrivals(cell, count, source.seed)
    streams = cell.streams or count
    planned = [
        PlannedRequest(n, source.prompt(n, lengths[n]), output, offset_s=offsets[n], stream=n % streams)
        for n in range(count)
    ]
    mode = {"burst": "burst", "sustained": "closed", "open": "open"}.get(cell.workload, "together")
    return Load(planned, mode, cell.duration_s, limits.first_token_timeout_s, limits.grace_s)  # type: ignore[arg-type]


def _prompt_lengths(cell: Cell, count: int) -> list[int]:
    if cell.prompt_mix:
        return prompts.mixed_lengths(cell.prompt_mix, count)
    return [cell.context_tokens or cell.prompt_tokens or 1] * count


def _arrivals(cell: Cell, count: int, seed: int) -> list[float]:
    """Seconds after the release: Poisson arrivals of an open loop, the first at 0; else zeros."""
    if cell.rate_per_s is None:
        return [0.0] * count
    generator = random.Random(f"{seed}:{cell.id}")
    times = [0.0]
    for _ in range(count - 1):
        times.append(times[-1] + generator.expovariate(cell.rate_per_s))
    return times


def _turns(
    cell: Cell, source: PromptSource, limits: Limits
) -> Generator[Load, Mapping[int, Sequence[int] | None] | None, None]:
    users, turns, streams = cell.users or 1, cell.turns or 1, cell.streams or 1
    output = cell.output_tokens or 1
    shared = prompts.shared_beginning(cell.shared_tokens, source.vocab, source.seed, source.first_number)
    said = [list(shared) for _ in range(users)]
    for turn in range(turns):
        planned = []
        for user in range(users):
            number = turn * users + user
            said[user] += source.prompt(number, cell.turn_tokens or 1)
            planned.append(PlannedRequest(number, list(said[user]), output, stream=user % streams))
        answers: Mapping[int, Sequence[int] | None] | None = yield Load(
            planned, "closed", None, limits.first_token_timeout_s, limits.grace_s
        )
        for request in planned:
            answer = (answers or {}).get(request.request)
            stand_in = source.prompt(request.request, output)
            said[request.request % users] += list(answer) if answer else stand_in


def warm_up(cell: Cell, source: PromptSource, limits: Limits) -> Load:
    """A short load of the cell's shape, never in a figure: the same streams and lengths, few tokens, no second turn.

    A burst is warmed up with two of its prompts: its pieces have the same sizes, and a whole one takes too long. Decode
    and sustained loads are warmed up with shorter prompts: their steps do the same work whatever the context.
    """
    count = min(cell.at_once or 1, 2) if cell.workload == "burst" else cell.streams or 1
    if cell.workload == "conversation":
        count = 1
    lengths = _prompt_lengths(cell, count)
    if cell.workload == "conversation":
        lengths = [cell.longest_prompt]
    if cell.workload in ("decode", "sustained"):
        lengths = [min(length, WARM_UP_CONTEXT) for length in lengths]
    output = min(cell.output_tokens or 1, WARM_UP_TOKENS)
    planned = [PlannedRequest(n, source.prompt(n, lengths[n]), output, stream=n) for n in range(count)]
    return Load(planned, "together", None, limits.first_token_timeout_s, limits.grace_s)


def warm_up_count(cell: Cell) -> int:
    """Prompts that a warm-up of the cell takes."""
    return max(cell.streams or 1, 2)
