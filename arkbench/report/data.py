"""Run folders, read for a report: tolerant of what an interrupted run did not write, silent about nothing."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from arkbench.metrics import ABOVE_LIMIT
from arkbench.records import CELL_COLUMNS, COUNT_COLUMNS, FIGURE_COLUMNS, VERDICT_COLUMNS
from arkbench.report.figures import Figure, number, text

CELL_KEY = ["scenario", "variant", "workload", "model", "cell"]
WORDS = (*CELL_KEY, "status", "output_hash", "valid", "reason")
FIGURES = (*COUNT_COLUMNS, *FIGURE_COLUMNS)
SETTINGS = ("streams", "context_tokens", "at_once", "prompt_tokens", "output_tokens")


def above_limit(row: Mapping[str, Any]) -> bool:
    """Whether a figure passes what the hardware allows: something slowed the machine down as that was measured."""
    return (number(row.get("limit_fraction")) or 0.0) > 1.0


@dataclass(frozen=True, eq=False)
class Run:
    """One run folder. `label` tells it from the others of a report. `absent`: files it should have and has not."""

    path: Path
    label: str
    meta: Mapping[str, Any]
    cells: pd.DataFrame
    summary: pd.DataFrame
    verdicts: pd.DataFrame
    timeline: Sequence[Mapping[str, Any]]
    details: Sequence[Mapping[str, Any]]
    request_statuses: Mapping[str, int]
    absent: Sequence[str]

    @property
    def status(self) -> str:
        return text(self.meta.get("status")) or "partial"

    @property
    def gpus(self) -> tuple[str, ...]:
        """GPU names without the maker's."""
        listed = self.meta.get("gpus") or []
        names = [text(gpu.get("name")) if isinstance(gpu, Mapping) else text(gpu) for gpu in listed]
        return tuple(name.removeprefix("NVIDIA ").strip() for name in names if name)

    @property
    def hardware(self) -> str:
        """What the engine ran on: `2 × H200`, `RTX 5090`, `CPU`, or `an endpoint`, which does not say.

        The GPUs of this machine are none of an endpoint's, and no more than the run used.
        """
        device = text(self.meta.get("device"))
        if device == "endpoint":
            return "an endpoint"
        gpus = () if device.startswith("cpu") else self.gpus[: self.meta.get("devices_used") or None]
        counted = Counter(gpus)
        return " + ".join(f"{n} × {name}" if n > 1 else name for name, n in counted.items()) or "CPU"

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(model for model in self.summary["model"] if model))

    @property
    def commit(self) -> str:
        return text(self.meta.get("commit"))[:9]

    def mark(self, row: Mapping[str, Any]) -> str:
        """Why a cell's figures, or their limit, are not to be trusted; empty when they are."""
        return "; ".join(reason for reason, _ in self.marks(row))

    def marks(self, row: Mapping[str, Any]) -> list[tuple[str, int]]:
        """The reasons and how many repetitions each concerns."""
        same = self.cells
        for column in CELL_KEY:
            same = same[same[column] == row[column]]
        reasons: Counter[str] = Counter()
        for _, cell in same.iterrows():
            if not is_valid(cell["valid"]):
                reasons[text(cell["reason"]) or "marked invalid"] += 1
            elif cell["status"] not in ("", "ok", "complete"):
                reasons[text(cell["reason"]) or f"status {cell['status']}"] += 1
            if above_limit(cell):
                reasons[ABOVE_LIMIT] += 1
        return list(reasons.items())

    def figure(self, row: Mapping[str, Any], column: str, with_limit: bool = False) -> Figure:
        """A summary figure with its spread, its mark and, if asked, its fraction of the limit."""
        value = number(row.get(column))
        if value is None:
            return Figure(None, mark=self.mark(row))
        limit = number(row.get("limit_fraction")) if with_limit else None
        return Figure(value, number(row.get(f"{column}_spread")), limit, mark=self.mark(row))


def scenario_entries(run: Run) -> list[Mapping[str, Any]]:
    """What run.json says of its scenarios: it may hold one or a list."""
    held = run.meta.get("scenarios") or run.meta.get("scenario") or []
    return [entry for entry in (held if isinstance(held, list) else [held]) if isinstance(entry, Mapping)]


def is_valid(value: Any) -> bool:
    """`valid` as written; empty counts as valid, since older folders leave it out."""
    return text(value).strip().lower() not in ("false", "0", "0.0", "no")


