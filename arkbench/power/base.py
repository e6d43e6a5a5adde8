"""The meter: samples power sources in the background and says what a window of time cost.

`meter.start()`, `meter.idle(seconds)`, `meter.window(t0, t1)`, `meter.stop()`, `meter.rows()`. Times are seconds of
time.monotonic().
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from arkbench.errors import UserError
from arkbench.power.window import POWER_COLUMNS, Figure, Sample, counter_energy, integrated_energy

DISAGREEMENT_LIMIT = 0.1
"""Share by which counter and samples, or two idle readings, may differ before it is said."""
KEEP_EVERY_S = 0.1
"""A sample in which nothing changed is kept this long after the last kept one."""
MARGIN_S = 2.0
"""Around a window, what is looked at, and how long its first samples behind it are waited for."""
INVALIDATING = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake")
NOTED = ("sw_power_cap",)


class PowerError(UserError):
    """A meter that the user named cannot be used: one line with the mend."""


class Source(Protocol):
    """One device that can be read.

    `kind` is the source column of power.csv ("nvml", "rapl", "command"), `part` what its energy is summed under.
    `max_gap_s`: samples further apart than this are a gap. `derived`: its watts are differences of its own counter, so
    the integral of them says nothing new.
    """

    kind: str
    device: str
    part: str
    interval_s: float
    max_gap_s: float
    derived: bool

    def sample(self, now: float) -> Sample: ...


@dataclass(frozen=True)
class DeviceEnergy:
    """What one device used in a window. `energy_j` is the counter's figure, else the integral of the samples."""

    kind: str
    device: str
    part: str
    energy_j: float | None
    counter_j: float | None
    integrated_j: float | None
    notes: tuple[str, ...] = ()
    throttled: tuple[str, ...] = ()


@dataclass(frozen=True)
class EnergyReading:
    """What a window cost.

    `energy_j` (gross) is the sum over every device that has a figure of its own part: all GPUs, and the CPU where it
    can be read; a named meter (`--power-command`) measures the whole machine and replaces the sum. It is None when any
    GPU of the run has no figure: a sum over some of them would look like the whole. `idle_w` is the power at rest of
    the same devices, None when it was not measured. `valid` is False when a GPU was throttled, with the reason.
    `missing` names what is not in the sum; `notes` what a reader must know about the figures.
    """

    t0: float
    t1: float
    devices: tuple[DeviceEnergy, ...]
    energy_j: float | None
    gpu_j: float | None
    cpu_j: float | None
    command_j: float | None
    idle_w: float | None = None
    valid: bool = True
    reason: str = ""
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def duration_s(self) -> float:
        return self.t1 - self.t0

    @property
    def mean_w(self) -> float | None:
        return None if self.energy_j is None else self.energy_j / self.duration_s


def read_device(source: Source, samples: Sequence[Sample], t0: float, t1: float) -> DeviceEnergy:
    """What `source` used between t0 and t1, from its samples (which must reach beyond both ends)."""
    counter = counter_energy(samples, t0, t1)
    integral = Figure(None) if source.derived else integrated_energy(samples, t0, t1, source.max_gap_s)
    name = f"{source.kind} {source.device}"
    has_counter = any(s.energy_j is not None for s in samples)
    notes = [f"{name}: {n}" for n in (counter.notes if has_counter or source.derived else ()) + integral.notes]
    notes += [f"{name}: {e}" for e in dict.fromkeys(s.error for s in samples if s.error and t0 <= s.time_s <= t1)]
    if counter.joules is None and integral.joules is not None and source.kind == "nvml":
        notes.append(f"{name}: energy is the integral of power samples")
    notes += _disagreement(name, counter.joules, integral.joules)
    seen = [r for s in samples if s.throttle and t0 <= s.time_s <= t1 for r in s.throttle.split("+")]
    notes += [f"{name}: at its power limit (normal under full load)" for r in NOTED if r in seen]
    energy = counter.joules if counter.joules is not None else integral.joules
    throttled = tuple(r for r in INVALIDATING if r in seen)
    return DeviceEnergy(
        source.kind, source.device, source.part, energy, counter.joules, integral.joules, tuple(notes), throttled
    )


