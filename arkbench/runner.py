"""Runs a plan: targets started, cells warmed up and measured, every request on disk as it ends.

Order: model by model, its scenarios one after the other; within a scenario the repetitions are the outer loop and the
variants alternate (A B, B A, A B), so that a drift of the machine falls on all variants alike and a variant is readied
as seldom as that allows. After every start or turn of switches each cell is warmed up once, with prompts of its own,
and that is in no figure. Cells marked `cold` get a start of their own and no warm-up.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from arkbench import estimate, figures, machine, metrics, workloads
from arkbench.answers import AnswerBook, Exchange
from arkbench.errors import UserError
from arkbench.figures import Energy
from arkbench.folder import RunFolder, cell_key
from arkbench.metrics import Machine, StepCost
from arkbench.plan import Batch, Plan, ScenarioPlan, Variant, batches
from arkbench.progress import RunProgress
from arkbench.records import RequestRecord, Row, write_csv
from arkbench.scenario import Cell
from arkbench.session import Session, TargetMaker
from arkbench.targets import bundled
from arkbench.targets.base import Answer, LoadReport, Target, TargetError, TargetInfo
from arkbench.workloads import PromptSource

IDLE_SECONDS = 5.0

INTERRUPTED = "the run was interrupted; go on with it by --resume"


class EnergyReading(Protocol):
    """What the runner reads of a window's energy (arkbench.power.EnergyReading)."""

    energy_j: float | None
    idle_w: float | None
    valid: bool
    reason: str
    notes: tuple[str, ...]
    missing: tuple[str, ...]


class Meter(Protocol):
    """What the runner asks of a power meter (arkbench.power.Meter)."""

    sources: Sequence[Any]
    missing: Sequence[str]

    def start(self) -> None: ...

    def idle(self, seconds: float) -> Any: ...

    def window(self, t0: float, t1: float) -> EnergyReading: ...

    def stop(self) -> None: ...

    def rows(self, origin: float | None = None) -> list[dict[str, Any]]: ...

    def idle_drift(self) -> str: ...


@dataclass(frozen=True)
class Tools:
    """What the runner works with; tests put their own in.

    `make_target(plan, model, variant)`; `make_meter()`; `rates()`: the machine's measured bandwidth and matrix rate.
    """

    make_target: TargetMaker
    make_meter: Callable[[], Meter]
    rates: Callable[[], Machine]
    device: str


