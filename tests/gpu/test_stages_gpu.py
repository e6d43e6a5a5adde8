"""Stages on GPUs: NCCL where each has a GPU of its own, gloo through host memory where two share one."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest
import torch

from engine.config import EngineConfig, EngineError, Switches
from engine.engine import Engine
from engine.request import Request, SamplingParams

pytestmark = pytest.mark.gpu

MODEL = "SmolLM2-135M"
SOAK_REQUESTS = int(os.environ.get("ARKBENCH_SOAK_REQUESTS", "300"))
STAGES = [
    pytest.param(n, marks=pytest.mark.skipif(torch.cuda.device_count() < n, reason=f"fewer than {n} GPUs"))
    for n in (2, 4)
]


def load(stages=1, model=MODEL, switches=None, **options):
    """Prompts in pieces of 512 tokens, whatever the stages: in bf16 other pieces round differently."""
    config = {"max_streams": 8, "max_model_len": 2048, "device": "cuda", "stages": stages, "prefill_tokens": 512}
    switches = Switches().with_({"prefill": "sequential", **(switches or {})})
    return Engine.load(EngineConfig(model, switches=switches, **config | options))


def prompt_of(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 49152, (length,), generator=generator).tolist()


PROMPTS = [prompt_of(length, i) for i, length in enumerate((5, 900, 64, 1500, 200))]


def generate(engine, prompts, tokens=24):
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), prompt, SamplingParams(max_tokens=tokens, ignore_eos=True)))
    made = {str(i): [] for i in range(len(prompts))}
    while engine.has_work():
        for event in engine.step():
            made[event.request_id] += event.tokens
    assert engine.pool.free == engine.pool.capacity
    return [made[str(i)] for i in range(len(prompts))]


@pytest.fixture(scope="module")
def alone():
    """Each request by itself in one process, so that no sum depends on who else is in the batch."""
    engine = load()
    tokens = [generate(engine, [prompt])[0] for prompt in PROMPTS]
    engine.close()
    return tokens


def one_by_one(engine):
    return [generate(engine, [prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize("stages", STAGES)
def test_nccl_stages_give_the_tokens_of_one(stages, alone):
    engine = load(stages)
    try:
        assert "NCCL" in engine.pipeline.described
        assert one_by_one(engine) == alone
        engine.set_switches(engine.config.switches.with_({"loop": "driven"}))
        assert one_by_one(engine) == alone
        first = generate(engine, PROMPTS)
        assert generate(engine, PROMPTS) == first
    finally:
        engine.close()


def test_stages_that_share_a_gpu_give_the_tokens_of_one(alone):
    engine = load(2, device="cuda:0")
    try:
        assert "gloo" in engine.pipeline.described
        assert one_by_one(engine) == alone
    finally:
        engine.close()


@pytest.mark.parametrize("stages", STAGES[:1])
def test_random_traffic(stages):
    """Lengths and cancellations at random in a small pool: every request ends, every page comes back."""
    draw = random.Random(3)
    engine = load(stages, cache_tokens=6144)
    wanted = {str(i): (prompt_of(draw.randint(1, 600), i), draw.randint(1, 40)) for i in range(SOAK_REQUESTS)}
    made, ends, waiting = dict.fromkeys(wanted, 0), {}, list(wanted)
    try:
        while waiting or engine.has_work():
            while waiting and len(wanted) - len(waiting) - len(ends) < 12:
                name = waiting.pop(0)
                prompt, tokens = wanted[name]
                engine.add(Request(name, prompt, SamplingParams(max_tokens=tokens, ignore_eos=True)))
            for event in engine.step():
                made[event.request_id] += len(event.tokens)
                if event.finished:
                    ends[event.request_id] = event.finished
            if draw.random() < 0.02:
                engine.cancel(draw.choice(list(wanted)[: len(wanted) - len(waiting)]))
        assert engine.pool.free == engine.pool.capacity
    finally:
        engine.close()
    assert set(ends) == set(wanted)
    assert all(made[name] == wanted[name][1] for name, end in ends.items() if end == "length")


@pytest.mark.parametrize("stages", STAGES[:1])
def test_a_stage_killed_in_flight_ends_the_engine(stages):
    engine = load(stages)
    child = engine.pipeline._meeting.children[1]
    for i in range(4):
        engine.add(Request(str(i), [5] * 20, SamplingParams(max_tokens=2000, ignore_eos=True)))
    for _ in range(10):
        engine.step()
    threading.Timer(0.3, lambda: os.kill(child.pid, signal.SIGKILL)).start()
    begin = time.monotonic()
    with pytest.raises(EngineError, match=r"stage 1 .* ended: signal 9"):
        while engine.has_work():
            engine.step()
    engine.close()
    assert time.monotonic() - begin < 30
    again = load(stages)
    try:
        assert len(generate(again, PROMPTS[:1])[0]) == 24
    finally:
        again.close()
