"""The targets of one model in a run: what is loaded, which variant it runs, what is warmed up, what failed.

A model is loaded once for all variants and scenarios that share its room; a variant that differs in switches alone is
a turn of switches. A variant whose start is itself a figure (`ScenarioPlan.fresh`), and a cell marked `cold`, get a
start of their own. In-process and HTTP engines of one model never stand in memory together.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from arkbench import estimate, workloads
from arkbench.folder import ERRORS_FILE, RunFolder
from arkbench.plan import Batch, Plan, ScenarioPlan, Variant
from arkbench.progress import RunProgress
from arkbench.scenario import Cell
from arkbench.targets.base import Target, TargetError, TargetInfo
from arkbench.workloads import PromptSource

ENDPOINT_VOCAB = 32_000
"""Token ids below this are taken to exist in any model that an endpoint serves and the catalogue does not know."""

TargetMaker = Callable[[ScenarioPlan, str, Variant], Target]
VariantKey = tuple[str, str]


class BrokenError(TargetError):
    """Not tried again: it failed before in this run."""


@dataclass
class _Slot:
    """A target of one kind. `variant`: what it runs, None where it must be started before it is used."""

    target: Target
    variant: VariantKey | None = None
    info: TargetInfo | None = None
    warm: set[VariantKey] = field(default_factory=set)


class Session:
    """The targets of a batch, readied one at a time. `seconds`: what starts and warm-ups took, by name."""

    def __init__(
        self, batch: Batch, plan: Plan, make_target: TargetMaker, folder: RunFolder, progress: RunProgress
    ) -> None:
        self._batch = batch
        self._plan = plan
        self._make_target = make_target
        self._folder = folder
        self._progress = progress
        self._slots: dict[str, _Slot] = {}
        self._started: set[VariantKey] = set()
        self._broken: dict[tuple[str, ...], str] = {}
        self.seconds = {"starts": 0.0, "warm-ups": 0.0}

    # --------------------------------------------------------------------------------------------- ready

    def ready(self, plan: ScenarioPlan, variant: Variant, cell: Cell) -> tuple[Target, TargetInfo]:
        """A target that runs this variant and is warmed up for this cell; raises TargetError."""
        key = (plan.scenario.name, variant.name)
        for place in (key, (*key, cell.id)):
            if place in self._broken:
                raise BrokenError(self._broken[place])
        slot = self._slot(plan, variant)
        if slot.variant != key or cell.cold:
            self._start(slot, plan, variant, cell)
        warm = (plan.scenario.name, cell.id)
        if not cell.cold and warm not in slot.warm:
            self._warm_up(slot, plan, variant, cell)
            slot.warm.add(warm)
        assert slot.info is not None
        return slot.target, slot.info

    def source(self, info: TargetInfo, cell: Cell, repetition: int) -> PromptSource:
        """Where a cell takes its prompts from; repetition -1 is its warm-up."""
        facts = estimate.facts_of(cell.model)
        vocab = info.vocab or (facts.vocab if facts else ENDPOINT_VOCAB)
        return PromptSource(vocab, self._plan.options.seed, self._plan.first_number(cell, repetition))

    def _slot(self, plan: ScenarioPlan, variant: Variant) -> _Slot:
        for kind, other in self._slots.items():
            if kind != variant.target and other.info is not None:
                self._end(other)
        if variant.target not in self._slots:
            self._slots[variant.target] = _Slot(self._make_target(plan, self._batch.model, variant))
        return self._slots[variant.target]

    def _start(self, slot: _Slot, plan: ScenarioPlan, variant: Variant, cell: Cell) -> None:
        key = (plan.scenario.name, variant.name)
        self._progress.phase(f"{cell.model} · {variant.name} · starting")
        slot.variant = None
        slot.warm.clear()
        started = time.monotonic()
        needs = self._batch.needs
        try:
            if slot.info is not None and (cell.cold or (variant.name in plan.fresh and key not in self._started)):
                slot.target.close()
            slot.info = slot.target.start(variant.switches, needs.streams, needs.tokens, needs.cache_tokens)
        except TargetError as error:
            self._broken[key] = str(error)
            raise
        finally:
            self.seconds["starts"] += time.monotonic() - started
        slot.variant = key
        if key not in self._started:
            self._started.add(key)
            self._record_start(slot.info, cell, variant, time.monotonic() - started)

    def _record_start(self, info: TargetInfo, cell: Cell, variant: Variant, seconds: float) -> None:
        """What a variant's first start cost and what the target said about itself, into run.json."""
        run = self._folder.info
        label = self._plan.variant_label(cell.scenario, variant.name)
        name = f"{cell.model} {label}" if len(run["models"]) > 1 else label
        parts = {part: round(value, 3) for part, value in info.start_seconds.items()}
        took = round(seconds, 3)
        run["start_seconds"][name] = parts | {"total": took} if info.loaded else {"switches turned": took}
        run["geometry"][cell.model] = info.geometry
        run["device_name"] = info.device or run["device_name"]
        known = run["notes"]
        known += [note for n in info.notes if (note := f"{name}: {n}") not in known]
        self._folder.save()

    def _warm_up(self, slot: _Slot, plan: ScenarioPlan, variant: Variant, cell: Cell) -> None:
        assert slot.info is not None
        self._progress.phase(f"{cell.model} · {variant.name} · {cell.id} · warming up")
        started = time.monotonic()
        load = workloads.warm_up(cell, self.source(slot.info, cell, -1), plan.scenario.limits)
        try:
            slot.target.run(load, lambda answer: None)
        except TargetError:
            slot.variant = None
            raise
        finally:
            self.seconds["warm-ups"] += time.monotonic() - started

    # ------------------------------------------------------------------------------------------ failures

    def restart_needed(self, variant: Variant) -> None:
        """The target of this variant ended in the middle of a load: the next cell starts it again."""
        self._slots[variant.target].variant = None

    def fault(self, variant: Variant, cell: Cell, repetition: int, error: Exception) -> str:
        """Keeps the traceback of a fault of the program and gives the target's memory back; returns the reason.

        A variant that could not be started is not tried again, nor is a cell that met a fault: each try may load the
        model anew, and `--resume` makes another.
        """
        where = f"{cell.model}, {variant.name}, {cell.id}"
        self._folder.add_error(f"{where}, repetition {repetition + 1}", error)
        first = next(iter(str(error).strip().splitlines()), "")
        reason = f"unexpected {type(error).__name__}: {first[:200]} (see {ERRORS_FILE} in the run folder)"
        self._progress.note(f"{where}: {reason}")
        key = (cell.scenario, variant.name)
        slot = self._slots.pop(variant.target, None)
        running = slot is not None and slot.variant == key
        self._broken[(*key, cell.id) if running else key] = reason
        # The frames of the traceback hold the engine's tensors.
        traceback.clear_frames(error.__traceback__)
        if slot is not None:
            self._end(slot)
        return reason

    def close(self) -> None:
        """Gives the memory of every target back."""
        for slot in self._slots.values():
            self._end(slot)
        self._slots.clear()

    def _end(self, slot: _Slot) -> None:
        """A target that cannot even be closed must not end the run: the other models are measured all the same."""
        try:
            slot.target.close()
        except Exception as error:
            self._folder.add_error(f"{self._batch.model}: closing the target", error)
        slot.info = slot.variant = None
