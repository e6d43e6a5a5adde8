"""Measured against published: one verdict a claim, by rules that are written down here.

Verdicts: `reproduced`, `exceeded`, `not reproduced`, `not comparable` (with the reason), `not run`.

1. A claim needs all of its cells. With none of them it was not run. With some of its models measured, what they give
   is shown, and the verdict is `not comparable`.
2. A cell that is not valid gives no verdict; a claim about GPUs that was measured on a CPU gives none either, nor does
   an absolute figure on another GPU model or count than the published one. What was measured is shown all the same.
3. A ratio carries over to other GPUs. So does it to other models, and the reason names the model.
4. A measured ratio is an interval: from the lowest to the highest ratio of its repetitions, and at least NOISE to
   either side of the ratio of the medians (NOISE_ONCE where there is a single repetition). A published figure is the
   interval of what rounds to it. Where the two overlap there is no difference: `reproduced`. Else the side that counts
   as better decides between `exceeded` and `not reproduced`; for a claim that nothing changes, any difference is
   `not reproduced`.

Formulas (`test` in tests.toml): `ratio` of a figure between two cells; `percent` and `fall`: the same as a change or
fall in percent; `rises`: figures or ratios rise along a column; `falls-with-size`: the ratio falls with the bytes
that a model reads a token (rank correlation); `level`: largest over smallest figure; `none`: a count that must be 0;
`answered`: answered requests of all; `start`: seconds until a variant is ready, within a bound.
`across` takes the median, smallest, largest or both over models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arkbench import formulas, published
from arkbench.formulas import Cells, Measured, Missing
from arkbench.published import Claim, Note, Test
from arkbench.records import VERDICT_COLUMNS, Row, read_rows, read_run, write_csv

VERDICTS = ("reproduced", "exceeded", "not reproduced", "not comparable", "not run")

NOISE = 0.02
NOISE_ONCE = 0.05


@dataclass(frozen=True)
class Interval:
    """What a figure may be: low <= high."""

    low: float
    high: float


def decide(measured: Interval, claimed: Interval, better: str) -> str:
    """Rule 4: the verdict of a measured interval against a published one; `better` is higher, lower or equal."""
    if measured.low <= claimed.high and claimed.low <= measured.high:
        return "reproduced"
    if better == "equal":
        return "not reproduced"
    above = measured.low > claimed.high
    return "exceeded" if above == (better == "higher") else "not reproduced"


def rounding(text: str) -> float:
    """Half of the last decimal place of a printed number: 2.6 -> 0.05, 45 -> 0.5."""
    return 0.5 * 10.0 ** -len(text.partition(".")[2])


def claimed_ratio(text: str, test: str) -> Interval:
    """A printed figure as the interval of ratios that it stands for: `45` as a percent is 1.445 to 1.455."""
    value, half = float(text), rounding(text)
    if test == "percent":
        return Interval(1 + (value - half) / 100, 1 + (value + half) / 100)
    if test == "fall":
        return Interval(1 - (value + half) / 100, 1 - (value - half) / 100)
    return Interval(value - half, value + half)


def measured_interval(ratios: Sequence[float], middle: float, repetitions: int) -> Interval:
    """The interval of a measured ratio: that of its repetitions, and at least the noise around the middle."""
    noise = NOISE if repetitions > 1 else NOISE_ONCE
    return Interval(
        min([*ratios, middle * (1 - noise)]),
        max([*ratios, middle * (1 + noise)]),
    )


# ----------------------------------------------------------------------------------------------------- context


@dataclass(frozen=True)
class Context:
    """A run as verdicts need it: its cells, where it ran, and which scenarios it has.

    `sustained_s`: the length of sustained windows where the command line set it.
    """

    cells: Cells
    scenarios: tuple[str, ...]
    gpus: tuple[str, ...]
    used: int | None
    on_cpu: bool
    endpoint: bool
    start_seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    sustained_s: float | None = None

    @staticmethod
    def of(run_dir: Path) -> Context:
        info = read_run(run_dir)
        options = info.get("options") or {}
        endpoint = bool(options.get("endpoint"))
        return Context(
            cells=Cells(read_rows(run_dir / "cells.csv")),
            scenarios=tuple(entry["name"] for entry in info.get("scenarios", [])),
            gpus=tuple(gpu["name"] for gpu in info.get("gpus", [])),
            used=info.get("devices_used"),
            on_cpu=not endpoint and not str(info.get("device", "")).startswith("cuda"),
            endpoint=endpoint,
            start_seconds=info.get("start_seconds", {}),
            sustained_s=(options.get("overrides") or {}).get("duration_s"),
        )

    def same_hardware(self, note: Note) -> bool:
        return not self.endpoint and any(note.gpu in name for name in self.gpus[:1]) and self.used == note.gpus


def write(run_dir: Path) -> list[Row]:
    """Writes verdicts.csv of a run folder: one line a claim. Returns its rows."""
    rows = all_verdicts(Context.of(run_dir))
    write_csv(run_dir / "verdicts.csv", rows, VERDICT_COLUMNS)
    return rows


def all_verdicts(context: Context) -> list[Row]:
    """The verdict of every published claim."""
    tests = published.tests()
    return [verdict(claim, tests.claims[claim.id], tests.notes[claim.note], context) for claim in published.claims()]


def verdict(claim: Claim, test: Test, note: Note, context: Context) -> Row:
    """The row of one claim."""
    row: Row = {
        "id": claim.id,
        "note": claim.note,
        "statement": claim.statement,
        "published": claim.published,
        "unit": claim.unit,
    }
    if not set(note.scenarios) & set(context.scenarios):
        return row | {"verdict": "not run", "reason": f"arkbench run {note.scenarios[0]} tests it"}
    cells = context.cells.in_scenarios(note.scenarios)
    try:
        measured = _FORMULAS[test.test](claim, test, note, cells, context)
    except Missing as missing:
        return row | {"verdict": missing.verdict, "reason": str(missing)}
    outcome, reasons = _comparable(measured, test, note, context)
    row |= {"measured": measured.shown, "spread": measured.spread}
    return row | {"verdict": outcome, "reason": "; ".join(r for r in reasons if r)}


def _comparable(measured: Measured, test: Test, note: Note, context: Context) -> tuple[str, list[str]]:
    """Rules 1 to 3: the verdict of a measurement, or why it has none."""
    reasons = list(measured.notes)
    if context.sustained_s is not None and any(s and s.get("workload") == "sustained" for s in (test.of, test.over)):
        reasons.append(f"sustained windows of {context.sustained_s:g} s (--duration), not the scenario's own")
    if measured.incomplete:
        return "not comparable", [measured.incomplete, *reasons]
    if measured.invalid:
        return "not comparable", [measured.invalid, *reasons]
    if context.on_cpu:
        return "not comparable", ["measured on a CPU, published for GPUs", *reasons]
    if test.absolute and not context.same_hardware(note):
        return "not comparable", [f"an absolute figure of {note.gpus} {note.gpu}, measured on other hardware", *reasons]
    if context.endpoint:
        reasons.append("the endpoint does not say on what hardware it runs")
    return measured.verdict, reasons


# ---------------------------------------------------------------------------------------------------- formulas

Formula = Callable[[Claim, Test, Note, Cells, Context], Measured]


def _ratio(claim: Claim, test: Test, note: Note, cells: Cells, context: Context) -> Measured:
    if test.across is not None:
        return _across(claim, test, cells)
    ratio = formulas.ratio(cells, test, note.model)
    interval = measured_interval(ratio.repetitions, ratio.middle, len(ratio.repetitions))
    claimed = claimed_ratio(claim.published, test.test)
    outcome = decide(interval, claimed, test.better)
    unclear = outcome == "reproduced" and _holds(interval, 1) and not _holds(claimed, 1)
    return Measured(
        shown=_show(ratio.middle, test.test),
        verdict=outcome,
        spread=ratio.spread,
        invalid=ratio.invalid,
        notes=[*ratio.notes, *([_no_change_fits(interval, test)] if unclear else [])],
    )


def _holds(interval: Interval, value: float) -> bool:
    return interval.low <= value <= interval.high


def _no_change_fits(interval: Interval, test: Test) -> str:
    ends = [f"{_show(end, test.test)}{' %' if test.test != 'ratio' else ''}" for end in (interval.low, interval.high)]
    return f"no change fits as well: measured {ends[0]} to {ends[1]} within the noise"


def _across(claim: Claim, test: Test, cells: Cells) -> Measured:
    """A ratio over several models: their median, smallest, largest, or the range from the smallest to the largest."""
    wanted = published.tests().model_sets[test.models] if test.models else cells.models
    ratios, invalid = formulas.ratios_of_models(cells, test, wanted)
    values = sorted(ratio.middle for ratio in ratios.values())
    if test.across == "range":
        parts = claim.published.split("-")
        shown = "-".join(sorted((_show(v, test.test) for v in (values[0], values[-1])), key=float))
        outcomes = _range_outcomes(values, parts, test)
    else:
        middle = {"median": formulas.median(values), "min": values[0], "max": values[-1]}[test.across or "median"]
        shown = _show(middle, test.test)
        once = all(len(ratio.repetitions) < 2 for ratio in ratios.values())
        interval = measured_interval([], middle, 1 if once else 2)
        outcomes = [decide(interval, claimed_ratio(claim.published, test.test), test.better)]
    missing = [model for model in wanted if model not in ratios]
    incomplete = f"needs all of its {len(wanted)} models; missing: {', '.join(missing)}" if missing else ""
    return Measured(
        shown=shown,
        verdict=_worst(outcomes),
        spread=max((ratio.spread for ratio in ratios.values() if ratio.spread is not None), default=None),
        invalid=invalid,
        incomplete=incomplete,
        notes=[f"{len(ratios)} models"],
    )


def _range_outcomes(values: Sequence[float], printed: Sequence[str], test: Test) -> list[str]:
    """Both ends of a range against the printed ends: the smallest ratio with the smallest, and so on."""
    claimed = sorted((claimed_ratio(text, test.test) for text in printed), key=lambda interval: interval.low)
    ends = (values[0], values[-1])
    return [
        decide(measured_interval([], end, 1), interval, test.better)
        for end, interval in zip(ends, claimed, strict=True)
    ]


def _worst(outcomes: Sequence[str]) -> str:
    """The verdict of several: one that fails decides; `exceeded` needs all not to fall short and one to exceed."""
    for outcome in ("not reproduced", "exceeded"):
        if outcome in outcomes:
            return outcome
    return "reproduced"


def _rises(claim: Claim, test: Test, note: Note, cells: Cells, context: Context) -> Measured:
    lines = formulas.series(cells, test, note.model)
    noise = [max(NOISE, line.spread or 0.0) for line in lines]
    rising = all(
        all(b >= a * (1 - n) for a, b in zip(line.values, line.values[1:], strict=False))
        and line.values[-1] > line.values[0]
        for line, n in zip(lines, noise, strict=True)
    )
    return Measured(
        shown="rises" if rising else "does not rise",
        verdict="reproduced" if rising else "not reproduced",
        invalid=next((line.invalid for line in lines if line.invalid), ""),
        notes=[" | ".join(line.shown for line in lines), *lines[0].notes],
    )


def _falls_with_size(claim: Claim, test: Test, note: Note, cells: Cells, context: Context) -> Measured:
    wanted = published.tests().model_sets[test.models or ""]
    ratios, invalid = formulas.ratios_of_models(cells, test, wanted)
    missing = [model for model in wanted if model not in ratios]
    if len(ratios) < 3:
        raise Missing("not comparable", f"an order needs three models at least; measured: {', '.join(ratios)}")
    correlation = formulas.rank_correlation(
        [formulas.bytes_per_token(model) for model in ratios], [ratio.middle for ratio in ratios.values()]
    )
    return Measured(
        shown="falls" if correlation <= formulas.CLEAR_ORDER else "no clear order",
        verdict="reproduced" if correlation <= formulas.CLEAR_ORDER else "not reproduced",
        invalid=invalid,
        incomplete=f"needs all of its {len(wanted)} models; missing: {', '.join(missing)}" if missing else "",
        notes=[f"rank correlation of gain and bytes a token {correlation:.2f} over {len(ratios)} models"],
    )


def _level(claim: Claim, test: Test, note: Note, cells: Cells, context: Context) -> Measured:
    line = formulas.series(cells, test, note.model)[0]
    low, high = (float(end) for end in claim.published.split("-"))
    measured = max(line.values) / min(line.values)
    allowed = high / low * (1 + max(NOISE, line.spread or 0.0))
    return Measured(
        shown=f"{min(line.values):.0f}-{max(line.values):.0f}",
        verdict="reproduced" if measured <= allowed else "not reproduced",
        spread=line.spread,
        invalid=line.invalid,
        notes=[f"largest over smallest {measured:.3f}, published {high / low:.3f}", *line.notes],
    )


def _none(claim: Claim, test: Test, note: Note, cells: Cells, context: Context) -> Measured:
    count, measured_cells = formulas.total(cells, test, note.model)
    return Measured(
        shown=str(count),
        verdict="reproduced" if count == 0 else "not reproduced",
        notes=[f"over {measured_cells} cells and repetitions"],
    )


def _answered(claim: Claim, test: Test, note: Note, cells: Cells, context: Context) -> Measured:
    answered, asked = formulas.answered(cells, test, note.model)
    ours, theirs = answered / asked, _fraction(claim.published)
    step = 1 / asked
    return Measured(
        shown=f"{answered} of {asked}",
        verdict=decide(Interval(ours - step, ours + step), Interval(theirs, theirs), "higher"),
        notes=formulas.model_notes(cells, test, note.model),
    )


def _fraction(printed: str) -> float:
    answered, _, asked = printed.partition(" of ")
    return int(answered) / int(asked)


def _start(claim: Claim, test: Test, note: Note, cells: Cells, context: Context) -> Measured:
    variant = str(test.of["variant"])
    seconds = [
        parts["total"]
        for name, parts in context.start_seconds.items()
        if name.split(" ")[-1].split("/")[-1] == variant and "total" in parts
    ]
    if not seconds:
        raise Missing("not run", f"no start of variant '{variant}' was measured")
    bound = test.bound or 0.0
    return Measured(
        shown=f"{max(seconds):.1f}",
        verdict="reproduced" if max(seconds) <= bound else "not reproduced",
        notes=[f"'in seconds' is taken as at most {bound:.0f} s", *formulas.other_model(cells.models, note.model)],
    )


_FORMULAS: dict[str, Formula] = {
    "ratio": _ratio,
    "percent": _ratio,
    "fall": _ratio,
    "rises": _rises,
    "falls-with-size": _falls_with_size,
    "level": _level,
    "none": _none,
    "answered": _answered,
    "start": _start,
}


def _show(ratio: float, test: str) -> str:
    """A ratio as its claim prints it: 2.71, +45 (percent) or 90 (a fall in percent)."""
    if test == "percent":
        return f"{100 * (ratio - 1):+.1f}"
    if test == "fall":
        return f"{100 * (1 - ratio):.1f}"
    return f"{ratio:.3g}" if ratio >= 10 else f"{ratio:.2f}"


def counts(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many claims have each verdict."""
    return {name: sum(row["verdict"] == name for row in rows) for name in VERDICTS}
