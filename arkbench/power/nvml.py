"""NVIDIA GPUs through NVML: power, the total-energy counter, clocks, temperature, power limit, throttle reasons."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from arkbench.power.window import Sample

THROTTLE_BITS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}
"""NVML's clocks-event bits that slow a GPU down; idle, application clocks, sync boost and display clocks do not."""
DETAIL_EVERY_S = 0.1


def throttle_names(mask: int) -> str:
    """Names of the slowing reasons in an NVML clocks-event mask, joined with "+"."""
    return "+".join(name for bit, name in THROTTLE_BITS.items() if mask & bit)


class NvmlGpu:
    """One GPU. `device` is its CUDA index as the run sees it."""

    kind, part, derived = "nvml", "gpu", False
    interval_s, max_gap_s = 0.02, 0.5

    def __init__(self, nvml: Any, handle: Any, device: str) -> None:
        self.device = device
        self._nvml, self._handle = nvml, handle
        self._base_mj: int | None = None
        self._detail: dict[str, Any] = {}
        self._detail_at = float("-inf")
        self._instant = self._ask(self._instant_power) is not None

    def sample(self, now: float) -> Sample:
        """One reading; a GPU that answers neither power nor energy gives a sample with the error."""
        error: list[str] = []
        watts = self._ask(self._instant_power if self._instant else self._average_power, error)
        energy = self._ask(self._counter_j, error)
        if now - self._detail_at >= DETAIL_EVERY_S:
            self._detail, self._detail_at = self._details(), now
        if watts is None and energy is None:
            return Sample(now, self.kind, self.device, error=f"NVML: {error[0]}")
        return Sample(now, self.kind, self.device, watts, energy, **self._detail)

    def _ask(self, question: Callable[[], Any], error: list[str] | None = None) -> Any:
        try:
            return question()
        except Exception as problem:  # older drivers and bindings fail in many ways; each means "not known"
            if error is not None:
                error.append(str(problem))
            return None

    def _average_power(self) -> float:
        return self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000

    def _instant_power(self) -> float:
        """The instantaneous draw in W: plain power usage is a one-second average on most GPUs since Ampere."""
        field = self._nvml.nvmlDeviceGetFieldValues(self._handle, [self._nvml.NVML_FI_DEV_POWER_INSTANT])[0]
        if field.nvmlReturn != self._nvml.NVML_SUCCESS:
            raise self._nvml.NVMLError(field.nvmlReturn)
        return field.value.uiVal / 1000

    def _counter_j(self) -> float:
        millijoules = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        if self._base_mj is None:
            self._base_mj = millijoules
        return (millijoules - self._base_mj) / 1000

    def _details(self) -> dict[str, Any]:
        nvml, handle = self._nvml, self._handle
        limit = self._ask(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
        mask = self._ask(self._throttle_mask)
        return {
            "sm_clock_mhz": self._ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "mem_clock_mhz": self._ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            "temperature_c": self._ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            "power_limit_w": None if limit is None else limit / 1000,
            "throttle": None if mask is None else throttle_names(mask),
        }

    def _throttle_mask(self) -> int:
        ask = getattr(self._nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        if ask is not None:
            mask = self._ask(lambda: ask(self._handle))
            if mask is not None:
                return mask
        return self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)


def gpu_sources(indices: Sequence[int]) -> tuple[list[NvmlGpu], list[str]]:
    """The GPUs with these CUDA indices, and a line for each that has no energy of its own to read."""
    if not indices:
        return [], []
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # no binding, no driver, no library: all mean that NVML is not here
        return [], [f"GPU energy not available: NVML cannot be used ({error})"]
    sources, missing = [], []
    for index in indices:
        source, reason = _open(pynvml, index)
        if source is None:
            missing.append(f"GPU {index} energy not available: {reason}")
        else:
            sources.append(source)
    return sources, missing + _order_warning(pynvml, len(indices))


def _open(nvml: Any, index: int) -> tuple[NvmlGpu | None, str]:
    try:
        name = _visible_name(index)
        if name.startswith("MIG-"):
            return None, "it is a MIG instance, and the meter measures the whole GPU"
        handle = nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else _by_uuid(nvml, name)
    except (nvml.NVMLError, LookupError, ValueError) as error:
        return None, str(error)
    if _mig_is_on(nvml, handle):
        return None, "MIG is on, and the meter measures the whole GPU, not the instance"
    return NvmlGpu(nvml, handle, str(index)), ""


def _visible_name(index: int) -> str:
    """What CUDA_VISIBLE_DEVICES calls the CUDA device `index`: an NVML index or a UUID."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(index)
    names = [n.strip() for n in visible.split(",") if n.strip()]
    if index >= len(names):
        raise LookupError(f"CUDA_VISIBLE_DEVICES={visible} shows no device {index}")
    return names[index]


def _by_uuid(nvml: Any, prefix: str) -> Any:
    """The handle of the GPU whose UUID begins with `prefix` (CUDA takes abbreviated UUIDs)."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    found = [h for h in handles if _text(nvml.nvmlDeviceGetUUID(h)).startswith(prefix)]
    if len(found) != 1:
        raise LookupError(f"CUDA_VISIBLE_DEVICES names {prefix}, which NVML does not know")
    return found[0]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _mig_is_on(nvml: Any, handle: Any) -> bool:
    try:
        return nvml.nvmlDeviceGetMigMode(handle)[0] == 1
    except Exception:  # GPUs without MIG, and old bindings, have no such call
        return False


def _order_warning(nvml: Any, wanted: int) -> list[str]:
    """CUDA may number unlike GPUs fastest first, NVML numbers them by bus: say so when it can matter."""
    if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return []
    try:
        count = nvml.nvmlDeviceGetCount()
        names = {_text(nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(i))) for i in range(count)}
    except Exception:  # a machine that cannot list its GPUs gets no advice about their order
        return []
    if len(names) < 2 or wanted == count:
        return []
    return ["GPUs of several models: set CUDA_DEVICE_ORDER=PCI_BUS_ID so that the metered GPU is the one that runs"]
