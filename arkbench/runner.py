"""Runs a plan: targets started, cells warmed up and measured, every request on disk as it ends.

Order: model by model; within a model the repetitions are the outer loop and the variants alternate (A B, B A, A B),
so that a drift of the machine falls on all variants alike and a variant is readied as seldom as that allows. Each
variant's first use is a full start, whose cost is recorded. After every start each cell is warmed up once, with
prompts of its own, and that is in no figure. Cells marked `cold` get a start of their own and no warm-up.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from arkbench import estimate, figures, machine, metrics, workloads
from arkbench.figures import Energy
from arkbench.folder import ERRORS_FILE, RunFolder, cell_key
from arkbench.metrics import Machine, StepCost
from arkbench.plan import Plan, ScenarioPlan, Variant
from arkbench.progress import RunProgress
from arkbench.records import RequestRecord, Row, write_csv
from arkbench.scenario import Cell
from arkbench.targets import bundled
from arkbench.targets.base import Answer, LoadReport, Target, TargetError, TargetInfo
from arkbench.workloads import PromptSource

ENDPOINT_VOCAB = 32_000
"""Token ids below this are taken to exist in any model that an endpoint serves and the catalogue does not know."""

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

    `make_target(plan, model)`; `make_meter()`; `rates()`: the machine's measured bandwidth and matrix rate.
    """

    make_target: Callable[[ScenarioPlan, str], Target]
    make_meter: Callable[[], Meter]
    rates: Callable[[], Machine]
    device: str


