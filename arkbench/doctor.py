"""`arkbench doctor`: what this machine can measure, and what it cannot, with the reason."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from arkbench import doctor_client, machine
from arkbench.power import meter
from arkbench.targets import bundled

Finding = tuple[str, str]


def show(console: Console) -> None:
    """Prints the findings, and what the HTTP client can drive from here."""
    table = Table(title="This machine", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("found", overflow="fold")
    for what, found in findings():
        table.add_row(what, escape(found))
    console.print(table)


def findings() -> Iterator[Finding]:
    """What was found, line by line."""
    facts = machine.provenance()
    device = bundled.default_device()
    memory = facts["memory_bytes"]
    yield "CPU", f"{facts['cpu']}, {facts['cpu_cores']} cores" + (f", {memory / 1e9:.0f} GB" if memory else "")
    yield "versions", f"python {facts['python']}, torch {facts['torch']}, triton {facts['triton'] or 'not installed'}"
    yield from _gpus(facts)
    yield "runs on", device
    yield f"copy bandwidth ({device})", f"{machine.copy_bandwidth(device) / 1e9:,.0f} GB/s read plus written"
    yield f"matrix rate ({device})", f"{machine.matrix_rate(device) / 1e12:,.2f} TFLOP/s"
    yield from _energy(device)
    yield from doctor_client.findings()


def _gpus(facts: dict) -> Iterator[Finding]:
    if not facts["gpus"]:
        yield "NVIDIA GPUs", "none (no NVIDIA driver answers); claims about GPUs will be 'not comparable'"
        return
    for number, gpu in enumerate(facts["gpus"]):
        yield f"GPU {number}", f"{gpu['name']}, {gpu['memory_bytes'] / 1e9:.0f} GB"
    yield "driver", f"{facts['driver']}, CUDA of torch {facts['cuda'] or 'none: this torch is built for CPUs'}"


def _energy(device: str) -> Iterator[Finding]:
    import torch

    indices = list(range(torch.cuda.device_count())) if device == "cuda" else []
    found = meter(indices)
    for source in found.sources:
        yield "energy", f"{source.kind} {source.device}"
    for missing in found.missing:
        yield "energy", missing
