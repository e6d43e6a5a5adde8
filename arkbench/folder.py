"""A run folder being written: created, resumed, appended to line by line, finished."""

from __future__ import annotations

import itertools
import json
import shlex
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import arkbench
from arkbench import machine
from arkbench.errors import UserError
from arkbench.figures import summary_rows
from arkbench.plan import Plan, RunOptions, ScenarioPlan, option_conflicts
from arkbench.records import (
    CELL_COLUMNS,
    SUMMARY_COLUMNS,
    LineWriter,
    RequestRecord,
    Row,
    csv_line,
    read_requests,
    read_rows,
    read_run,
    request_line,
    write_csv,
    write_json,
    write_text,
)
from arkbench.scenario import Cell, file_safe

ERRORS_FILE = "errors.log"
SECRET_OPTIONS = ("--api-key",)
CellKey = tuple[str, str, str, str, int]


def cell_key(cell: Cell, repetition: int) -> CellKey:
    return (cell.scenario, cell.variant, cell.model, cell.id, repetition)


def row_key(row: dict[str, str]) -> CellKey:
    return (row["scenario"], row["variant"], row["model"], row["cell"], int(row["repetition"]))


def default_path(plan: Plan, now: datetime) -> Path:
    """results/runs/<scenario>-<model>-<timestamp> under the current directory, made here: no other run takes it too.

    Raises UserError where it cannot be made.
    """
    wanted = _default_name(plan, now)
    for number in itertools.count(1):
        path = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}); name another folder by --output") from None
    raise AssertionError("unreachable")


def _default_name(plan: Plan, now: datetime) -> Path:
    names = [p.scenario.name for p in plan.scenarios]
    models = list(dict.fromkeys(model for p in plan.scenarios for model in p.models))
    scenario = names[0] if len(names) == 1 else f"{len(names)}-scenarios"
    model = file_safe(models[0]) if len(models) == 1 else f"{len(models)}-models"
    return Path("results") / "runs" / f"{scenario}-{model}-{now:%Y%m%d-%H%M%S}"


def command_line(arguments: Sequence[str]) -> str:
    """The command as it was typed, keys left out."""
    shown = []
    hide = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if name in SECRET_OPTIONS:
            shown.append(f"{name}=***" if equals else name)
            hide = not equals
        else:
            shown.append("***" if hide else argument)
            hide = False
    return shlex.join(["arkbench", *shown])


class RunFolder:
    """The files of one run. `info` is run.json; `done` the cells and repetitions that are complete.

    `elapsed_s`: the latest time in the records, where the clock of a resumed run goes on.
    """

    def __init__(self, path: Path, info: dict[str, Any]) -> None:
        self.path = path
        self.info = info
        self.done: set[CellKey] = set()
        self.elapsed_s = 0.0
        self._requests: LineWriter | None = None
        self._cells: LineWriter | None = None
        self._details: LineWriter | None = None
        self._timeline: LineWriter | None = None

    @staticmethod
    def create(path: Path, plan: Plan, arguments: Sequence[str]) -> RunFolder:
        """A new run folder; raises UserError where the path is in use or cannot be written."""
        try:
            if path.exists() and not path.is_dir():
                raise UserError(f"{path}: is a file; name a new folder by --output")
            if (path / "run.json").exists():
                raise UserError(f"{path}: holds a run; name a new folder, or go on with that run by --resume {path}")
            if path.exists() and any(path.iterdir()):
                raise UserError(f"{path}: is not empty; name a new folder by --output")
            path.mkdir(parents=True, exist_ok=True)
            write_text(path / "cells.csv", ",".join(CELL_COLUMNS) + "\n")
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}); name another folder by --output") from None
        folder = RunFolder(path, _new_info(plan, arguments))
        folder.save()
        return folder

    @staticmethod
    def resume(path: Path, plan: Plan) -> RunFolder:
        """An earlier run's folder, ready for what is missing in it; raises UserError where it is not this plan's.

        Rows that are not complete are dropped, to be measured again. Requests of cells that did not end move to
        requests.interrupted.jsonl: they are kept, and in no figure.
        """
        info = read_run(path)
        _check_same_scenarios(path, info, plan)
        folder = RunFolder(path, info)
        rows = [row for row in read_rows(path / "cells.csv") if row.get("status") == "complete"]
        folder.done = {row_key(row) for row in rows}
        write_csv(path / "cells.csv", rows, CELL_COLUMNS)
        folder._keep_finished_requests()
        info["status"] = "partial"
        info.setdefault("seconds", {})
        info["notes"] = [note for note in info.get("notes", []) if "interrupted" not in note]
        info.setdefault("resumed_utc", []).append(_now())
        folder.save()
        return folder

    def _keep_finished_requests(self) -> None:
        """Splits the records by whether their cell ended. The key of a record has no model: its cell's id has."""
        finished = {(s, v, c, r) for s, v, _, c, r in self.done}
        kept, rest = [], []
        for record in read_requests(self.path):
            self.elapsed_s = max(self.elapsed_s, record.last_token_s or record.scheduled_s)
            key = (record.scenario, record.variant, record.cell, record.repetition)
            (kept if key in finished else rest).append(request_line(record) + "\n")
        if rest:
            aside = self.path / "requests.interrupted.jsonl"
            before = aside.read_text() if aside.exists() else ""
            write_text(aside, before + "".join(rest))
        write_text(self.path / "requests.jsonl", "".join(kept))

    def save(self) -> None:
        """Writes run.json."""
        write_json(self.path / "run.json", self.info)

    def add_request(self, record: RequestRecord) -> None:
        self._requests = self._requests or LineWriter(self.path / "requests.jsonl")
        self._requests.write(request_line(record))

    def add_cell(self, row: Row, detail: dict[str, Any]) -> None:
        """A line of cells.csv, and in details.jsonl what has no column there."""
        self._details = self._details or LineWriter(self.path / "details.jsonl")
        keys = {name: row[name] for name in ("scenario", "variant", "model", "cell", "repetition")}
        self._details.write(json.dumps(keys | detail, separators=(",", ":")))
        self._cells = self._cells or LineWriter(self.path / "cells.csv")
        self._cells.write(csv_line(row, CELL_COLUMNS))

    def add_error(self, where: str, error: BaseException) -> None:
        """The traceback of a fault, into errors.log."""
        text = "".join(traceback.format_exception(error))
        with (self.path / ERRORS_FILE).open("a", encoding="utf-8") as file:
            file.write(f"{_now()} {where}\n{text}\n")

    def add_timeline(self, cell: Cell, lines: Sequence[dict[str, Any]], origin: float) -> None:
        """Which stage worked on which piece when, into timeline.jsonl; times become seconds since the run began."""
        self._timeline = self._timeline or LineWriter(self.path / "timeline.jsonl")
        keys = {"scenario": cell.scenario, "variant": cell.variant, "cell": cell.id}
        for line in lines:
            times = {name: round(line[name] - origin, 6) for name in ("start_s", "end_s")}
            self._timeline.write(json.dumps(keys | line | times, separators=(",", ":")))

    def close(self) -> None:
        for writer in (self._requests, self._cells, self._details, self._timeline):
            if writer is not None:
                writer.close()

    def finish(self, status: str) -> None:
        """Writes the summary and the last state of run.json."""
        self.close()
        self.info["status"] = status
        self.info["end_utc"] = _now()
        self.save()
        summarize(self.path)


