"""What this machine is and what it can do at most: hardware, versions, copy bandwidth, matrix rate."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}


def provenance() -> dict[str, Any]:
    """The part of run.json that says where a run was made. What cannot be found out is None."""
    import torch

    return {
        "host": socket.gethostname(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "cpu": cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": memory_bytes(),
        **_nvml_facts(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit(folder: Path) -> str | None:
    """The commit of the checkout that `folder` is in, with `-dirty` where files differ from it; None outside one."""
    try:
        head = _git(folder, "rev-parse", "HEAD")
        return head + ("-dirty" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    """Main memory, bytes."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def available_bytes(device: str) -> int | None:
    """Memory that a model on `device` can use now, bytes."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info()[0]
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return memory_bytes()


def _nvml_facts() -> dict[str, Any]:
    """GPUs, driver, clocks and power limits by NVML; empty lists and None where there is no NVIDIA driver."""
    facts: dict[str, Any] = {"gpus": [], "driver": None, "clocks": [], "power_limit_w": []}
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no module, no library or no driver: whichever it is, there is nothing to read
        return facts
    try:
        facts["driver"] = pynvml.nvmlSystemGetDriverVersion()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            facts["gpus"].append(
                {
                    "name": pynvml.nvmlDeviceGetName(handle),
                    "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).total,
                }
            )
            facts["clocks"].append(_read(lambda h=handle: _clocks(h)))
            limit = _read(lambda h=handle: pynvml.nvmlDeviceGetPowerManagementLimit(h))
            facts["power_limit_w"].append(None if limit is None else limit / 1000)
    finally:
        pynvml.nvmlShutdown()
    return facts


def _clocks(handle: Any) -> dict[str, int]:
    import pynvml

    return {
        "sm_max_mhz": pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "memory_max_mhz": pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM),
    }


def _read(read: Callable[[], Any]) -> Any:
    """What a query answers; None where this GPU does not support it."""
    import pynvml

    try:
        return read()
    except pynvml.NVMLError:
        return None


def reset_peak_memory(device: str) -> None:
    """Begins a new measurement of the most GPU memory that this process holds."""
    if device.startswith("cuda"):
        import torch

        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)


def peak_memory(device: str) -> int | None:
    """Most bytes of GPU memory that this process has held, all GPUs together; None on a CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))


# ------------------------------------------------------------------------------------------------ measured rates


def copy_bandwidth(device: str) -> float:
    """Bytes read plus written per second of a large copy on `device`: the fastest of five."""
    import torch

    kind = device.split(":")[0]
    source = torch.empty(COPY_BYTES[kind], dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * source.numel() / _fastest(lambda: target.copy_(source), device)


def matrix_rate(device: str) -> float:
    """Floating-point operations per second of a large square product: bf16; on a CPU fp32 where that is faster."""
    import torch

    kind = device.split(":")[0]
    dtypes = (torch.bfloat16,) if kind == "cuda" else (torch.bfloat16, torch.float32)
    return max(_product_rate(MATRIX_SIZE[kind], dtype, device) for dtype in dtypes)


def _product_rate(size: int, dtype: Any, device: str) -> float:
    import torch

    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(a)
    return 2 * size**3 / _fastest(lambda: torch.mm(a, b, out=out), device)


def _fastest(action: Callable[[], Any], device: str, times: int = 5) -> float:
    """Seconds of the fastest of `times` runs, after one that is not counted."""
    import torch

    def wait() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    action()
    best = float("inf")
    for _ in range(times):
        wait()
        started = time.perf_counter()
        action()
        wait()
        best = min(best, time.perf_counter() - started)
    return best
