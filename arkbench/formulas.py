"""What claims are computed from: cells chosen by their columns, ratios between them, orders over models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product

from arkbench import metrics
from arkbench.published import Selector, Test
from arkbench.records import number
from arkbench.targets import bundled

CLEAR_ORDER = -0.6
"""Rank correlation from which an order counts as clear; the published table of the loops has -0.75."""


class Missing(Exception):
    """There is nothing to compute a claim from; `verdict` is what that makes of it."""

    def __init__(self, verdict: str, reason: str) -> None:
        super().__init__(reason)
        self.verdict = verdict


@dataclass(frozen=True)
class Measured:
    """What came of a formula: as it is shown, the verdict by the numbers alone, and what stands against it."""

    shown: str
    verdict: str
    spread: float | None = None
    invalid: str = ""
    incomplete: str = ""
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Cells:
    """The rows of cells.csv."""

    rows: Sequence[dict[str, str]]

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(row["model"] for row in self.rows))

    def in_scenarios(self, names: Sequence[str]) -> Cells:
        return Cells([row for row in self.rows if row["scenario"] in names])

    def select(self, selector: Selector, model: str | None = None) -> list[dict[str, str]]:
        """The rows of cells that ran and that the selector chooses: one for each repetition."""
        return [
            row
            for row in self.rows
            if row["status"] == "complete"
            and (model is None or row["model"] == model)
            and all(_matches(row[column], value) for column, value in selector.items())
        ]


def _matches(text: str, value: str | int | Sequence[str] | Sequence[int]) -> bool:
    values = value if isinstance(value, list) else [value]
    return text in [str(v) for v in values]


def median(values: Sequence[float]) -> float:
    middle = metrics.median(values)
    assert middle is not None
    return middle


# -------------------------------------------------------------------------------------------------- one figure


@dataclass(frozen=True)
class Figure:
    """A figure of one cell: by repetition, and why the cell is not valid, if it is not."""

    by_repetition: dict[str, float]
    invalid: str = ""

    @property
    def middle(self) -> float:
        return median(list(self.by_repetition.values()))


def figure(cells: Cells, selector: Selector, metric: str, model: str) -> Figure:
    """A figure of the one cell that a selector names; raises Missing where there is none or nothing measured of it."""
    require(cells, [selector], model)
    rows = cells.select(selector, model)
    names = {row["cell"] for row in rows}
    if len(names) > 1:
        raise Missing("not comparable", f"several cells fit {describe(selector)}: {', '.join(sorted(names))}")
    valid = [row for row in rows if row["valid"] == "true"]
    invalid = "" if 2 * len(valid) > len(rows) else f"{rows[0]['cell']} is not valid: {rows[0]['reason']}"
    values = {row["repetition"]: v for row in valid or rows if (v := number(row[metric])) is not None}
    if not values:
        why = rows[0]["reason"] or "this machine cannot measure it" if metric.startswith("wh_") else rows[0]["reason"]
        raise Missing("not comparable", f"{rows[0]['cell']} has no {metric}{': ' + why if why else ''}")
    return Figure(values, invalid)


def require(cells: Cells, selectors: Iterable[Selector], model: str) -> None:
    """Raises Missing, naming the cells of these that were not measured, by the first three."""
    missing = list(dict.fromkeys(describe(selector) for selector in selectors if not cells.select(selector, model)))
    if missing:
        more = f" and {len(missing) - 3} cells more" if len(missing) > 4 else ""
        named = "; ".join(missing[:3] if more else missing)
        raise Missing("not run", f"not measured: {named}{more}, of {model}")


def describe(selector: Selector) -> str:
    """A selector in words: fused, decode, streams 64."""
    words = []
    for column, value in selector.items():
        shown = "/".join(map(str, value)) if isinstance(value, list) else str(value)
        words.append(shown if column in ("variant", "workload") else f"{column} {shown}")
    return ", ".join(words)


# ----------------------------------------------------------------------------------------------------- a ratio


@dataclass(frozen=True)
class Ratio:
    """A ratio of two figures: of their medians, and of each repetition that both have."""

    middle: float
    repetitions: list[float]
    invalid: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def spread(self) -> float | None:
        return metrics.spread(self.repetitions)


def ratio(cells: Cells, test: Test, published_model: str) -> Ratio:
    """The ratio of a claim about one model: the published one where it was measured, else the first that was."""
    model = _model_with(cells, test, published_model)
    found = ratio_of_model(cells, test, model)
    return Ratio(found.middle, found.repetitions, found.invalid, other_model([model], published_model))


def ratio_of_model(cells: Cells, test: Test, model: str) -> Ratio:
    assert test.over is not None and isinstance(test.metric, str)
    require(cells, [test.of, test.over], model)
    of = figure(cells, test.of, test.metric, model)
    over = figure(cells, test.over, test.metric, model)
    both = [of.by_repetition[r] / over.by_repetition[r] for r in of.by_repetition if r in over.by_repetition]
    return Ratio(of.middle / over.middle, both, of.invalid or over.invalid)


def ratios_of_models(cells: Cells, test: Test, wanted: Sequence[str]) -> tuple[dict[str, Ratio], str]:
    """The ratio of each wanted model that has one, and why one of them is not valid; raises Missing without any."""
    ratios: dict[str, Ratio] = {}
    missing: Missing | None = None
    for model in wanted:
        try:
            ratios[model] = ratio_of_model(cells, test, model)
        except Missing as error:
            if missing is None or error.verdict == "not comparable":
                missing = error
    if not ratios:
        raise missing or Missing("not run", "no model was measured")
    invalid = next((f"{model}: {r.invalid}" for model, r in ratios.items() if r.invalid), "")
    return ratios, invalid


def _model_with(cells: Cells, test: Test, published_model: str) -> str:
    """The model that a claim about one model is computed for."""
    having = [m for m in cells.models if cells.select(test.of, m) and (not test.over or cells.select(test.over, m))]
    if published_model in having:
        return published_model
    return having[0] if having else (cells.models or [published_model])[0]


def other_model(models: Sequence[str], published_model: str) -> list[str]:
    """A note where the published model is not among those that were measured."""
    return [] if published_model in models else [f"measured with {', '.join(models)}, published for {published_model}"]


def model_notes(cells: Cells, test: Test, published_model: str) -> list[str]:
    return other_model([_model_with(cells, test, published_model)], published_model)


# ---------------------------------------------------------------------------------------------- series, counts


@dataclass(frozen=True)
class Series:
    """Figures (or ratios) along a column."""

    values: list[float]
    shown: str
    spread: float | None
    invalid: str
    notes: list[str]


def series(cells: Cells, test: Test, published_model: str) -> list[Series]:
    """The series of a claim: along its `along` column, one for each value of its `each` column."""
    model = _model_with(cells, test, published_model)
    (along, steps), *_ = test.along.items()
    groups = [dict(zip(test.each, values, strict=True)) for values in product(*test.each.values())]
    places = [{**group, along: step} for group in groups for step in steps]
    require(cells, [side | at for at in places for side in (test.of, test.over) if side is not None], model)
    return [_one_series(cells, test, model, along, steps, group, published_model) for group in groups]


def _one_series(
    cells: Cells, test: Test, model: str, along: str, steps: Sequence[int], group: Selector, published_model: str
) -> Series:
    values, spreads, invalid = [], [], ""
    for step in steps:
        at: Selector = {**group, along: step}
        if test.over is not None:
            moved = test.model_copy(update={"of": test.of | at, "over": test.over | at})
            found = ratio_of_model(cells, moved, model)
            values.append(found.middle)
            spreads.append(found.spread)
            invalid = invalid or found.invalid
        else:
            one = figure(cells, test.of | at, str(test.metric), model)
            values.append(one.middle)
            spreads.append(metrics.spread(list(one.by_repetition.values())))
            invalid = invalid or one.invalid
    label = "".join(f"{column} {value}: " for column, value in group.items())
    shown = label + ", ".join(f"{value:.4g}" for value in values)
    known = [s for s in spreads if s is not None]
    return Series(values, shown, max(known, default=None), invalid, other_model([model], published_model))


def total(cells: Cells, test: Test, published_model: str) -> tuple[int, int]:
    """The sum of a count over every cell of a claim, and how many rows it is over; raises Missing for a missing one."""
    model = _model_with(cells, test, published_model)
    columns = {**test.along, **test.each}
    require(cells, [test.of | dict(zip(columns, at, strict=True)) for at in product(*columns.values())], model)
    rows = cells.select(test.of, model)
    names = [test.metric] if isinstance(test.metric, str) else test.metric
    known = [number(row[name]) for row in rows for name in names]
    if any(value is None for value in known):
        raise Missing("not comparable", f"the target does not say how many {' or '.join(names)} there were")
    return int(sum(value for value in known if value is not None)), len(rows)


def answered(cells: Cells, test: Test, published_model: str) -> tuple[int, int]:
    """Answered and asked requests of a claim's cell, over its repetitions."""
    model = _model_with(cells, test, published_model)
    require(cells, [test.of], model)
    rows = cells.select(test.of, model)
    counts = [
        [int(row[f"requests_{status}"] or 0) for status in ("ok", "failed", "refused", "timeout")] for row in rows
    ]
    return sum(row[0] for row in counts), sum(sum(row) for row in counts)


# ------------------------------------------------------------------------------------------------------- orders


def bytes_per_token(model: str) -> int:
    """Bytes of weights that one token of a model reads, in 4 bit: how much a GPU works for it."""
    return bundled.model_facts(model).decode_bytes_4bit


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation; ties share the mean of their ranks. 0 where one side does not vary."""
    a, b = _ranks(x), _ranks(y)
    mean = (len(a) + 1) / 2
    covariance = sum((p - mean) * (q - mean) for p, q in zip(a, b, strict=True))
    variance = sum((p - mean) ** 2 for p in a) * sum((q - mean) ** 2 for q in b)
    return covariance / variance**0.5 if variance else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(v) + 1 + (ordered.count(v) - 1) / 2 for v in values]
