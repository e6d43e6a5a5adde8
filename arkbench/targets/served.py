"""The bundled engine behind its own API: the run starts `engine.server`, measures it over HTTP and stops it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from arkbench.targets._timeline import TimelineFile
from arkbench.targets.base import Answer, Load, LoadReport, TargetError, TargetInfo
from arkbench.targets.openai import OpenAITarget

# The probe of an endpoint needs this much room besides what the cells need.
_LEAST_MODEL_LEN = 64


class ServedTarget:
    """Implements base.Target. The server is started again whenever switches or sizes differ from the running one's."""

    def __init__(
        self,
        model: str,
        weights: str = "random",
        device: str = "cpu",
        stages: int = 1,
        seed: int = 0,
        first_token_timeout_s: float = 90.0,
    ) -> None:
        self._engine = {"model": model, "weights": weights, "device": device, "stages": stages, "seed": seed}
        self._timeline = TimelineFile(stages)
        self._first_token_timeout_s = first_token_timeout_s
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None
        self._config: dict[str, Any] = {}
        self._inner: OpenAITarget | None = None

    def start(self, switches: dict[str, str], max_streams: int, max_tokens: int, cache_tokens: int) -> TargetInfo:
        """Starts the server where the running one is of another make; raises TargetError."""
        engine = {
            **self._engine,
            "switches": switches,
            "max_streams": max_streams,
            "max_model_len": max(max_tokens, _LEAST_MODEL_LEN),
            "cache_tokens": cache_tokens,
            "timeline": self._timeline.path,
        }
        config = {
            "engine": engine,
            "port": 0,
            "max_concurrent": max_streams,
            "first_token_timeout_s": self._first_token_timeout_s,
        }
        if self._inner is None or config != self._config:
            self.close()
            self._inner = OpenAITarget(self._start_server(config), model=self._engine["model"])
            self._config = config
        return self._inner.start(switches, max_streams, max_tokens, cache_tokens)

    def run(self, load: Load, on_answer: Callable[[Answer], None]) -> LoadReport:
        """Sends a load (base.Target.run); raises TargetError when the server has died."""
        if self._inner is None:
            raise TargetError("the target has not been started")
        self._timeline.take()
        report = self._inner.run(load, on_answer)
        if self._process is not None and self._process.poll() is not None:
            raise TargetError(f"the server ended in the middle of a load: {self._last_error()}")
        return replace(report, timeline=self._timeline.take())

    def next_token(self, prompt: Sequence[int]) -> None:
        """Nothing: of an answer only its text is known here."""

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
            self._inner = None
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def _start_server(self, config: dict[str, Any]) -> str:
        """The URL of a fresh server, taken from the line that it prints when it is ready."""
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        # A session of its own: Ctrl-C is for the run, which stops the server itself.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "engine.server", json.dumps(config)],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ready: "):
                return line.split(" at ", 1)[1].split()[0]
        self._process.wait()
        message = self._last_error()
        self.close()
        raise TargetError(message)

    def _last_error(self) -> str:
        assert self._errors is not None
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1].removeprefix("arkbench serve: ") if lines else "the server ended without a word"