class Runner:
    """One run of a plan into a folder."""

    def __init__(self, plan: Plan, folder: RunFolder, tools: Tools, progress: RunProgress) -> None:
        self._plan = plan
        self._folder = folder
        self._tools = tools
        self._progress = progress
        self._origin = time.monotonic() - folder.elapsed_s
        self._rates = Machine()
        self._meter = tools.make_meter()
        self._answers = AnswerBook(bundled.EXACT_SWITCHES)
        self._costs: dict[tuple[str, str, str, str], float] = {}
        self._complete = 0

    def run(self) -> str:
        """Measures what is missing; returns the run's status. KeyboardInterrupt ends it early: status `partial`."""
        todo = [(cell, repetition) for p in self._plan.scenarios for cell, repetition in self._missing(p)]
        self._estimate_costs()
        starts = len({(cell.scenario, cell.model) for cell, _ in todo})
        self._progress.begin(len(todo), sum(self._cost(cell) for cell, _ in todo), starts)
        interrupted = False
        try:
            self._prepare()
            for batch in batches(self._plan.scenarios):
                self._run_batch(batch)
        except KeyboardInterrupt:
            interrupted = True
            self._folder.info["notes"].append(INTERRUPTED)
        finally:
            self._progress.end()
            self._stop_meter(interrupted)
        return self._finish(interrupted, len(todo))

    def _missing(self, plan: ScenarioPlan) -> Iterator[tuple[Cell, int]]:
        for cell in plan.cells:
            for repetition in range(plan.scenario.repetitions):
                if cell_key(cell, repetition) not in self._folder.done:
                    yield cell, repetition

    def _estimate_costs(self) -> None:
        assumed = estimate.assumed_machine(self._tools.device, self._plan.options.stages)
        for plan in self._plan.scenarios:
            costs = estimate.cell_costs(plan, assumed, self._plan.options.endpoint is not None)
            for (model, variant, cell), known in costs.items():
                self._costs[plan.scenario.name, model, variant, cell] = known.seconds if known else 1.0

    def _cost(self, cell: Cell) -> float:
        return self._costs[cell.scenario, cell.model, cell.variant, cell.id]

    def _prepare(self) -> None:
        self._progress.phase("measuring what this machine allows")
        started = time.monotonic()
        self._rates = self._tools.rates()
        self._add_seconds("machine's rates", time.monotonic() - started)
        info = self._folder.info
        info["device"] = self._tools.device
        info["bandwidth_bytes_s"] = self._rates.bandwidth_bytes_s
        info["matrix_flop_s"] = self._rates.matrix_flop_s
        info["devices_used"] = self._rates.stages if self._rates.bandwidth_bytes_s else None
        info["energy_missing"] = list(self._meter.missing)
        self._folder.save()
        self._meter.start()
        if self._meter.sources:
            self._progress.phase("measuring the power at rest")
            self._idle()

    def _idle(self) -> None:
        self._meter.idle(IDLE_SECONDS)
        self._add_seconds("power at rest", IDLE_SECONDS)

    def _stop_meter(self, interrupted: bool) -> None:
        if self._meter.sources:
            if not interrupted:
                self._idle()
            drift = self._meter.idle_drift()
            if drift:
                self._folder.info["notes"].append(drift)
        self._meter.stop()
        rows = self._meter.rows(self._origin)
        if rows:
            write_csv(self._folder.path / "power.csv", rows, list(rows[0]))

    def _finish(self, interrupted: bool, todo: int) -> str:
        complete = self._complete == todo and not interrupted
        measured = self._complete > 0 or bool(self._folder.done)
        return "complete" if complete else "partial" if measured or interrupted else "failed"

    # ------------------------------------------------------------------------------------- models and variants

    def _run_batch(self, batch: Batch) -> None:
        session = Session(batch, self._plan, self._tools.make_target, self._folder, self._progress)
        try:
            for plan in batch.plans:
                self._run_scenario(plan, batch.model, session)
        finally:
            session.close()
            for name, seconds in session.seconds.items():
                self._add_seconds(name, seconds)

    def _run_scenario(self, plan: ScenarioPlan, model: str, session: Session) -> None:
        missing = {cell_key(cell, repetition) for cell, repetition in self._missing(plan) if cell.model == model}
        for repetition in range(plan.scenario.repetitions):
            order = plan.variants if repetition % 2 == 0 else plan.variants[::-1]
            for variant in order:
                cells = [c for c in plan.of(model, variant.name) if cell_key(c, repetition) in missing]
                for cell in sorted(cells, key=lambda c: not c.cold):
                    self._run_cell(plan, session, variant, cell, repetition)

    def _run_cell(self, plan: ScenarioPlan, session: Session, variant: Variant, cell: Cell, repetition: int) -> None:
        try:
            if cell.workload == "kernels":
                self._progress.cell(cell, repetition)
                row, detail = self._kernels(cell, repetition)
            else:
                target, info = session.ready(plan, variant, cell)
                self._progress.cell(cell, repetition)
                source = session.source(info, cell, repetition)
                row, detail = self._measure(plan, target, info, source, cell, repetition)
                if row["status"] == "failed":
                    session.restart_needed(variant)
        except TargetError as error:
            row, detail = figures.empty_row(cell, repetition, "skipped", str(error)), {}
        except Exception as error:
            reason = session.fault(variant, cell, repetition, error)
            row, detail = figures.empty_row(cell, repetition, "failed", reason), {}
        self._complete += row["status"] == "complete"
        self._add_seconds("cells", row.get("duration_s") or 0.0)
        self._folder.add_cell(row, detail)
        self._progress.done(row, self._cost(cell))

    def _add_seconds(self, name: str, seconds: float) -> None:
        """Where the time of a run went, summed into run.json."""
        spent = self._folder.info["seconds"]
        spent[name] = round(spent.get(name, 0.0) + seconds, 3)

    # --------------------------------------------------------------------------------------------------- cells

    def _kernels(self, cell: Cell, repetition: int) -> tuple[Row, dict[str, Any]]:
        started = time.monotonic()
        rows = bundled.measure_kernels(cell.parts[0], cell.rows, self._tools.device)
        row = figures.identity(cell) | {"repetition": repetition, "status": "complete", "valid": True, "reason": ""}
        return row | {"duration_s": time.monotonic() - started}, {"kernels": rows}

    def _measure(
        self,
        plan: ScenarioPlan,
        target: Target,
        info: TargetInfo,
        source: PromptSource,
        cell: Cell,
        repetition: int,
    ) -> tuple[Row, dict[str, Any]]:
        records: list[RequestRecord] = []
        outputs: dict[int, Sequence[int] | str | None] = {}
        prompts: dict[int, Sequence[int]] = {}

        def on_answer(answer: Answer) -> None:
            record = self._record(cell, repetition, answer)
            records.append(record)
            outputs[answer.request] = answer.tokens if answer.tokens is not None else answer.text
            self._folder.add_request(record)

        started = time.monotonic()
        machine.reset_peak_memory(self._tools.device)
        try:
            with _no_collection():
                reports = list(_run_rounds(plan, target, source, cell, on_answer, outputs, prompts))
        except KeyboardInterrupt:
            self._folder.add_cell(figures.empty_row(cell, repetition, "partial", "interrupted", records), {})
            raise
        except TargetError as error:
            self._progress.note(f"{cell.model}, {cell.variant}, {cell.id}: {error}")
            return figures.empty_row(cell, repetition, "failed", str(error), records), {}
        duration_s = time.monotonic() - started
        if repetition == 0 and _draws_timeline(plan, cell):
            for report in reports:
                self._folder.add_timeline(cell, report.timeline, self._origin)
        energy, energy_detail = self._energy(cell, records)
        digest = _hash(cell, records, outputs)
        cost = _cost_of(info)
        row = figures.cell_row(cell, repetition, records, self._rates, cost, energy, digest, duration_s)
        _judge_client(row, reports)
        detail = _detail(records, reports) | energy_detail
        peak = machine.peak_memory(self._tools.device) if info.in_process else None
        detail |= {} if peak is None else {"peak_memory_bytes": peak}
        if digest is not None:
            exchanges = {n: Exchange(prompts[n], o) for n, o in outputs.items() if o and not isinstance(o, str)}
            detail |= self._answers.examine(plan, cell, repetition, target, digest, exchanges)
        return row, detail

    def _record(self, cell: Cell, repetition: int, answer: Answer) -> RequestRecord:
        def relative(seconds: float | None) -> float | None:
            return None if seconds is None else seconds - self._origin

        times = [time - self._origin for time in answer.piece_times]
        return RequestRecord(
            scenario=cell.scenario,
            variant=cell.variant,
            cell=cell.id,
            repetition=repetition,
            request=answer.request,
            scheduled_s=answer.scheduled - self._origin,
            sent_s=relative(answer.sent),
            first_token_s=times[0] if times else None,
            last_token_s=times[-1] if times else None,
            token_times_s=times,
            token_counts=list(answer.piece_counts),
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=answer.output_tokens,
            status=answer.status,
            error=answer.error,
        )

    def _energy(self, cell: Cell, records: Sequence[RequestRecord]) -> tuple[Energy, dict[str, Any]]:
        window = figures.energy_window(cell, records)
        if window is None or not self._meter.sources:
            return Energy(), {}
        reading = self._meter.window(window[0] + self._origin, window[1] + self._origin)
        notes = [*reading.notes, *reading.missing]
        invalid = "" if reading.valid else reading.reason
        return Energy(reading.energy_j, reading.idle_w, invalid), {"energy_notes": notes} if notes else {}


