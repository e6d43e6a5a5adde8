"""The published tables and claims, and how each claim is tested: all of it data in `scenarios/published/`."""

from __future__ import annotations

import csv
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from arkbench.paths import published_dir

Selector = dict[str, str | int | list[str] | list[int]]


@dataclass(frozen=True)
class Claim:
    """A line of claims.csv. `published` is as it was printed: a number, a range, a count or a word."""

    id: str
    note: str
    kind: str
    published: str
    unit: str
    source: str
    statement: str


class Note(BaseModel):
    """Where a note was measured, and the scenarios that test it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpu: str
    gpus: int
    model: str
    scenarios: list[str]


class Test(BaseModel):
    """How one claim is tested; `arkbench/verdicts.py` holds the formulas."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    test: Literal["ratio", "percent", "fall", "start", "rises", "none", "falls-with-size", "level", "answered"]
    metric: str | list[str] = "decode_tok_s"
    of: Selector
    over: Selector | None = None
    along: dict[str, list[int]] = {}
    each: dict[str, list[int]] = {}
    across: Literal["median", "range", "max", "min"] | None = None
    models: str | None = None
    better: Literal["higher", "lower", "equal"] = "higher"
    absolute: bool = False
    bound: float | None = None


class Tests(BaseModel):
    """tests.toml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    notes: dict[str, Note]
    model_sets: dict[str, list[str]]
    claims: dict[str, Test]


@lru_cache(maxsize=1)
def claims() -> tuple[Claim, ...]:
    """Every published claim, in the order of claims.csv."""
    return tuple(
        Claim(row["id"], row["note"], row["kind"], row["published"], row["unit"], row["from"], row["statement"])
        for row in table("claims")
    )


@lru_cache(maxsize=1)
def tests() -> Tests:
    """How the claims are tested; raises ValueError where tests.toml does not fit its model."""
    path = published_dir() / "tests.toml"
    try:
        return Tests.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise ValueError(f"{path}: {error}") from None


def timed_starts(scenario: str) -> set[str]:
    """The variants of a scenario whose start is the figure of a claim."""
    held = tests()
    notes = {claim.id: held.notes[claim.note] for claim in claims()}
    timed = [(notes[name], test) for name, test in held.claims.items() if test.test == "start"]
    return {str(test.of["variant"]) for note, test in timed if scenario in note.scenarios}


def table(name: str) -> list[dict[str, str]]:
    """The rows of a published table (`fused_kernels_decode`), as text; '' where nothing was published."""
    with (published_dir() / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def with_unit(figure: str, unit: str) -> str:
    """A figure with its unit; words (`rises`, `in seconds`) stand alone."""
    return f"{figure} {unit}".strip() if any(character.isdigit() for character in figure) else figure