@dataclass
class _Session:
    """A target and what of it is ready. `warm`: ids of the cells that were warmed up since it was started."""

    target: Target
    variant: str | None = None
    info: TargetInfo | None = None
    seen: set[str] = field(default_factory=set)
    warm: set[str] = field(default_factory=set)
    broken: dict[str, str] = field(default_factory=dict)


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
            for scenario_plan in self._plan.scenarios:
                for model in scenario_plan.models:
                    self._run_model(scenario_plan, model)
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
        self._rates = self._tools.rates()
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
            self._meter.idle(IDLE_SECONDS)

    def _stop_meter(self, interrupted: bool) -> None:
        if self._meter.sources:
            if not interrupted:
                self._meter.idle(IDLE_SECONDS)
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

    def _run_model(self, plan: ScenarioPlan, model: str) -> None:
        missing = {cell_key(cell, repetition) for cell, repetition in self._missing(plan) if cell.model == model}
        if not missing:
            return
        session = _Session(self._tools.make_target(plan, model))
        try:
            for repetition in range(plan.scenario.repetitions):
                order = plan.variants if repetition % 2 == 0 else plan.variants[::-1]
                for variant in order:
                    cells = [c for c in plan.of(model, variant.name) if cell_key(c, repetition) in missing]
                    for cell in sorted(cells, key=lambda c: not c.cold):
                        self._run_cell(plan, session, variant, cell, repetition)
        finally:
            session.target.close()

    def _run_cell(self, plan: ScenarioPlan, session: _Session, variant: Variant, cell: Cell, repetition: int) -> None:
        try:
            if variant.name in session.broken:
                raise TargetError(session.broken[variant.name])
            if cell.workload == "kernels":
                self._progress.cell(cell, repetition)
                row, detail = self._kernels(cell, repetition)
            else:
                self._ready(plan, session, variant, cell)
                self._progress.cell(cell, repetition)
                row, detail = self._measure(plan, session, variant, cell, repetition)
        except TargetError as error:
            row, detail = figures.empty_row(cell, repetition, "skipped", str(error)), {}
        except Exception as error:
            row, detail = self._unexpected(session, variant, cell, repetition, error), {}
        self._complete += row["status"] == "complete"
        self._folder.add_cell(row, detail)
        self._progress.done(row, self._cost(cell))

    def _unexpected(
        self, session: _Session, variant: Variant, cell: Cell, repetition: int, error: Exception
    ) -> dict[str, Any]:
        """The row of a cell that met a fault of the program: its traceback is kept, the target ended, the run goes on.

        A variant that could not even be started is not tried again.
        """
        self._folder.add_error(f"{cell.model}, {variant.name}, {cell.id}, repetition {repetition + 1}", error)
        first = next(iter(str(error).strip().splitlines()), "")
        reason = f"unexpected {type(error).__name__}: {first[:200]} (see {ERRORS_FILE} in the run folder)"
        self._progress.note(f"{cell.model}, {variant.name}, {cell.id}: {reason}")
        if session.variant != variant.name:
            session.broken[variant.name] = reason
        session.variant = None
        session.seen.clear()
        traceback.clear_frames(error.__traceback__)
        session.target.close()
        gc.collect()
        return figures.empty_row(cell, repetition, "failed", reason)

    def _ready(self, plan: ScenarioPlan, session: _Session, variant: Variant, cell: Cell) -> None:
        """The target running this variant, and warmed up for this cell; raises TargetError."""
        if session.variant != variant.name or cell.cold:
            self._start(plan, session, variant, cell)
        if not cell.cold and cell.id not in session.warm:
            self._progress.phase(f"{cell.model} · {variant.name} · {cell.id} · warming up")
            source = self._source(session, cell, -1)
            session.target.run(workloads.warm_up(cell, source, plan.scenario.limits), lambda answer: None)
            session.warm.add(cell.id)

    def _start(self, plan: ScenarioPlan, session: _Session, variant: Variant, cell: Cell) -> None:
        self._progress.phase(f"{cell.model} · {variant.name} · starting")
        if variant.name not in session.seen or cell.cold:
            session.target.close()
        session.variant = None
        session.warm.clear()
        needs = plan.needs(cell.model)
        started = time.monotonic()
        try:
            session.info = session.target.start(variant.switches, needs.streams, needs.tokens, needs.cache_tokens)
        except TargetError as error:
            session.broken[variant.name] = str(error)
            self._progress.note(f"{cell.model}, {variant.name}: {error}")
            raise
        session.variant = variant.name
        if variant.name not in session.seen:
            self._record_start(session.info, cell, variant, time.monotonic() - started)
            session.seen.add(variant.name)

    def _record_start(self, info: TargetInfo, cell: Cell, variant: Variant, seconds: float) -> None:
        """What a variant's first start cost and what the target said about itself, into run.json."""
        run = self._folder.info
        parts = {name: round(value, 3) for name, value in info.start_seconds.items()}
        several = len(run["models"]) > 1
        name = f"{cell.model} {variant.name}" if several else variant.name
        run["start_seconds"][name] = parts | {"total": round(seconds, 3)}
        run["geometry"][cell.model] = info.geometry
        run["device_name"] = info.device or run["device_name"]
        known = run["notes"]
        known += [note for n in info.notes if (note := f"{name}: {n}") not in known]
        self._folder.save()

    def _source(self, session: _Session, cell: Cell, repetition: int) -> PromptSource:
        facts = estimate.facts_of(cell.model)
        vocab = (session.info.vocab if session.info else None) or (facts.vocab if facts else ENDPOINT_VOCAB)
        return PromptSource(vocab, self._plan.options.seed, self._plan.first_number(cell, repetition))

    # --------------------------------------------------------------------------------------------------- cells

    def _kernels(self, cell: Cell, repetition: int) -> tuple[Row, dict[str, Any]]:
        started = time.monotonic()
        rows = bundled.measure_kernels(cell.parts[0], cell.rows, self._tools.device)
        row = figures.identity(cell) | {"repetition": repetition, "status": "complete", "valid": True, "reason": ""}
        return row | {"duration_s": time.monotonic() - started}, {"kernels": rows}

    def _measure(
        self, plan: ScenarioPlan, session: _Session, variant: Variant, cell: Cell, repetition: int
    ) -> tuple[Row, dict[str, Any]]:
        assert session.info is not None
        records: list[RequestRecord] = []
        outputs: dict[int, Sequence[int] | str | None] = {}

        def on_answer(answer: Answer) -> None:
            record = self._record(cell, repetition, answer)
            records.append(record)
            outputs[answer.request] = answer.tokens if answer.tokens is not None else answer.text
            self._folder.add_request(record)

        started = time.monotonic()
        machine.reset_peak_memory(self._tools.device)
        try:
            with _no_collection():
                reports = list(self._run_rounds(plan, session, cell, repetition, on_answer, outputs))
        except KeyboardInterrupt:
            self._folder.add_cell(figures.empty_row(cell, repetition, "partial", "interrupted", records), {})
            raise
        except TargetError as error:
            session.variant = None
            self._progress.note(f"{cell.model}, {variant.name}, {cell.id}: {error}")
            return figures.empty_row(cell, repetition, "failed", str(error), records), {}
        duration_s = time.monotonic() - started
        if repetition == 0 and _draws_timeline(plan, cell):
            for report in reports:
                self._folder.add_timeline(cell, report.timeline, self._origin)
        energy, energy_detail = self._energy(cell, records)
        digest = _hash(cell, records, outputs)
        cost = _cost_of(session.info)
        row = figures.cell_row(cell, repetition, records, self._rates, cost, energy, digest, duration_s)
        _judge_client(row, reports)
        detail = _detail(records, reports) | energy_detail
        peak = machine.peak_memory(self._tools.device) if session.info.in_process else None
        return row, detail if peak is None else detail | {"peak_memory_bytes": peak}

    def _run_rounds(
        self,
        plan: ScenarioPlan,
        session: _Session,
        cell: Cell,
        repetition: int,
        on_answer: Callable[[Answer], None],
        outputs: Mapping[int, Sequence[int] | str | None],
    ) -> Iterator[LoadReport]:
        source = self._source(session, cell, repetition)
        rounds = workloads.rounds(cell, source, plan.scenario.limits)
        load = next(rounds)
        while True:
            yield session.target.run(load, on_answer)
            tokens = {request: output for request, output in outputs.items() if not isinstance(output, str)}
            try:
                load = rounds.send(tokens)
            except StopIteration:
                return

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


