"""Two machines: two network namespaces joined by a veth pair with a delay, torchrun in each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIRST, SECOND = "10.213.7.1", "10.213.7.2"
SCENARIO = """
name = "two-machines"
title = "Two machines"
models = ["SmolLM2-135M@layers=2"]
repetitions = 1
variants.one.switches = { weights_dtype = "fp32" }
[[workloads]]
type = "burst"
prompt_tokens = 64
at_once = 2
output_tokens = 4
"""


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True)


@pytest.fixture
def machines():
    """(namespace, interface) of the two; skipped where namespaces cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("no `ip` command here")
    names = [f"ark{os.getpid()}{side}" for side in "ab"]
    links = [f"v{name}" for name in names]
    made = ip("netns", "add", names[0])
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    try:
        ip("netns", "add", names[1])
        pair = ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", links[1], "netns", names[1])
        if pair.returncode:
            pytest.skip(f"no veth pairs here: {pair.stderr.strip()}")
        for name, link, address in zip(names, links, (FIRST, SECOND), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield list(zip(names, links, strict=True))
    finally:
        for name in names:
            ip("netns", "del", name)


def delay(name, link):
    """One millisecond each way, where the kernel has netem."""
    tc = ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", link, "root", "netem", "delay", "1ms"]
    return shutil.which("tc") is not None and subprocess.run(tc, capture_output=True).returncode == 0


def start(machine, rank, arguments):
    name, link = machine
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": link, "TP_SOCKET_IFNAME": link,
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--node-rank",
        str(rank), "--master-addr", FIRST, "--master-port", "29541", "-m", "arkbench.cli", *arguments,
    ]  # fmt: skip
    return subprocess.Popen(
        ["ip", "netns", "exec", name, *torchrun], env=environment, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_a_model_over_two_machines(machines, tmp_path):
    delayed = [delay(*machine) for machine in machines]
    scenario, out = tmp_path / "scenario.toml", tmp_path / "run"
    scenario.write_text(SCENARIO)
    arguments = ["run", str(scenario), "--stages", "2", "--device", "cpu", "--output", str(out)]
    processes = [start(machine, rank, arguments) for rank, machine in enumerate(machines)]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    info = json.loads((out / "run.json").read_text())
    assert info["status"] == "complete"
    assert any("2 stages" in note for note in info["notes"])
    lines = [json.loads(line) for line in (out / "timeline.jsonl").read_text().splitlines()]
    assert {line["stage"] for line in lines} == {0, 1}
    if not all(delayed):
        warnings.warn("without a delay between the machines: this kernel has no netem", stacklevel=1)
