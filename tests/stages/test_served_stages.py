"""The server over several stages: a client gets an error when a stage dies, and the server ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]


def start_server():
    engine = {
        "model": "SmolLM2-135M@layers=2", "stages": 2, "max_streams": 4, "max_model_len": 2048,
        "switches": {"weights_dtype": "fp32"},
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.server", json.dumps({"port": 0, "engine": engine})],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return process, process.stdout.readline().split(" at ")[1].split()[0]


def stage_of(server):
    """The process id of stage 1: the one of this server's descendants that runs the resident loop."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and b"engine.resident" in _read(entry / "cmdline"):
            parent = int(_read(entry / "stat").rsplit(b")", 1)[1].split()[1])
            if int(_read(Path(f"/proc/{parent}/stat")).rsplit(b")", 1)[1].split()[1]) == server.pid:
                return int(entry.name)
    raise AssertionError("no stage found")


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b") ? 0"


def test_a_client_gets_an_error_when_a_stage_dies():
    server, url = start_server()
    try:
        stage = stage_of(server)
        threading.Timer(1.0, lambda: os.kill(stage, signal.SIGKILL)).start()
        body = {"prompt": [5] * 10, "max_tokens": 1900, "ignore_eos": True, "temperature": 0}
        answer = httpx.post(f"{url}/completions", json=body, timeout=40, trust_env=False)
        assert answer.status_code >= 500
        assert "stage 1" in answer.text and "ended: signal 9" in answer.text
        _, errors = server.communicate(timeout=30)
        assert server.returncode == 1
        assert "stage 1" in errors
    finally:
        server.kill()