def compare_answers(
    rows: Sequence[dict[str, str]], switches: Mapping[str, Mapping[str, str]], exact: Sequence[str]
) -> dict[str, Any]:
    """Whether the variants of a run gave the same tokens, cell by cell and repetition by repetition.

    `exact`: the switches that must not change a token. A difference between variants that differ only in such
    switches is a fault; otherwise it is inside the stated bounds of the switches that round differently.
    """
    groups: dict[tuple[str, str, str, str], dict[str, str]] = {}
    for row in rows:
        if row["output_hash"]:
            key = (row["scenario"], row["model"], row["cell"], row["repetition"])
            groups.setdefault(key, {})[row["variant"]] = row["output_hash"]
    result: dict[str, Any] = {"compared": 0, "identical": 0, "different": []}
    for (scenario, model, cell, repetition), hashes in groups.items():
        first, *others = hashes
        for other in others:
            result["compared"] += 1
            if hashes[first] == hashes[other]:
                result["identical"] += 1
                continue
            names = {n for n, value in switches[first].items() if switches[other].get(n) != value}
            result["different"].append(
                {
                    "scenario": scenario,
                    "model": model,
                    "cell": cell,
                    "repetition": int(repetition),
                    "variants": [first, other],
                    "switches": sorted(names),
                    "fault": names <= set(exact),
                }
            )
    return result


def measure_rates(device: str, stages: int) -> Machine:
    """This machine's copy bandwidth and matrix rate, measured once a run."""
    return Machine(machine.copy_bandwidth(device), machine.matrix_rate(device), stages)