def summarize(path: Path) -> None:
    """Writes summary.csv from cells.csv."""
    write_csv(path / "summary.csv", summary_rows(read_rows(path / "cells.csv")), SUMMARY_COLUMNS)


def stored_options(path: Path, api_key: str | None) -> RunOptions:
    """The options that an earlier run was started with."""
    try:
        return RunOptions.restored(read_run(path)["options"], api_key)
    except (KeyError, TypeError):
        raise UserError(f"{path}/run.json: does not hold the options of its run; it cannot be resumed") from None


def check_options(path: Path, asked: RunOptions, stored: RunOptions) -> None:
    """Raises UserError where an option was given that differs from the run that is to be resumed."""
    conflicts = option_conflicts(asked, stored)
    if conflicts:
        raise UserError(
            f"--resume {path}: {', '.join(conflicts)} differ from the run's own; leave them out or start a new run"
        )


def _check_same_scenarios(path: Path, info: dict[str, Any], plan: Plan) -> None:
    stored = {entry["name"]: entry["hash"] for entry in info.get("scenarios", [])}
    now = {p.scenario.name: p.loaded.hash for p in plan.scenarios}
    changed = [name for name in now if stored.get(name) != now[name]]
    if changed:
        raise UserError(f"--resume {path}: the scenario '{changed[0]}' has changed since that run; start a new run")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _new_info(plan: Plan, arguments: Sequence[str]) -> dict[str, Any]:
    described = [_describe(p) for p in plan.scenarios]
    return {
        "arkbench_version": arkbench.__version__,
        "commit": machine.git_commit(Path(__file__).parent),
        "command": command_line(arguments),
        "options": plan.options.stored(),
        "scenario": described[0],
        "scenarios": described,
        "switches": plan.switches(),
        "models": list(dict.fromkeys(model for p in plan.scenarios for model in p.models)),
        "geometry": {},
        "seed": plan.options.seed,
        **machine.provenance(),
        "device": plan.options.device,
        "device_name": None,
        "devices_used": None,
        "bandwidth_bytes_s": None,
        "matrix_flop_s": None,
        "start_seconds": {},
        "seconds": {},
        "start_utc": _now(),
        "end_utc": None,
        "status": "partial",
        "answers": None,
        "notes": [note for p in plan.scenarios for note in p.notes],
    }


def _describe(plan: ScenarioPlan) -> dict[str, Any]:
    scenario = plan.scenario
    return {
        "name": scenario.name,
        "title": scenario.title,
        "note": scenario.note,
        "target": scenario.target,
        "repetitions": scenario.repetitions,
        "presets": {variant.name: variant.preset for variant in plan.variants},
        "targets": {variant.name: variant.target for variant in plan.variants},
        "text": plan.loaded.text,
        "hash": plan.loaded.hash,
    }