def setting(row: Mapping[str, Any], with_context: bool = True) -> str:
    """A cell in words: `16 streams, 1,000 of context`, `prompt of 256`, `burst of 8 × 4,000`; else its id."""
    streams, context, prompt, at_once = (
        number(row[column]) for column in ("streams", "context_tokens", "prompt_tokens", "at_once")
    )
    if row["workload"] in ("decode", "sustained") and streams is not None:
        name = f"{streams:,.0f} {'stream' if streams == 1 else 'streams'}"
        return f"{name}, {context:,.0f} of context" if with_context and context is not None else name
    if row["workload"] == "prefill" and prompt is not None:
        return f"prompt of {prompt:,.0f}"
    if row["workload"] == "burst" and prompt is not None and at_once is not None:
        return f"burst of {at_once:,.0f} × {prompt:,.0f}"
    return text(row["cell"])


def load(paths: Sequence[Path]) -> list[Run]:
    """Reads run folders and labels them by what tells them apart. FileNotFoundError: not a run folder."""
    runs = [_load(Path(path)) for path in paths]
    return [replace(run, label=label) for run, label in zip(runs, _labels(runs), strict=True)]


def _load(path: Path) -> Run:
    if not (path / "run.json").is_file() and not (path / "cells.csv").is_file():
        raise FileNotFoundError(f"{path}: not a run folder (no run.json and no cells.csv); name the folder of a run")
    absent = [name for name in ("run.json", "cells.csv", "summary.csv", "verdicts.csv") if not (path / name).is_file()]
    meta = json.loads((path / "run.json").read_text(encoding="utf-8")) if "run.json" not in absent else {}
    cells = _table(path / "cells.csv", CELL_COLUMNS)
    summary = _table(path / "summary.csv", (*CELL_KEY, *SETTINGS, *FIGURES))
    if summary.empty and not cells.empty:
        summary = summarise(cells)
    statuses = _request_statuses(path)
    if statuses is None:
        absent.append("requests.jsonl")
    return Run(
        path=path,
        label="",
        meta=meta,
        cells=cells,
        summary=summary,
        verdicts=_table(path / "verdicts.csv", VERDICT_COLUMNS),
        details=list(_json_lines(path / "details.jsonl")),
        timeline=list(_json_lines(path / "timeline.jsonl")),
        request_statuses=statuses or {},
        absent=absent,
    )


def _table(path: Path, columns: Iterable[str]) -> pd.DataFrame:
    """A CSV with at least these columns, empty where the file or the column is missing; names are never numbers."""
    columns = list(columns)
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
    except (FileNotFoundError, pd.errors.EmptyDataError):
        table = pd.DataFrame(columns=columns, dtype=str)
    for column in columns:
        if column not in table:
            table[column] = ""
    numeric = [c for c in table if c in FIGURES or c in SETTINGS or c == "repetition" or c.endswith("_spread")]
    for column in numeric:
        table[column] = [number(value) for value in table[column]]
        table[column] = table[column].astype(float)
    return table


def summarise(cells: pd.DataFrame) -> pd.DataFrame:
    """Medians over the valid repetitions (over all where none is valid) and (max - min) / median."""
    rows = []
    for key, group in cells.groupby(CELL_KEY, sort=False):
        valid = group[[is_valid(value) for value in group["valid"]]]
        used = valid if len(valid) else group
        row = dict(zip(CELL_KEY, key, strict=True))
        for column in SETTINGS:
            row[column] = used[column].iloc[0]
        for column in FIGURES:
            median = used[column].median()
            row[column] = median
            if used[column].count() > 1 and median:
                row[f"{column}_spread"] = (used[column].max() - used[column].min()) / abs(median)
        rows.append(row)
    return pd.DataFrame(rows)


def _json_lines(path: Path) -> Iterable[Mapping[str, Any]]:
    """The whole lines of a JSON Lines file; a line torn by a kill is left out."""
    zipped = path.with_name(path.name + ".gz")
    found = [place for place in (path, zipped) if place.is_file()]
    if not found:
        return
    with (gzip.open if found[0] == zipped else open)(found[0], "rt", encoding="utf-8") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def _request_statuses(path: Path) -> Counter[str] | None:
    if not any((path / name).is_file() for name in ("requests.jsonl", "requests.jsonl.gz")):
        return None
    return Counter(text(record.get("status")) for record in _json_lines(path / "requests.jsonl"))


def _labels(runs: Sequence[Run]) -> list[str]:
    """The shortest of hardware, model, commit and start that tells every run from every other."""
    facets = [
        [run.hardware for run in runs],
        [", ".join(run.models) if len(run.models) <= 2 else f"{len(run.models)} models" for run in runs],
        [run.commit for run in runs],
        [text(run.meta.get("start_utc"))[:16].replace("T", " ") for run in runs],
        [run.path.name for run in runs],
    ]
    labels = [[facets[0][i]] for i in range(len(runs))]
    for facet in facets[1:]:
        if len({tuple(label) for label in labels}) == len(runs):
            break
        if len(set(facet)) > 1:
            for label, value in zip(labels, facet, strict=True):
                label.append(value)
    return [" · ".join(part for part in label if part) for label in labels]
