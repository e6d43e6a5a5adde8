"""Run folders as the gate reads them: strictly. What cannot be read is an error, never an empty cell."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arkbench.errors import UserError
from arkbench.gate import METRICS, CellKey
from arkbench.power.window import SHORT_WINDOW
from arkbench.records import COUNT_COLUMNS

SETTINGS = ("workload", "streams", "context_tokens", "at_once", "prompt_tokens", "output_tokens")
REQUIRED = (
    *CellKey._fields, "repetition", "status", "valid", "reason", "output_hash", *SETTINGS, *COUNT_COLUMNS,
    *(m.column for m in METRICS),
)  # fmt: skip


@dataclass(frozen=True)
class Repetition:
    """One line of cells.csv. `figures` holds the metrics that have a usable value; `problem`: why it is invalid."""

    figures: Mapping[str, float]
    settings: tuple[str, ...]
    output_hash: str
    requests: Mapping[str, int]
    problem: str

    @property
    def failed(self) -> int:
        return self.requests["requests_failed"]

    @property
    def unanswered(self) -> int:
        return self.requests["requests_refused"] + self.requests["requests_timeout"]


TokenKey = tuple[int, int]


@dataclass(frozen=True)
class RunData:
    """A run folder. `tokens`: (prompt, output) tokens by cell, then by (repetition, request); None: not recorded.

    `gpus` are the names of the GPUs that were used, or of the processor where none was.
    """

    path: Path
    gpus: tuple[str, ...]
    scenarios: Mapping[str, str]
    seed: int | None
    cells: Mapping[CellKey, Mapping[int, Repetition]]
    tokens: Mapping[CellKey, Mapping[TokenKey, tuple[int, int]]] | None
    peak_memory: Mapping[CellKey, int]
    short_energy: frozenset[CellKey] = frozenset()


def load_run(path: Path) -> RunData:
    """Reads a run folder; UserError when it is not one, is not complete, or a file of it cannot be understood."""
    if not path.is_dir():
        raise UserError(f"{path}: no such run folder")
    meta = _read_json(path / "run.json")
    status = meta.get("status")
    if status != "complete":
        raise UserError(f"{path}: the run is {status or 'of unknown status'}, not complete (finish it with --resume)")
    cells = _read_cells(path / "cells.csv")
    try:
        details = _details(path)
        return RunData(
            path=path,
            gpus=_hardware(meta),
            scenarios=_scenarios(path, meta),
            seed=meta.get("seed"),
            cells=cells,
            tokens=_read_tokens(path, {(k.scenario, k.variant, k.cell): k for k in cells}),
            peak_memory=_peak_memory(details),
            short_energy=_short_energy(details),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: a file of it cannot be understood ({error!r})") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path}: is not valid JSON ({error})") from None
    if not isinstance(meta, dict):
        raise UserError(f"{path}: is not a JSON object")
    return meta


def _hardware(meta: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the GPUs that the run used; of the processor where it used none."""
    names = sorted(gpu["name"] for gpu in meta.get("gpus") or ())
    if not names or str(meta.get("device") or "").startswith("cpu"):
        return (f"CPU {meta.get('cpu') or 'of unknown name'}",)
    used = meta.get("devices_used")
    return tuple(names[:used] if isinstance(used, int) and len(set(names)) == 1 else names)


def _scenarios(path: Path, meta: Mapping[str, Any]) -> dict[str, str]:
    """Scenario name -> hash of its text."""
    found = {entry["name"]: entry["hash"] for entry in meta.get("scenarios") or ()}
    if not found or not all(found.values()):
        raise UserError(f"{path / 'run.json'}: does not say which scenario ran (no hash of its text)")
    return found