def _disagreement(name: str, counter: float | None, integral: float | None) -> list[str]:
    if counter is None or integral is None:
        return []
    larger = max(abs(counter), abs(integral))
    if larger == 0 or abs(counter - integral) <= DISAGREEMENT_LIMIT * larger:
        return []
    limit = f"{DISAGREEMENT_LIMIT:.0%}"
    return [f"{name}: counter ({counter:.1f} J) and samples ({integral:.1f} J) differ by more than {limit}"]


def combine(
    devices: Sequence[DeviceEnergy], t0: float, t1: float, missing: Sequence[str] = (), gpus: int = 0
) -> EnergyReading:
    """Sums devices into a reading; `gpus`: how many the run uses, so that a sum over fewer is no total."""
    parts = {part: [d for d in devices if d.part == part] for part in ("gpu", "cpu", "command")}
    gpu, cpu, command = (_sum([d.energy_j for d in parts[p]]) for p in ("gpu", "cpu", "command"))
    absent = [f"{d.kind} {d.device}: no energy figure in this window" for d in devices if d.energy_j is None]
    if len(parts["gpu"]) < gpus:
        gpu = None
    total = cpu if gpus == 0 else None if gpu is None else gpu + (cpu or 0.0)
    total = command if parts["command"] else total
    throttled = [f"{d.kind} {d.device} throttled: {', '.join(d.throttled)}" for d in devices if d.throttled]
    return EnergyReading(
        t0, t1, tuple(devices), total, gpu, cpu, command,
        valid=not throttled, reason="; ".join(throttled),
        notes=tuple(n for d in devices for n in d.notes), missing=(*missing, *absent),
    )  # fmt: skip


def _sum(values: Sequence[float | None]) -> float | None:
    return None if not values or None in values else sum(values)


class _Poller(threading.Thread):
    """Reads its sources every `interval_s` and keeps what changed, and one sample in KEEP_EVERY_S besides."""

    def __init__(self, sources: Sequence[Source]) -> None:
        super().__init__(name="arkbench-power", daemon=True)
        self.sources = sources
        self.interval_s = min(s.interval_s for s in sources)
        self.samples: list[list[Sample]] = [[] for _ in sources]
        self.halt = threading.Event()

    def run(self) -> None:
        while not self.halt.is_set():
            started = time.monotonic()
            for source, kept in zip(self.sources, self.samples, strict=True):
                self._keep(kept, _read(source))
            self.halt.wait(max(0.0, self.interval_s - (time.monotonic() - started)))

    def _keep(self, kept: list[Sample], new: Sample) -> None:
        last = kept[-1] if kept else None
        if last is None or new.time_s - last.time_s >= KEEP_EVERY_S or _differs(last, new):
            kept.append(new)


def _read(source: Source) -> Sample:
    try:
        return source.sample(time.monotonic())
    except Exception as error:  # a meter must never end a measurement: its failure is recorded as one
        return Sample(time.monotonic(), source.kind, source.device, error=f"could not be read: {error}")


def _differs(a: Sample, b: Sample) -> bool:
    return (a.watts, a.energy_j, a.throttle, a.error) != (b.watts, b.energy_j, b.throttle, b.error)


