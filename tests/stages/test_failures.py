"""A stage that dies, hangs or never comes: one clear error, no process left, nothing that waits for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from engine.config import EngineConfig, EngineError, Switches
from engine.engine import Engine
from engine.request import Request, SamplingParams

MODEL = "SmolLM2-135M@layers=3"


def load(stages, **options):
    config = {"max_streams": 4, "max_model_len": 2048, "page_size": 16, **options}
    return Engine.load(EngineConfig(MODEL, stages=stages, switches=Switches(weights_dtype="fp32"), **config))


@pytest.mark.parametrize(
    ("stages", "victim", "how", "message"),
    [
        (3, 1, signal.SIGKILL, r"stage 1 \(.+, process \d+\) ended: signal 9"),
        (2, 1, signal.SIGSTOP, r"stage 1 \(.+, process \d+\) has not been heard of for 2 s"),
    ],
)
def test_a_stage_that_is_gone_ends_the_engine(stages, victim, how, message):
    engine = load(stages, silence_s=2.0)
    children = dict(engine.pipeline._meeting.children)
    for i in range(3):
        engine.add(Request(str(i), [5] * 20, SamplingParams(max_tokens=2000, ignore_eos=True)))
    for _ in range(10):
        engine.step()
    threading.Timer(0.2, lambda: os.kill(children[victim].pid, how)).start()
    with pytest.raises(EngineError, match=message):
        while engine.has_work():
            engine.step()
    engine.close()
    assert all(child.poll() is not None for child in children.values())


def test_the_stages_end_with_the_process_of_stage_0():
    code = (
        "from engine.config import *\nfrom engine.engine import Engine\nimport time\n"
        f"e = Engine.load(EngineConfig('{MODEL}', stages=2, switches=Switches(weights_dtype='fp32')))\n"
        "print(e.pipeline._meeting.children[1].pid, flush=True)\ntime.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    for _ in range(100):
        if not alive(pid):
            return
        time.sleep(0.1)
    pytest.fail("the other stage still runs 10 s after stage 0")


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_a_peer_that_never_joins_is_named(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EngineError, match="stage 1 of 2 did not join within 1 s"):
        load(2, join_timeout_s=1.0)


def test_stages_and_processes_must_agree(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EngineError, match="stages=2, but torchrun started 3 processes"):
        load(2, join_timeout_s=1.0)


def test_a_stage_that_cannot_start_says_why(monkeypatch):
    monkeypatch.setenv("ARKBENCH_STAGE_TIMEOUT", "soon")
    with pytest.raises(EngineError, match="ARKBENCH_STAGE_TIMEOUT=soon: it takes a number of seconds above 0"):
        load(2)
