"""Measures the client of `--endpoint` on this machine and prints its figures beside the targets.

    python tools/client_limits.py [--repetitions 3] [--server c|python] [--only TEXT]

Every shape is driven against a fresh known-answer server on this machine: tools/known_answer.c where there is a C
compiler, else the Python one. Medians over repetitions. The rows with httpx show what the default client of small
loads does at the same rates.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from arkbench import doctor_client  # noqa: E402
from arkbench.doctor_client import ClientRow, KnownServer, Shape  # noqa: E402
from arkbench.known_answer import KnownAnswerProcess  # noqa: E402
from arkbench.targets.base import Load, PlannedRequest  # noqa: E402
from arkbench.targets.openai import OpenAITarget  # noqa: E402

RAW = "raw"


@dataclass(frozen=True)
class Target:
    """Limits of a shape's figures, in the figures' own units; None: not a target of this shape."""

    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    gap_ms: float | None = 0.2
    pieces_s: float | None = None
    cpu_ms: float | None = 60.0
    memory_mb: float | None = None
    in_flight: int | None = None
    send_spread_ms: float | None = None
    ttft_share: float | None = None


SHAPES: tuple[tuple[Shape, Target], ...] = (
    (Shape("64 streams, a token every 20 ms", 64, 0.2, 0.02, 64, client=RAW), Target(1, 6)),
    (Shape("256 streams, a token every 20 ms", 256, 0.2, 0.02, 64, client=RAW), Target(10, 60, pieces_s=10_500)),
    (
        Shape("1,000 streams, a token every 100 ms", 1000, 0.2, 0.1, 40, client=RAW),
        Target(10, 80, memory_mb=250, in_flight=1000),
    ),
    (Shape("16 streams, no delay", 16, 0.0, 0.0, 4000, client=RAW), Target(gap_ms=None, pieces_s=30_000)),
    (
        Shape("64 prompts of 64,000 tokens", 64, 10.0, 0.02, 8, prompt_tokens=64_000, client=RAW, mode="burst"),
        Target(gap_ms=None, cpu_ms=None, send_spread_ms=100, ttft_share=0.01),
    ),
    (Shape("httpx: 4 streams", 4, 0.2, 0.02, 64, client="httpx"), Target(gap_ms=None, cpu_ms=None)),
    (Shape("httpx: 16 streams", 16, 0.2, 0.02, 64, client="httpx"), Target(gap_ms=None, cpu_ms=None)),
    (Shape("httpx: 64 streams", 64, 0.2, 0.02, 64, client="httpx"), Target(gap_ms=None, cpu_ms=None)),
)


class CServer:
    """tools/known_answer.c, compiled once into a folder that the caller gives."""

    def __init__(self, binary: Path, shape: Shape) -> None:
        command = [str(binary), "0", str(shape.first_s * 1000), str(shape.gap_s * 1000)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()

    def __enter__(self) -> KnownServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait()


def build_server(folder: Path) -> Path | None:
    """The compiled C server, or None where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    binary = folder / "known_answer"
    source = ROOT / "tools" / "known_answer.c"
    subprocess.run([compiler, "-O2", "-D_GNU_SOURCE", "-o", str(binary), str(source)], check=True)
    return binary


# --------------------------------------------------------------------------------------------- one row


def median_row(rows: Sequence[ClientRow]) -> ClientRow:
    """The median of every figure; valid when most repetitions were."""
    values: dict[str, Any] = {}
    for f in fields(ClientRow):
        found = [getattr(row, f.name) for row in rows]
        if isinstance(found[0], int | float) and not isinstance(found[0], bool):
            values[f.name] = statistics.median(found)
        else:
            values[f.name] = found[0]
    invalid = [row for row in rows if not row.valid]
    values["valid"] = len(invalid) * 2 < len(rows)
    values["reason"] = invalid[0].reason if invalid else ""
    return ClientRow(**values)


def ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def cell(value: float | None, limit: float | None, digits: int, least: bool = False) -> str:
    """A figure, with its target and a mark when it misses it."""
    if value is None:
        return ""
    text = f"{value:,.{digits}f}"
    if limit is None:
        return text
    missed = value < limit if least else value > limit
    return f"{text} ({'>=' if least else '<='} {limit:g}{', missed' if missed else ''})"


