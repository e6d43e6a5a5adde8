"""Servers on the fake engine, in their own processes, as a user would start them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class ServerProcess:
    """One `engine.server` process; `url` is "" when it did not become ready."""

    def __init__(self, model: str = "words", **config: Any) -> None:
        engine = {"model": model, "max_model_len": 200, **config.pop("engine", {})}
        config = {"port": 0, "factory": "scripted_engine:ScriptedEngine", "engine": engine, **config}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine.server", json.dumps(config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        assert self.process.stdout is not None
        self.ready_line = self.process.stdout.readline()
        self.url = self.ready_line.split(" at ")[1].split()[0] if self.ready_line.startswith("ready: ") else ""
        self.http = httpx.Client(base_url=self.url.removesuffix("/v1"), timeout=20.0, trust_env=False)

    def complete(self, prompt: Any, **more: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
        return self.http.post("/v1/completions", json=body)

    def chat(self, content: str, **more: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **more}
        return self.http.post("/v1/chat/completions", json=body)

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split()[0] == name)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Sends a signal and waits: the exit code and what stood on stderr."""
        self.http.close()
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors


@pytest.fixture(scope="module")
def words() -> Iterator[ServerProcess]:
    """A model without a tokenizer: token n is the word " n"."""
    server = ServerProcess()
    yield server
    assert server.end()[0] == 0


@pytest.fixture(scope="module")
def bytes_() -> Iterator[ServerProcess]:
    """A model with one token a byte."""
    server = ServerProcess("bytes")
    yield server
    assert server.end()[0] == 0


@pytest.fixture
def start() -> Iterator[Any]:
    """Starts servers of a test's own and ends those that still run."""
    started: list[ServerProcess] = []

    def begin(*args: Any, **config: Any) -> ServerProcess:
        started.append(ServerProcess(*args, **config))
        return started[-1]

    yield begin
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
