"""Whether the variants of a run gave the same tokens, and whether a difference is more than rounding.

A switch that must not change an answer may still change the shapes that are multiplied (behind cached pages a prompt is
shorter), and with them the last bits of products in 16 bits. Where two tokens are all but equal those bits decide. So
the first token in which two answers to one prompt part is looked at: either token must be nearly as likely as the best.
What a wrong page or a lost token makes of an answer is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from arkbench.targets.base import Target, TargetError

if TYPE_CHECKING:  # a report reads what is said here, and needs no engine
    from arkbench.plan import Plan, ScenarioPlan, Variant
    from arkbench.scenario import Cell

NEAR_TIE = 1 / 64
"""How far below the best logit the two tokens may lie, as a part of its height above the mean of all: two steps of
bfloat16, of which one is up to 1/128 of a value. Seen on a CPU: rounding up to 0.008, one emptied page 0.02 to 0.2."""

DETAIL = "answers"
"""Key of details.jsonl: {"against": variant, "gap": the largest gap, None where the target does not tell}."""

Differences = Mapping[tuple[str, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Exchange:
    """A prompt and the tokens of its answer."""

    prompt: Sequence[int]
    tokens: Sequence[int]


@dataclass(frozen=True)
class _Held:
    variant: Variant
    digest: str
    exchanges: Mapping[int, Exchange]


class AnswerBook:
    """Holds the answers of a repetition until the other variants have given theirs. `exact`: see compare_answers."""

    def __init__(self, exact: Sequence[str]) -> None:
        self._exact = frozenset(exact)
        self._repetition: tuple[str, str, int] | None = None
        self._first: dict[tuple[str, str], _Held] = {}

    def examine(
        self, plan: ScenarioPlan, cell: Cell, repetition: int, target: Target, digest: str,
        exchanges: Mapping[int, Exchange],
    ) -> dict[str, Any]:  # fmt: skip
        """What details.jsonl says of a cell whose answers differ though no switch may change them; else nothing.

        The target, which still runs the cell's variant, is asked for the probabilities: outside of any figure.
        """
        if self._repetition != (cell.scenario, cell.model, repetition):
            self._repetition = (cell.scenario, cell.model, repetition)
            self._first.clear()
        variant = next(v for v in plan.variants if v.name == cell.variant)
        others = [v for v in plan.variants if v.target == variant.target and v.name != variant.name]
        if not any(differing(variant, other) <= self._exact for other in others):
            return {}
        first = self._first.setdefault((variant.target, cell.id), _Held(variant, digest, exchanges))
        if first.digest == digest or not differing(first.variant, variant) <= self._exact:
            return {}
        try:
            gap = largest_gap(target, first.exchanges, exchanges)
        except (TargetError, RuntimeError):  # torch's OutOfMemoryError is one: the cell is measured all the same
            gap = None
        return {DETAIL: {"against": first.variant.name, "gap": gap}}


def differing(one: Variant, other: Variant) -> set[str]:
    """The switches in which two variants differ."""
    return {name for name, value in one.switches.items() if other.switches.get(name) != value}


def largest_gap(target: Target, first: Mapping[int, Exchange], second: Mapping[int, Exchange]) -> float | None:
    """The largest gap of all requests with one prompt and two answers; None where one of them is not known.

    A conversation's later prompts hold its earlier answers: behind a difference they are other prompts.
    """
    gaps = []
    for request, one in first.items():
        other = second.get(request)
        if other is None or list(one.prompt) != list(other.prompt) or list(one.tokens) == list(other.tokens):
            continue
        gap = _gap_of(target, one, other)
        if gap is None:
            return None
        gaps.append(gap)
    return max(gaps, default=None)


def _gap_of(target: Target, one: Exchange, other: Exchange) -> float | None:
    pairs = list(zip(one.tokens, other.tokens, strict=False))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return None
    table = target.next_token([*one.prompt, *one.tokens[:at]])
    if table is None:
        return None
    best = max(table.values())
    height = best - sum(table.values()) / len(table)
    gap = (best - min(table.get(token, -math.inf) for token in pairs[at])) / height if height > 0 else math.inf
    return gap if math.isfinite(gap) and math.isfinite(height) else None


def differences(details: Sequence[Mapping[str, Any]]) -> Differences:
    """What the lines of details.jsonl say of differences: by scenario, model, cell, repetition and the two variants."""
    return {
        (d["scenario"], d["model"], d["cell"], str(d["repetition"]), d[DETAIL]["against"], d["variant"]): d[DETAIL]
        for d in details
        if DETAIL in d
    }


def compare_answers(
    rows: Sequence[dict[str, str]], plan: Plan, exact: Sequence[str], found: Differences
) -> dict[str, Any]:
    """Whether the variants of a run gave the same tokens, cell by cell and repetition by repetition.

    `exact`: the switches that must not change a token. A difference between variants that differ only in such
    switches is a fault, unless it was examined and is a near tie (`found`; see `differences`); otherwise it is inside
    the stated bounds of the switches that round differently. Variants of different targets are not compared: one knows
    the tokens, the other their text.
    """
    variants = {(p.scenario.name, v.name): v for p in plan.scenarios for v in p.variants}
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        if row["output_hash"]:
            target = variants[row["scenario"], row["variant"]].target
            key = (row["scenario"], row["model"], row["cell"], row["repetition"], target)
            groups.setdefault(key, {})[row["variant"]] = row["output_hash"]
    result: dict[str, Any] = {"compared": 0, "identical": 0, "different": []}
    for (scenario, model, cell, repetition, _), hashes in groups.items():
        first, *others = hashes
        for other in others:
            result["compared"] += 1
            if hashes[first] == hashes[other]:
                result["identical"] += 1
                continue
            names = differing(variants[scenario, first], variants[scenario, other])
            must_agree = names <= set(exact)
            gap = found.get((scenario, model, cell, repetition, first, other), {}).get("gap")
            tie = must_agree and gap is not None and gap <= NEAR_TIE
            result["different"].append(
                {
                    "scenario": scenario,
                    "model": model,
                    "cell": cell,
                    "repetition": int(repetition),
                    "variants": [first, other],
                    "switches": sorted(names),
                    "fault": must_agree and not tie,
                    "near_tie": tie,
                    "gap": gap,
                }
            )
    return result


def kind(difference: Mapping[str, Any]) -> Literal["fault", "tie", "bounded"]:
    """What an entry of `different` is: runs of earlier versions know no near ties."""
    if difference.get("fault"):
        return "fault"
    return "tie" if difference.get("near_tie") else "bounded"


def explained(fault: Mapping[str, Any]) -> str:
    """Why a difference is taken for a fault."""
    gap = fault.get("gap")
    if gap is None:
        return "whether two tokens were all but equal is not known"
    return f"where they part, a token lies {gap:.1%} of the best logit below it; rounding explains {NEAR_TIE:.1%}"
