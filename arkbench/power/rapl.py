"""CPU packages and DRAM through Linux's powercap interface (RAPL counters)."""

from __future__ import annotations

from pathlib import Path

from arkbench.power.window import Sample

POWERCAP = Path("/sys/class/powercap")
COUNTED = ("package", "dram")
"""Domains that are summed: core and uncore lie inside a package, psys holds all of them."""


class RaplDomain:
    """One domain; `device` is its name with its socket, such as "package-0" or "package-0/dram"."""

    kind, part, derived = "rapl", "cpu", True
    interval_s, max_gap_s = 0.02, 0.5

    def __init__(self, folder: Path, device: str) -> None:
        self.device = device
        self._counter = folder / "energy_uj"
        self._range_uj = int((folder / "max_energy_range_uj").read_text())
        self._last_uj = int(self._counter.read_text())
        self._total_uj = 0
        self._last_time: float | None = None

    def sample(self, now: float) -> Sample:
        """One reading. The counter wraps at max_energy_range_uj; watts are the mean since the last reading."""
        value = int(self._counter.read_text())
        step = value - self._last_uj
        if step < 0:
            step += self._range_uj
        watts = None if self._last_time is None or now <= self._last_time else step / 1e6 / (now - self._last_time)
        self._last_uj, self._last_time = value, now
        self._total_uj += step
        return Sample(now, self.kind, self.device, watts, self._total_uj / 1e6)


def rapl_sources(root: Path = POWERCAP) -> tuple[list[RaplDomain], list[str]]:
    """The domains that can be read, and a line for what cannot."""
    found = sorted(_domains(root), key=lambda d: d[1])
    if not found:
        return [], [f"CPU energy not available: {root} shows no RAPL counters"]
    sources, missing = [], []
    for folder, device in found:
        try:
            sources.append(RaplDomain(folder, device))
        except PermissionError:
            missing.append(
                f"CPU energy of {device} not available: {folder / 'energy_uj'} is readable by root only "
                f"(sudo chmod a+r {folder / 'energy_uj'})"
            )
        except (OSError, ValueError) as error:
            missing.append(f"CPU energy of {device} not available: {error}")
    return sources, missing


def _domains(root: Path) -> list[tuple[Path, str]]:
    """Folders intel-rapl:N (packages) and intel-rapl:N:M (dram), with their names."""
    domains = []
    for folder in root.glob("intel-rapl:*"):
        name = _name(folder)
        if not name.startswith(COUNTED):
            continue
        parent = root / folder.name.rpartition(":")[0]
        domains.append((folder, f"{_name(parent)}/{name}" if folder.name.count(":") == 2 else name))
    return domains


def _name(folder: Path) -> str:
    try:
        return (folder / "name").read_text().strip()
    except OSError:
        return ""
