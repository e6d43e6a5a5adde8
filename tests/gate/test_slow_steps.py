"""The planted slowdown is as large as it says, and the script that plants it fits the tree."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def slow_steps():
    spec = importlib.util.spec_from_file_location("slow_steps", ROOT / "tools" / "slow_steps.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def pass_(self, seconds):
        self.now += seconds


class Engine:
    """A step takes 20 ms; `busy`: whether a request is left after it."""

    busy = True

    def __init__(self, clock):
        self.clock = clock

    def step(self):
        self.clock.pass_(0.020)
        return ["event"]

    def has_work(self):
        return self.busy


@pytest.mark.parametrize("share", [0.05, 0.25])
def test_steps_take_longer_by_the_share(share):
    clock = Clock()
    step = slow_steps().slowed(Engine.step, share, clock.pass_, clock)
    engine = Engine(clock)
    for _ in range(40):
        assert step(engine) == ["event"]
    before = clock.now
    for _ in range(100):
        step(engine)
    assert (clock.now - before) / 100 == pytest.approx(0.020 * (1 + share), rel=1e-6)


def test_an_idle_engine_is_not_slowed():
    clock = Clock()
    rests = []
    step = slow_steps().slowed(Engine.step, 0.05, rests.append, clock)
    engine = Engine(clock)
    step(engine)
    clock.pass_(5.0)
    step(engine)
    engine.busy = False
    step(engine)
    assert rests == []


def test_the_planted_engine_runs_and_gives_the_same_tokens():
    from engine.config import EngineConfig
    from engine.engine import Engine as RealEngine
    from engine.request import Request, SamplingParams

    engine = RealEngine.load(EngineConfig(model="SmolLM2-135M@layers=1", device="cpu", max_streams=1, max_model_len=64))
    rests = []

    def answer(step):
        engine.add(Request(f"r{len(rests)}", [1, 2, 3], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)))
        tokens = []
        while engine.has_work():
            tokens += [token for event in step(engine) for token in event.tokens]
        return tokens

    plain = answer(RealEngine.step)
    assert answer(slow_steps().slowed(RealEngine.step, 0.05, rests.append)) == plain
    assert rests and all(seconds > 0 for seconds in rests)


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "tools").glob("*.sh")))
def test_scripts_are_valid_shell(script):
    done = subprocess.run(["bash", "-n", ROOT / "tools" / script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