def _read_cells(path: Path) -> dict[CellKey, dict[int, Repetition]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    absent = [c for c in REQUIRED if c not in (reader.fieldnames or ())]
    if absent:
        raise UserError(f"{path}: lacks the columns {', '.join(absent)}")
    cells: dict[CellKey, dict[int, Repetition]] = {}
    try:
        for row in reader:
            _add_row(cells, row)
    except (csv.Error, ValueError) as error:
        raise UserError(f"{path}: line {reader.line_num} cannot be understood ({error})") from None
    if not cells:
        raise UserError(f"{path}: has no cells")
    return cells


def _add_row(cells: dict[CellKey, dict[int, Repetition]], row: dict[str, str]) -> None:
    if None in row or None in row.values():
        raise ValueError("its fields are not as many as the columns")
    key = CellKey(*(row[f] for f in CellKey._fields))
    if not key.cell:
        raise ValueError("the cell has no name")
    repetitions = cells.setdefault(key, {})
    number = int(row["repetition"])
    if number in repetitions:
        raise ValueError(f"repetition {number} of {key} stands there twice")
    repetitions[number] = _repetition(row)


def _repetition(row: dict[str, str]) -> Repetition:
    figures = {m.column: float(row[m.column]) for m in METRICS if row[m.column].strip()}
    return Repetition(
        figures={c: v for c, v in figures.items() if math.isfinite(v) and v > 0},
        settings=tuple(row[s] for s in SETTINGS),
        output_hash=row["output_hash"],
        requests={c: int(row[c] or 0) for c in COUNT_COLUMNS},
        problem=_problem(row, [c for c, v in figures.items() if not (math.isfinite(v) and v > 0)]),
    )


def _problem(row: dict[str, str], unusable: list[str]) -> str:
    if row["status"].strip().lower() not in ("", "ok", "complete"):
        return row["reason"] or f"status {row['status']}"
    if row["valid"].strip().lower() not in ("true", "1", "yes"):
        return row["reason"] or "marked invalid"
    return f"{', '.join(unusable)} is not a positive number" if unusable else ""


def _read_tokens(
    path: Path, keys: Mapping[tuple[str, str, str], CellKey]
) -> dict[CellKey, dict[TokenKey, tuple[int, int]]] | None:
    """Token counts of the answered requests."""
    lines = _json_lines(path / "requests.jsonl")
    if lines is None:
        return None
    tokens: dict[CellKey, dict[TokenKey, tuple[int, int]]] = {key: {} for key in keys.values()}
    for record in lines:
        key = keys.get((record["scenario"], record["variant"], record["cell"]))
        if key is not None and record["status"] == "ok":
            counts = (record["prompt_tokens"], record["output_tokens"])
            tokens[key][int(record["repetition"]), int(record["request"])] = counts
    return tokens


def _details(path: Path) -> list[tuple[CellKey, dict[str, Any]]]:
    """The lines of details.jsonl with their cells; none where there is no such file."""
    lines = _json_lines(path / "details.jsonl") or ()
    return [(CellKey(*(detail[f] for f in CellKey._fields)), detail) for detail in lines]


def _peak_memory(details: Sequence[tuple[CellKey, dict[str, Any]]]) -> dict[CellKey, int]:
    """Most bytes of GPU memory of each cell, all GPUs together, the largest over its repetitions, where known."""
    peaks: dict[CellKey, int] = {}
    for key, detail in details:
        if detail.get("peak_memory_bytes"):
            peaks[key] = max(peaks.get(key, 0), int(detail["peak_memory_bytes"]))
    return peaks


def _short_energy(details: Sequence[tuple[CellKey, dict[str, Any]]]) -> frozenset[CellKey]:
    """Cells whose energy the counter's steps blur."""
    return frozenset(k for k, d in details if any(SHORT_WINDOW in note for note in d.get("energy_notes", ())))


def _json_lines(path: Path) -> Iterator[dict[str, Any]] | None:
    """The objects of a .jsonl file or its gzipped form; None where neither exists."""
    file = path if path.exists() else path.with_name(path.name + ".gz")
    return _parse_lines(file) if file.exists() else None


def _parse_lines(file: Path) -> Iterator[dict[str, Any]]:
    try:
        with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{file}: cannot be understood ({error!r})") from None


def not_comparable(base: RunData, head: RunData) -> str:
    """Why two runs must not be compared, or ""."""
    if base.gpus != head.gpus:
        return f"different GPUs: base {_count(base.gpus)}, head {_count(head.gpus)}"
    if base.scenarios != head.scenarios:
        names = sorted(n for n in base.scenarios.keys() | head.scenarios.keys()
                       if base.scenarios.get(n) != head.scenarios.get(n))  # fmt: skip
        return f"different scenarios: {', '.join(names)}"
    if not base.cells.keys() & head.cells.keys():
        return "the runs have no cell in common (other models or variants?)"
    return ""


def _count(names: tuple[str, ...]) -> str:
    return ", ".join(f"{n} x {name}" for name, n in Counter(names).items())
