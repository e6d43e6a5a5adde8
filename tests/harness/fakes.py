"""A target with exact times and a meter that has nothing to measure, for tests of the runner."""

from __future__ import annotations

import time

from arkbench.metrics import Machine
from arkbench.runner import Tools
from arkbench.targets.base import Answer, LoadReport, TargetInfo


class FakeTarget:
    """Answers at once with made-up times: first token after 10 ms, one more every ms. Tokens are a sum of the prompt.

    `interrupt_at`: number of the load in which Ctrl-C comes after one answer. `spoil`: variants with other tokens.
    `table`: the log probabilities of the next token, whatever the prompt.
    """

    def __init__(self, log, interrupt_at=None, error=None, spoil=(), table=None):
        self.log, self.interrupt_at, self.error, self.spoil = log, interrupt_at, error, spoil
        self.table = table
        self.loads = 0
        self.kernels = ""

    def start(self, switches, max_streams, max_tokens, cache_tokens):
        self.log.append(("start", switches["kernels"], max_streams, max_tokens, cache_tokens))
        if self.error and self.error[0] == switches["kernels"]:
            raise self.error[1]
        self.kernels = switches["kernels"]
        return TargetInfo(
            "fake", "SmolLM2-135M", "cpu", True, step_weight_bytes=1000, cache_bytes_per_token=1,
            state_bytes_per_request=0, active_parameters=500, vocab=49_152, start_seconds={"weights": 1.0},
        )  # fmt: skip

    def run(self, load, on_answer):
        self.loads += 1
        self.log.append(("load", self.kernels, len(load.requests), load.requests[0].output_tokens))
        release = time.monotonic()
        for n, request in enumerate(load.requests):
            if self.interrupt_at == self.loads and n == 1:
                raise KeyboardInterrupt
            tokens = [
                (sum(request.prompt) + i + (self.kernels in self.spoil)) % 1000 for i in range(request.output_tokens)
            ]
            times = [release + 0.01 + 0.001 * i for i in range(request.output_tokens)]
            on_answer(
                Answer(request.request, release, release, times, [1] * len(times), len(request.prompt), 0, len(times),
                       tokens=tokens)
            )  # fmt: skip
        return LoadReport()

    def next_token(self, prompt):
        return self.table

    def close(self):
        self.log.append(("close",))


class NoMeter:
    sources = ()
    missing = ("energy not available: a test",)

    def start(self): ...
    def idle(self, seconds): ...
    def window(self, t0, t1): ...
    def stop(self): ...

    def rows(self, origin=None):
        return []

    def idle_drift(self):
        return ""


def tools(target):
    return Tools(lambda plan, model, variant: target, NoMeter, lambda: Machine(1e9, 1e9), "cpu")