class Meter:
    """Samples in background threads between start() and stop(); windows may be asked for during and after.

    `missing` names what this machine cannot measure, one line each, for the report.
    """

    def __init__(self, sources: Sequence[Source], missing: Sequence[str] = (), gpus: int = 0) -> None:
        self.sources = tuple(sources)
        self.missing = tuple(missing)
        self.idle_readings: list[EnergyReading] = []
        self._gpus = gpus
        self._pollers: list[_Poller] = []
        self._started_at = 0.0

    def start(self) -> None:
        if self._pollers:
            return
        self._started_at = time.monotonic()
        # A command is slow: on a thread of its own it cannot hold up the device samples.
        groups = [[s for s in self.sources if s.kind != "command"], [s for s in self.sources if s.kind == "command"]]
        self._pollers = [_Poller(g) for g in groups if g]
        for poller in self._pollers:
            poller.start()

    def stop(self) -> None:
        """Ends sampling; what was sampled stays readable."""
        for poller in self._pollers:
            if poller.is_alive():
                poller.halt.set()
                poller.join(timeout=15.0)

    def __enter__(self) -> Meter:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def window(self, t0: float, t1: float) -> EnergyReading:
        """What the machine used between t0 and t1; waits up to 2 s for the first samples after t1."""
        if t1 <= t0:
            raise ValueError(f"power window of {t1 - t0:.3f} s: it must end after it begins")
        self._wait_beyond(t1)
        devices = [read_device(s, _around(s, samples, t0, t1), t0, t1) for s, samples in self._series()]
        reading = combine(devices, t0, t1, self.missing, self._gpus)
        return replace(reading, idle_w=self._idle_w(reading))

    def idle(self, seconds: float) -> EnergyReading:
        """Measures the power at rest for `seconds`; windows asked for later name the latest such reading."""
        t0 = time.monotonic()
        time.sleep(seconds)
        reading = self.window(t0, time.monotonic())
        self.idle_readings.append(reading)
        return reading

    def idle_drift(self) -> str:
        """One line when the power at rest before and after the run differ by more than 10%, else ""."""
        watts = [r.mean_w for r in self.idle_readings if r.mean_w is not None]
        if len(watts) < 2 or abs(watts[-1] - watts[0]) <= DISAGREEMENT_LIMIT * max(watts[0], watts[-1]):
            return ""
        return f"idle power was {watts[0]:.1f} W before the run and {watts[-1]:.1f} W after it"

    def rows(self, origin: float | None = None) -> list[dict[str, float | str | None]]:
        """The samples as rows of power.csv, sorted by time; time_s counts from `origin` (default: the start)."""
        zero = self._started_at if origin is None else origin
        samples = sorted((s for _, kept in self._series() for s in kept), key=lambda s: s.time_s)
        return [{c: getattr(s, c) for c in POWER_COLUMNS} | {"time_s": round(s.time_s - zero, 4)} for s in samples]

    def _series(self) -> list[tuple[Source, list[Sample]]]:
        return [(s, list(k)) for p in self._pollers for s, k in zip(p.sources, p.samples, strict=True)]

    def _idle_w(self, reading: EnergyReading) -> float | None:
        """Power at rest of exactly the devices in the reading's sum."""
        if not self.idle_readings:
            return None
        idle = self.idle_readings[-1]
        same = (reading.gpu_j is None) == (idle.gpu_j is None) and (reading.cpu_j is None) == (idle.cpu_j is None)
        return idle.mean_w if same else None

    def _wait_beyond(self, t1: float) -> None:
        deadline = time.monotonic() + MARGIN_S
        while time.monotonic() < deadline:
            alive = [p for p in self._pollers if p.is_alive()]
            if all(
                _reaches(source, kept, t1) for p in alive for source, kept in zip(p.sources, p.samples, strict=True)
            ):
                return
            time.sleep(0.01)


def _reaches(source: Source, kept: Sequence[Sample], t1: float) -> bool:
    """Whether the series has what a window that ends at t1 needs: a sample beyond, and a counter update beyond."""
    if not kept or kept[-1].time_s < t1:
        return False
    tail = kept[max(0, bisect_left(kept, t1, key=lambda s: s.time_s) - 1) :]
    counts = [s.energy_j for s in tail]
    return bool(kept[-1].error) or None in counts or len(set(counts)) > 1


def _around(source: Source, samples: Sequence[Sample], t0: float, t1: float) -> list[Sample]:
    """The samples of the window and a margin on each side: enough for the edges, and cheap on long runs."""
    margin = max(MARGIN_S, 2 * source.max_gap_s)
    low = bisect_left(samples, t0 - margin, key=lambda s: s.time_s)
    high = bisect_left(samples, t1 + margin, key=lambda s: s.time_s)
    return list(samples[low:high])
