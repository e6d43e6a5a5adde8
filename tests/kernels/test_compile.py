"""Kernels compiled offline: the attention and sampling kernels must fit every GPU and not grow unnoticed.

A child process compiles, because this one may run kernels in Triton's interpreter.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.compile_offline import main_loop, problems, read_record, spills

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("target", ["80", "90", "120"])
def test_every_kernel_compiles_within_its_record(target):
    # the record holds for one version of Triton; under another the tool judges shared memory alone
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tools.compile_offline", "--targets", target]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len({line.split(" / ")[0] for line in done.stdout.splitlines() if f"sm_{target}" in line}) > 45
    assert ("hopper" in done.stdout) == (target == "90"), "the wgmma kernels are for Hopper alone"


def test_unpacking_stays_short():
    """Thread instructions a weight of the main loops: what sets their speed once the bytes arrive in time."""
    _, record = read_record()
    most = {"hopper stream 8": 3.0, "hopper stream 16": 3.0, "hopper tile 32": 3.2, "hopper tile 64": 4.2}
    for case, bound in most.items():
        kernel = f"{case} / w4_{case.split()[1]}_kernel"
        assert 1.5 < record[kernel]["sm_90"]["loop_per_weight"] < bound
    for product in ("gate_up", "down"):
        figures = record[f"experts qwen3.6 1 / few_{product}_kernel"]["sm_90"]
        assert 1.5 < figures["loop_per_weight"] < 2.6
        assert figures["registers"] <= 128, "four programs must fit a multiprocessor"


def test_every_record_is_clean():
    _, record = read_record()
    assert problems(record, record) == []


def test_problems_are_named():
    good = {"registers": 100, "spilled": 0, "shared": 1000, "loop": 200, "loop_per_key": 3.0}
    record = {"k": {"sm_120": good}}
    assert problems({"k": {"sm_120": good}}, record) == []
    assert "spills 8 times in its loops on sm_120" in problems({"k": {"sm_120": good | {"spilled": 8}}}, record)[0]
    assert "needs 101377 bytes" in problems({"k": {"sm_120": good | {"shared": 101377}}}, record)[0]
    assert "loop 200 -> 213" in problems({"k": {"sm_120": good | {"loop": 213}}}, record)[0]
    assert "shared 1000 -> 1080" in problems({"k": {"sm_120": good | {"shared": 1080}}}, record)[0]
    assert "has no record for sm_120" in problems({"new": {"sm_120": good}}, record)[0]


def test_growth_and_spills_of_another_compiler_are_no_problem_but_its_shared_memory_is():
    before = {"registers": 100, "spilled": 0, "shared": 1000, "loop": 200, "loop_per_key": 3.0}
    now = before | {"registers": 200, "loop": 400, "spilled": 8}
    record = {"k": {"sm_120": before}}
    assert problems({"k": {"sm_120": now}}, record, same_compiler=False) == []
    assert "needs 101377" in problems({"k": {"sm_120": now | {"shared": 101377}}}, record, same_compiler=False)[0]


def test_the_main_loop_is_the_longest_innermost_one_with_matrix_instructions():
    lines = ["MOV R1, R2", "HMMA.16816.F32 R4, R4", "ADD R1", "@P0 BRA 0x10", "ADD R2", "ADD R2", "ADD R3", "ADD R4",
             "@P1 BRA 0x40", "@P2 BRA 0x0", "EXIT"]  # fmt: skip
    sass = "\n".join(f"        /*{16 * i:04x}*/                   {line} ;" for i, line in enumerate(lines))
    assert main_loop(sass) == ["HMMA.16816.F32 R4, R4", "ADD R1", "@P0 BRA 0x10"]
    assert spills(["STL [R1], R2", "LDL.64 R2, [R1]", "LDS R1, [R2]"]) == 2
