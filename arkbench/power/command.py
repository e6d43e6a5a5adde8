"""A meter that the user names: a command that prints watts (a wall plug, a BMC, a remote machine)."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess

from arkbench.power.window import Sample

WATTS = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*(?:w|watts?)?", re.IGNORECASE)


class CommandMeter:
    """Runs `command` in a shell again and again; the last line that it prints is the power in watts."""

    kind, device, part, derived = "command", "meter", "command", False
    interval_s, max_gap_s = 0.5, 5.0

    def __init__(self, command: str, timeout_s: float = 5.0) -> None:
        self._command, self._timeout_s = command, timeout_s

    def sample(self, now: float) -> Sample:
        try:
            return Sample(now, self.kind, self.device, watts=self._watts())
        except (OSError, ValueError) as error:
            return Sample(now, self.kind, self.device, error=f"power command: {error}")

    def _watts(self) -> float:
        process = subprocess.Popen(
            self._command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
            text=True, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise ValueError(f"no answer within {self._timeout_s:g} s") from None
        if process.returncode != 0:
            raise ValueError(f"ended with code {process.returncode}")
        return parse_watts(output)


def parse_watts(output: str) -> float:
    """Watts from the last line of a command's output: a number, alone or with the unit W; ValueError otherwise."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if not lines:
        raise ValueError("printed nothing")
    match = WATTS.fullmatch(lines[-1])
    watts = float(match[1]) if match else math.nan
    if not math.isfinite(watts) or watts < 0:
        raise ValueError(f"printed {lines[-1][:40]!r}, not a number of watts")
    return watts
