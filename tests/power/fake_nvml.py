"""A GPU whose NVML answers are scripted: replaces the functions of the real pynvml module."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pynvml


@dataclass
class FakeGpu:
    """Draws `watts`; its counter steps every `update_s`. Each answer may be a value or an exception to raise."""

    watts: float = 300.0
    update_s: float = 0.02
    counter: Callable[[float], int] | Exception | None = None
    mig: object = field(default_factory=lambda: pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED))
    throttle: int = 0
    uuid: str = "GPU-00000000-aaaa"
    name: str = "Fake GPU"
    power_error: Exception | None = None
    started: float = field(default_factory=time.monotonic)

    def millijoules(self) -> int:
        elapsed = time.monotonic() - self.started
        if isinstance(self.counter, Exception):
            raise self.counter
        if self.counter is not None:
            return self.counter(elapsed)
        return 10**9 + round(int(elapsed / self.update_s) * self.update_s * self.watts * 1000)

    def milliwatts(self) -> int:
        if self.power_error is not None:
            raise self.power_error
        return round(self.watts * 1000)


def answer(value: object) -> object:
    if isinstance(value, Exception):
        raise value
    return value


def install(monkeypatch, gpus: list[FakeGpu], instant: bool = False) -> None:
    """Makes pynvml show `gpus`; `instant`: also the instantaneous power field."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def by_index(index: int) -> FakeGpu:
        if index >= len(gpus):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return gpus[index]

    def fields(gpu: FakeGpu, ids: list[int]) -> list[SimpleNamespace]:
        if not instant:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        assert ids == [186]  # NVML_FI_DEV_POWER_INSTANT
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=gpu.milliwatts()))]

    fakes = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetHandleByIndex": by_index,
        "nvmlDeviceGetUUID": lambda g: g.uuid,
        "nvmlDeviceGetName": lambda g: g.name,
        "nvmlDeviceGetMigMode": lambda g: answer(g.mig),
        "nvmlDeviceGetPowerUsage": lambda g: g.milliwatts(),
        "nvmlDeviceGetFieldValues": fields,
        "nvmlDeviceGetTotalEnergyConsumption": lambda g: g.millijoules(),
        "nvmlDeviceGetClockInfo": lambda g, kind: {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201}[kind],
        "nvmlDeviceGetTemperature": lambda g, sensor: 41,
        "nvmlDeviceGetEnforcedPowerLimit": lambda g: 700_000,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda g: answer(g.throttle),
        "nvmlDeviceGetCurrentClocksEventReasons": lambda g: answer(g.throttle),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(pynvml, name, fake, raising=False)
