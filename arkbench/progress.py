"""What a run says while it runs: a bar with the time that is left, and a line for each thing worth one."""

from __future__ import annotations

import time
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from arkbench.records import Row
from arkbench.scenario import Cell


class RunProgress(Protocol):
    """Told by the runner what it does. `cost` is a cell's estimated seconds, or any weight where none is known.

    `starts`: how many models of how many scenarios have to be started.
    """

    def begin(self, cells: int, cost: float, starts: int) -> None: ...

    def phase(self, text: str) -> None: ...

    def cell(self, cell: Cell, repetition: int) -> None: ...

    def done(self, row: Row, cost: float) -> None: ...

    def note(self, text: str) -> None: ...

    def end(self) -> None: ...


class SilentProgress(RunProgress):
    """Says nothing: every call of the protocol does nothing."""


class RemainingTime:
    """The time that is left: the estimates of what is to come, corrected by what the cells before really took.

    What passes between cells (starts and warm-ups) is counted by the model started, not by the cell.
    """

    def __init__(self, cost: float, starts: int, now: float) -> None:
        self._left = cost
        self._spent = 0.0
        self._measured = 0.0
        self._starts = starts
        self._started = now
        self._models: set[tuple[str, str]] = set()

    def done(self, cost: float, row: Row) -> None:
        self._left = max(0.0, self._left - cost)
        self._spent += cost
        self._measured += row.get("duration_s") or 0.0
        self._models.add((row["scenario"], row["model"]))

    def seconds(self, now: float, last_done: float) -> float | None:
        """Seconds left at `now`, the latest cell having finished at `last_done`; None until a cell has finished."""
        if self._spent <= 0:
            return None
        beside = max(0.0, last_done - self._started - self._measured) / len(self._models)
        cells = self._left * self._measured / self._spent
        return max(0.0, cells + beside * max(0, self._starts - len(self._models)) - (now - last_done))


class LiveProgress:
    """A rich progress bar on a terminal; one line a finished cell where the output is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=None, left="")
        self._remaining = RemainingTime(0.0, 0, 0.0)
        self._last_done = 0.0
        self._count = 0
        self._cells = 0
        self._skipped: set[tuple[str, str, str]] = set()

    def begin(self, cells: int, cost: float, starts: int) -> None:
        self._last_done = time.monotonic()
        self._cells = cells
        self._remaining = RemainingTime(cost, starts, self._last_done)
        self._progress.update(self._task, total=cells, left="time left: not known yet")
        if self._console.is_terminal:
            self._progress.start()

    def phase(self, text: str) -> None:
        self._progress.update(self._task, description=text, left=self._left())

    def cell(self, cell: Cell, repetition: int) -> None:
        self.phase(f"{cell.model} · {cell.variant} · {cell.id} · repetition {repetition + 1}")

    def done(self, row: Row, cost: float) -> None:
        self._count += 1
        self._last_done = time.monotonic()
        self._remaining.done(cost, row)
        self._progress.update(self._task, advance=1, left=self._left())
        if self._said(row):
            return
        left = "" if self._console.is_terminal else self._left()
        doubt = "" if row["status"] == "skipped" else "not valid: "
        mark = "" if row["valid"] else f"  [yellow]{doubt}{escape(row['reason'])}[/]"
        self._console.print(
            f"[dim]{self._count:>4}/{self._cells}[/]  {row['variant']:<10} {row['cell']:<24} "
            f"{row['repetition'] + 1}  {_figure(row):<20}[dim]{left}[/]{mark}",
            highlight=False,
            soft_wrap=True,
        )

    def _said(self, row: Row) -> bool:
        """Whether a line said already why this model's variant is skipped: a reason is worth one line."""
        if row["status"] != "skipped":
            return False
        key = (row["model"], row["variant"], row["reason"])
        known = key in self._skipped
        self._skipped.add(key)
        return known

    def note(self, text: str) -> None:
        self._console.print(f"[yellow]note:[/] {escape(text)}", highlight=False, soft_wrap=True)

    def end(self) -> None:
        self._progress.stop()

    def _left(self) -> str:
        seconds = self._remaining.seconds(time.monotonic(), self._last_done)
        return "time left: not known yet" if seconds is None else f"about {duration(seconds)} left"


def _figure(row: Row) -> str:
    if row.get("decode_tok_s") is not None:
        return f"{row['decode_tok_s']:,.1f} tok/s"
    if row.get("prefill_tok_s") is not None:
        return f"{row['prefill_tok_s']:,.0f} prompt tok/s"
    return str(row["status"])


def duration(seconds: float) -> str:
    """Seconds for people: 45 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
