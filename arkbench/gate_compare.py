"""From run folders to the rows of a gate: which cells exist on both sides, their exact checks, their metrics."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from arkbench.errors import UserError
from arkbench.gate import (
    ALL_PAIRS,
    METRICS,
    CellKey,
    GateResult,
    Judgement,
    Metric,
    Row,
    judge_equal,
    judge_memory,
    judge_pairs,
    judge_requests,
    judge_stored,
    needs_more,
)
from arkbench.gate_runs import Repetition, RunData, not_comparable

Floors = Mapping[str, float]
MetricKey = tuple[CellKey, str]


@dataclass(frozen=True)
class Pair:
    """Base and head, run one after the other on the same GPU with the same seed."""

    base: RunData
    head: RunData


def paired_floors(calibrated: Floors | None = None) -> dict[str, float]:
    """Floor of each metric for paired runs; calibrated ones replace the defaults."""
    return {m.column: m.paired_floor for m in METRICS} | dict(calibrated or {})


def check_stored(base: RunData, head: RunData, accept_outputs: bool = False) -> GateResult:
    """Head against a stored run of the same GPUs and scenarios; UserError when the two do not compare."""
    problem = not_comparable(base, head)
    if problem:
        raise UserError(f"{head.path} and {base.path} cannot be compared: {problem}")
    pair = Pair(base, head)
    same_seed = base.seed is not None and base.seed == head.seed
    notes = [] if same_seed else ["outputs were not compared: the runs have different seeds"]
    rows: list[Row] = []
    for key in _all_cells([pair]):
        rows += _broken(key, [pair]) or [
            *_exact_rows(key, [pair], outputs=same_seed and not accept_outputs),
            *_stored_rows(key, pair),
        ]
    return GateResult(f"{head.path.name} against {base.path.name}", tuple(rows), (*notes, *_notes([pair])))


def check_paired(
    title: str,
    pairs: Sequence[Pair],
    floors: Floors,
    accept_outputs: bool = False,
    unstable: Collection[CellKey] = (),
) -> GateResult:
    """Alternating runs of base and head. `unstable`: cells whose outputs base itself does not repeat."""
    judged = judge_pairs(*differences(pairs, floors), final=len(pairs) >= ALL_PAIRS)
    rows: list[Row] = []
    for key in _all_cells(pairs):
        missing = _missing(key, pairs)
        if missing:
            rows.append(missing)
            continue
        rows += _exact_rows(key, pairs, outputs=not accept_outputs and key not in unstable)
        rows += _paired_rows(key, pairs, judged, floors)
    notes = [f"outputs of {key} were not compared: base does not repeat its own" for key in sorted(unstable)]
    return GateResult(title, tuple(rows), (*notes, *_notes(pairs)))


def look_again(pairs: Sequence[Pair], floors: Floors) -> list[MetricKey]:
    """The cells and metrics that the first look cannot let pass."""
    measured, limits = differences(pairs, floors)
    return [key for key, values in measured.items() if needs_more(values, limits[key])]


def unstable_outputs(first: RunData, second: RunData) -> set[CellKey]:
    """Cells whose output hashes differ between two runs of the same code with the same seed."""
    common = first.cells.keys() & second.cells.keys()
    return {key for key in common if _hashes(first.cells[key]) != _hashes(second.cells[key])}


def _hashes(cell: Mapping[int, Repetition]) -> dict[int, str]:
    return {number: r.output_hash for number, r in cell.items()}


def _all_cells(pairs: Sequence[Pair]) -> list[CellKey]:
    return list(dict.fromkeys(key for p in pairs for run in (p.base, p.head) for key in run.cells))


def _missing(key: CellKey, pairs: Sequence[Pair]) -> Row | None:
    """An invalid row where a cell is missing, or was run with other settings, in any of the runs."""
    for pair in pairs:
        for side, run in (("base", pair.base), ("head", pair.head)):
            if key not in run.cells:
                return Row(key, "cell", "invalid", reason=f"missing in {side} ({run.path.name})")
    settings = {r.settings for p in pairs for run in (p.base, p.head) for r in run.cells[key].values()}
    if len(settings) > 1:
        return Row(key, "cell", "invalid", reason="base and head ran it with different settings")
    return None


def _broken(key: CellKey, pairs: Sequence[Pair]) -> list[Row]:
    """The invalid row of a cell that is missing, or of which any repetition is invalid for another reason than failed
    requests (those are an exact check of their own)."""
    missing = _missing(key, pairs)
    if missing:
        return [missing]
    requests = _judge_requests(key, pairs)
    if requests.state == "regression":
        return [Row(key, "failed requests", "regression", reason=requests.reason)]
    for pair in pairs:
        for side, run in (("base", pair.base), ("head", pair.head)):
            for number, repetition in run.cells[key].items():
                if repetition.problem:
                    return [Row(key, "cell", "invalid", reason=f"{side}, repetition {number}: {repetition.problem}")]
    return []


def _judge_requests(key: CellKey, pairs: Sequence[Pair]) -> Judgement:
    base = [r for p in pairs for r in p.base.cells[key].values()]
    head = [r for p in pairs for r in p.head.cells[key].values()]
    return judge_requests(
        sum(r.failed for r in base),
        sum(r.failed for r in head),
        sum(r.unanswered for r in base),
        sum(r.unanswered for r in head),
    )


def _exact_rows(key: CellKey, pairs: Sequence[Pair], outputs: bool) -> list[Row]:
    checks = {"failed requests": _judge_requests(key, pairs)}
    same_outputs = _judge_outputs(key, pairs) if outputs else None
    if same_outputs:
        checks["outputs"] = same_outputs
    if all(run.tokens is not None for p in pairs for run in (p.base, p.head)):
        base_tokens = {(i, *k): v for i, p in enumerate(pairs) for k, v in p.base.tokens[key].items()}
        head_tokens = {(i, *k): v for i, p in enumerate(pairs) for k, v in p.head.tokens[key].items()}
        checks["token counts"] = judge_equal(base_tokens, head_tokens, "token counts")
    base_memory = [p.base.peak_memory[key] for p in pairs if key in p.base.peak_memory]
    head_memory = [p.head.peak_memory[key] for p in pairs if key in p.head.peak_memory]
    if base_memory and head_memory:
        checks["peak memory"] = judge_memory(round(median(base_memory)), round(median(head_memory)))
    return [Row(key, name, j.state, worsening=j.worsening, reason=j.reason) for name, j in checks.items()]


def _judge_outputs(key: CellKey, pairs: Sequence[Pair]) -> Judgement | None:
    """Output hashes by pair and repetition; None where neither side has any (a load of a fixed duration)."""
    sides: list[dict[tuple[int, int], str]] = [
        {(i, n): r.output_hash for i, run in enumerate(runs) for n, r in run.cells[key].items() if r.output_hash}
        for runs in ([p.base for p in pairs], [p.head for p in pairs])
    ]
    base, head = sides
    if not base and not head:
        return None
    judged = judge_equal(base, head, "output hashes")
    if judged.state == "pass" and len(base) != len(head):
        side = "base" if len(base) < len(head) else "head"
        return Judgement("invalid", reason=f"{side} lacks output hashes that the other has")
    return judged


def _notes(pairs: Sequence[Pair]) -> list[str]:
    """What was not compared, and why."""
    runs = [run for p in pairs for run in (p.base, p.head)]
    blurred = sorted({str(key) for run in runs for key in run.short_energy})
    notes = [f"energy of {key} was not compared: its window is short for the counter" for key in blurred]
    silent = [run.path.name for run in runs if run.tokens is None]
    if silent:
        notes.append(f"token counts were not compared: no requests.jsonl in {', '.join(silent)}")
    return notes


def _stored_rows(key: CellKey, pair: Pair) -> Iterator[Row]:
    base, head = pair.base.cells[key], pair.head.cells[key]
    rows = 0
    for metric in _metrics_of(key, [pair]):
        old = [r.figures[metric.column] for r in base.values() if metric.column in r.figures]
        new = [r.figures[metric.column] for r in head.values() if metric.column in r.figures]
        if not old and not new:
            continue
        rows += 1
        if len(old) < len(base) or len(new) < len(head):
            side = "base" if len(old) < len(base) else "head"
            yield Row(key, metric.column, "invalid", reason=f"no figure in {side}")
            continue
        floor = metric.floor_at(median(old), metric.stored_floor)
        yield _metric_row(key, metric, median(old), median(new), judge_stored(metric, old, new, floor), floor)
    if not rows:
        yield Row(key, "cell", "invalid", reason="no figure that can be compared")


def _metric_row(key: CellKey, metric: Metric, base: float, head: float, judged: Judgement, floor: float) -> Row:
    return Row(
        key,
        metric.column,
        judged.state,
        base,
        head,
        judged.worsening,
        floor,
        judged.p_value,
        judged.pairs,
        judged.reason,
    )


def _usable(pair: Pair, key: CellKey) -> bool:
    runs = (pair.base, pair.head)
    return all(key in run.cells and not any(r.problem for r in run.cells[key].values()) for run in runs)


def _figures(pairs: Sequence[Pair], key: CellKey, column: str) -> list[tuple[float, float]]:
    """(base, head) of each usable pair in which both have the figure: a run's figure is its repetitions' median."""
    found = []
    for pair in pairs:
        if not _usable(pair, key):
            continue
        sides = [
            [r.figures[column] for r in run.cells[key].values() if column in r.figures]
            for run in (pair.base, pair.head)
        ]
        if all(sides):
            found.append((median(sides[0]), median(sides[1])))
    return found


def _metrics_of(key: CellKey, pairs: Sequence[Pair]) -> list[Metric]:
    """The metrics that any run has a figure of, without energy where a run marks its window as too short for it."""
    runs = [run for p in pairs for run in (p.base, p.head)]
    blurred = any(key in run.short_energy for run in runs)
    present = {c for run in runs for r in run.cells.get(key, {}).values() for c in r.figures}
    return [m for m in METRICS if m.column in present and not (blurred and m.column == "wh_per_1k_tokens")]


def differences(pairs: Sequence[Pair], floors: Floors) -> tuple[dict[MetricKey, list[float]], dict[MetricKey, float]]:
    """Paired worsenings and floors of every metric that any run has a figure of."""
    worsenings: dict[MetricKey, list[float]] = {}
    limits: dict[MetricKey, float] = {}
    for key in _all_cells(pairs):
        for metric in _metrics_of(key, pairs):
            name, figures = (key, metric.column), _figures(pairs, key, metric.column)
            worsenings[name] = [metric.worsening(*f) for f in figures]
            floor = floors[metric.column]
            limits[name] = metric.floor_at(median(b for b, _ in figures), floor) if figures else floor
    return worsenings, limits


def _paired_rows(
    key: CellKey, pairs: Sequence[Pair], judged: Mapping[MetricKey, Judgement], floors: Floors
) -> Iterator[Row]:
    problems = [
        f"{side}: {r.problem}"
        for p in pairs
        for side, run in (("base", p.base), ("head", p.head))
        for r in run.cells[key].values()
        if r.problem
    ]
    known = _metrics_of(key, pairs)
    if not known:
        yield Row(key, "cell", "invalid", reason=problems[0] if problems else "no figure that can be compared")
    for metric in known:
        judgement = judged[key, metric.column]
        if judgement.state == "invalid" and problems:
            judgement = replace(judgement, reason=f"{judgement.reason}; {problems[0]}")
        figures = _figures(pairs, key, metric.column)
        if not figures:
            yield Row(key, metric.column, "invalid", reason=judgement.reason)
            continue
        base, head = (median(values) for values in zip(*figures, strict=True))
        yield _metric_row(key, metric, base, head, judgement, metric.floor_at(base, floors[metric.column]))