def figures(row: ClientRow, target: Target) -> list[str]:
    shape = row.shape
    share = None if target.ttft_share is None else target.ttft_share * shape.first_s * 1000
    return [
        shape.name,
        cell(row.most_in_flight, target.in_flight, 0, least=True),
        cell(row.pieces_s, target.pieces_s, 0, least=True),
        cell(ms(row.ttft_error_p50_s), target.ttft_p50_ms, 2),
        cell(ms(row.ttft_error_p99_s), target.ttft_p99_ms if share is None else share, 2),
        cell(ms(row.gap_error_s), target.gap_ms, 3),
        cell(ms(row.cpu_s_per_1k), target.cpu_ms, 1),
        cell(row.rss_bytes / 2**20, target.memory_mb, 0),
        cell(ms(row.send_spread_s), target.send_spread_ms, 1),
        f"{row.server_late_p99_s * 1000:.2f}",
        "yes" if row.valid else "no: " + row.reason.removeprefix("the client was the limit: "),
    ]


COLUMNS = [
    "load", "in flight", "pieces/s", "TTFT error p50, ms", "p99, ms", "median gap, error, ms", "CPU ms / 1,000 pieces",
    "memory, MB", "all sent after, ms", "server late p99, ms", "client kept up",
]  # fmt: skip


# --------------------------------------------------------------------------------- the other two figures


def start_seconds() -> float:
    """From the start of a Python process to the first request of a load that is on its way (a bare client)."""
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from arkbench.targets.openai import OpenAITarget\n"
        "from arkbench.targets.base import Load, PlannedRequest\n"
        "target = OpenAITarget(sys.argv[2]); target.start({}, 64, 100, 0); sent = []\n"
        "target.run(Load([PlannedRequest(n, [n, 1], 1) for n in range(64)]), lambda a: sent.append(a.sent))\n"
        "print(min(sent)); target.close()"
    )
    with KnownAnswerProcess(first_s=0.0) as server:
        begin = time.monotonic()
        command = [sys.executable, "-c", code, str(ROOT), server.url]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(printed) - begin


def memory_over_many(total: int) -> tuple[float, float]:
    """The most memory (MB) of the client process after the first tenth of `total` requests and after all of them.

    Ten equal loads of 100 streams in one process: a load's own requests are held while it runs, so it is the growth
    from load to load that would be a leak.
    """
    memory = []
    with KnownAnswerProcess(first_s=0.0) as server:
        target = OpenAITarget(server.url, client=RAW)
        target.start({}, 100, 100, 0)
        for _ in range(10):
            planned = [PlannedRequest(n, [n, 1, 2, 3], 4, stream=n % 100) for n in range(total // 10)]
            target.run(Load(planned, mode="closed"), lambda answer: None)
            memory.append(target.client_stats[0].rss_bytes / 2**20)
        target.close()
    return memory[0], memory[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--server", choices=("c", "python"), default="c")
    parser.add_argument("--requests", type=int, default=100_000, help="requests of the memory figure; 0 leaves it out")
    parser.add_argument("--only", default="", help="only the loads whose name holds this")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder:
        binary = build_server(Path(folder)) if options.server == "c" else None

        def server(shape: Shape) -> AbstractContextManager[KnownServer]:
            return doctor_client.python_server(shape) if binary is None else CServer(binary, shape)

        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, server: {'C' if binary else 'Python'}\n")
        print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
        for shape, target in SHAPES:
            if options.only in shape.name:
                rows = [doctor_client.measure_shape(shape, server) for _ in range(options.repetitions)]
                print("| " + " | ".join(figures(median_row(rows), target)) + " |", flush=True)
    if options.only:
        return
    print(f"\nstart of the client to its first request: {cell(start_seconds(), 1.5, 2)} s")
    if options.requests:
        early, late = memory_over_many(options.requests)
        print(
            f"memory after {options.requests // 10:,} requests {early:.0f} MB, after {options.requests:,} {late:.0f} MB"
        )


if __name__ == "__main__":
    main()