def _run_rounds(
    plan: ScenarioPlan,
    target: Target,
    source: PromptSource,
    cell: Cell,
    on_answer: Callable[[Answer], None],
    outputs: Mapping[int, Sequence[int] | str | None],
    prompts: dict[int, Sequence[int]],
) -> Iterator[LoadReport]:
    """`outputs` is read, `prompts` is filled: by request."""
    rounds = workloads.rounds(cell, source, plan.scenario.limits)
    load = next(rounds)
    while True:
        prompts.update((request.request, request.prompt) for request in load.requests)
        yield target.run(load, on_answer)
        tokens = {request: output for request, output in outputs.items() if not isinstance(output, str)}
        try:
            load = rounds.send(tokens)
        except StopIteration:
            return


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps Python's garbage collection out of a measurement."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _cost_of(info: TargetInfo) -> StepCost:
    return StepCost(
        info.step_weight_bytes,
        info.cache_bytes_per_token or 0,
        info.state_bytes_per_request or 0,
        info.active_parameters,
    )


def _hash(
    cell: Cell, records: Sequence[RequestRecord], outputs: Mapping[int, Sequence[int] | str | None]
) -> str | None:
    """The hash of a cell's answers; None where they are no fixed set (a load of fixed duration, a failed request)."""
    if cell.workload == "sustained" or any(r.status != "ok" for r in records):
        return None
    known = [(request, output) for request, output in outputs.items() if output is not None]
    return figures.output_hash(known) if known and len(known) == len(records) else None


def _draws_timeline(plan: ScenarioPlan, cell: Cell) -> bool:
    """Of the bursts of one length that whose picture shows enough and can be read: the largest of up to four."""
    if cell.workload != "burst" or cell.at_once is None:
        return False
    sizes = [c.at_once for c in plan.cells if c.workload == "burst" and c.at_once is not None and c.at_once <= 4]
    return cell.at_once == max(sizes, default=0)


def _judge_client(row: Row, reports: Sequence[LoadReport]) -> None:
    reasons = [report.reason for report in reports if not report.valid]
    if reasons:
        row["valid"] = False
        row["reason"] = "; ".join([r for r in (row["reason"], *dict.fromkeys(reasons)) if r])


def _detail(records: Sequence[RequestRecord], reports: Sequence[LoadReport]) -> dict[str, Any]:
    lags = [report.client_lag_p99_s for report in reports if report.client_lag_p99_s is not None]
    notes = list(dict.fromkeys(note for report in reports for note in report.notes))
    detail: dict[str, Any] = {"most_in_flight": metrics.most_in_flight(records)}
    resident = [report.resident_requests for report in reports if report.resident_requests is not None]
    if resident:
        detail["resident_requests"] = max(resident)
    if lags:
        detail["client_lag_p99_s"] = max(lags)
    return detail | ({"notes": notes} if notes else {})


def measure_rates(device: str, stages: int) -> Machine:
    """This machine's copy bandwidth and matrix rate, measured once a run; raises UserError where it has no room."""
    try:
        return Machine(machine.copy_bandwidth(device), machine.matrix_rate(device), stages)
    except RuntimeError as error:  # torch's OutOfMemoryError is one
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"{device}: its memory bandwidth cannot be measured ({reason:.200}); free it and try again"
        ) from None
