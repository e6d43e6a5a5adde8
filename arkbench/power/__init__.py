"""Power and energy of the machine that runs: `meter(...)` gives a Meter for the sources that exist here."""

from __future__ import annotations

import time
from collections.abc import Sequence

from arkbench.power.base import Meter, PowerError
from arkbench.power.command import CommandMeter
from arkbench.power.nvml import gpu_sources
from arkbench.power.rapl import rapl_sources

__all__ = ["Meter", "PowerError", "meter"]


def meter(device_indices: Sequence[int] | None, command: str | None = None) -> Meter:
    """The meter for a run.

    `device_indices`: CUDA indices of the GPUs that the run uses, as the run itself counts them (CUDA_VISIBLE_DEVICES is
    honoured); empty for a run on CPU; None when nothing local does the work (a remote endpoint), so that nothing local
    is measured. `command`: a shell command that prints watts; it measures the whole machine and replaces the sum of
    the devices. Raises PowerError when the command does not work.
    """
    sources, missing = [], []
    if device_indices is not None:
        for found, lacking in (gpu_sources(device_indices), rapl_sources()):
            sources += found
            missing += lacking
    elif command is None:
        missing = ["energy not available: the endpoint is remote (name a meter with --power-command)"]
    if command is not None:
        sources.append(_working(CommandMeter(command)))
    return Meter(sources, missing, gpus=len(device_indices or ()))


def _working(named: CommandMeter) -> CommandMeter:
    error = named.sample(time.monotonic()).error
    if error:
        raise PowerError(f"--power-command: {error.removeprefix('power command: ')}; it must print watts, e.g. 231.5")
    return named
