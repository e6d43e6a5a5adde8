"""The in-process target over a fake engine with the engine's own interface."""

import sys
import time
import types

import pytest

from arkbench.errors import UserError
from arkbench.targets import bundled
from arkbench.targets.base import Load, PlannedRequest, TargetError
from engine.config import EngineError
from engine.request import EngineInfo, TokenEvent

SWITCHES = bundled.resolve_switches("best", {})


class FakeEngine:
    """One token a step for every request; `hang`: ids that never get one; `piece`: tokens of the first event."""

    made: list["FakeEngine"] = []  # noqa: RUF012
    hang: tuple[int, ...] = ()
    piece = 1
    occupancy = (0, 0)
    die_at: int | None = None
    interrupt_at: int | None = None

    def __init__(self, config):
        self.config, self.live, self.steps, self.closed = config, {}, 0, False
        self.cancelled, self.most = [], 0
        self.info = EngineInfo("SmolLM2-135M", "cpu", 10, 9, 8, 7, 6, "all int4", {"weights": 0.5}, ("a note",))
        FakeEngine.made.append(self)

    @classmethod
    def load(cls, config):
        if config.max_model_len > 100_000:
            raise EngineError("needs 99 GB, 24 GB are free; take a smaller model")
        return cls(config)

    def add(self, request):
        if not request.prompt:
            raise EngineError(f"request '{request.id}': the prompt is empty")
        assert request.sampling.ignore_eos and request.sampling.temperature == 0
        self.live[request.id] = [request, 0]
        self.most = max(self.most, len(self.live))

    def cancel(self, request_id):
        self.cancelled.append(request_id)
        self.live.pop(request_id, None)

    def has_work(self):
        return bool(self.live)

    def step(self):
        self.steps += 1
        if self.steps == self.die_at:
            raise EngineError("stage 0 died")
        if self.steps == self.interrupt_at:
            raise KeyboardInterrupt
        events = []
        for key, state in list(self.live.items()):
            request, made = state
            if int(key.split("-")[1]) in self.hang:
                continue
            count = min(self.piece if made == 0 else 1, request.sampling.max_tokens - made)
            state[1] += count
            end = "length" if state[1] == request.sampling.max_tokens else None
            tokens = tuple(range(made, made + count))
            events.append(TokenEvent(key, tokens, time.monotonic(), end, cached_tokens=3 if made == 0 else 0))
            if end:
                del self.live[key]
        if not events:
            time.sleep(0.001)
        return events

    def set_switches(self, switches):
        assert not self.has_work()
        self.switches = switches

    def close(self):
        self.closed = True


@pytest.fixture
def engine(monkeypatch):
    module = types.ModuleType("engine.engine")
    fake = type("Fake", (FakeEngine,), {"made": FakeEngine.made})
    module.Engine = fake
    monkeypatch.setitem(sys.modules, "engine.engine", module)
    FakeEngine.made.clear()
    return fake


def started(max_tokens=64):
    target = bundled.BundledTarget("SmolLM2-135M", "random", "cpu", 1, 0)
    info = target.start(SWITCHES, 8, max_tokens, 512)
    return target, info


def send(target, count=3, output=4, prompt=(1, 2), **load):
    answers = []
    planned = [PlannedRequest(n, list(prompt), output, stream=n % 2) for n in range(count)]
    target.run(Load(planned, **load), answers.append)
    return {answer.request: answer for answer in answers}


def test_info_is_what_the_engine_says(engine):
    _, info = started()
    assert (info.step_weight_bytes, info.cache_bytes_per_token, info.state_bytes_per_request) == (9, 8, 7)
    assert info.vocab == 49_152 and info.in_process and info.geometry["hidden"] == 576
    assert info.notes == ("weights: all int4", "a note")


def test_a_burst_has_one_release_and_every_piece(engine):
    engine.piece = 2
    target, _ = started()
    answers = send(target, mode="burst")
    assert {a.sent for a in answers.values()} == {answers[0].scheduled}
    assert [a.status for a in answers.values()] == ["ok"] * 3
    assert answers[0].piece_counts == [2, 1, 1]
    assert (answers[0].output_tokens, answers[0].tokens) == (4, [0, 1, 2, 3])
    assert (answers[0].prompt_tokens, answers[0].cached_tokens) == (2, 3)


def test_together_each_is_measured_from_its_own_sending(engine):
    target, _ = started()
    answers = send(target)
    assert len({a.scheduled for a in answers.values()}) == 1
    assert answers[0].scheduled < answers[0].sent < answers[1].sent < answers[2].sent


def test_closed_loop_keeps_one_request_a_stream(engine):
    target, _ = started()
    answers = send(target, count=6, mode="closed")
    assert len(answers) == 6
    assert engine.made[0].most == 2


def test_closed_loop_sends_none_after_its_duration(engine):
    target, _ = started()
    answers = send(target, count=6, mode="closed", duration_s=1e-9)
    assert len(answers) == 0
    many = send(target, count=5000, output=200, mode="closed", duration_s=0.02)
    assert 2 <= len(many) < 5000


def test_open_loop_sends_when_it_is_due(engine):
    target, _ = started()
    answers = []
    planned = [PlannedRequest(n, [1], 1, offset_s=0.02 * n) for n in range(3)]
    target.run(Load(planned, mode="open"), answers.append)
    gaps = [a.sent - a.scheduled for a in answers]
    assert all(gap >= 0 for gap in gaps)
    assert answers[2].scheduled - answers[0].scheduled == pytest.approx(0.04)


def test_no_first_token_in_time(engine):
    engine.hang = (1,)
    target, _ = started()
    answers = send(target, first_token_timeout_s=0.02)
    assert [answers[n].status for n in range(3)] == ["ok", "timeout", "ok"]
    assert engine.made[0].cancelled == ["1-1"]


def test_what_runs_past_the_grace_time_is_cut(engine):
    engine.hang = (1,)
    target, _ = started()
    answers = send(target, grace_s=0.02)
    assert (answers[1].status, answers[1].error) == ("cancelled", "still running after the grace time")


def test_a_request_that_is_refused_fails_and_the_loop_goes_on(engine):
    target, _ = started()
    answers = send(target, count=3000, prompt=(), mode="closed")
    assert len(answers) == 3000
    assert answers[0].status == "failed" and "prompt is empty" in answers[0].error


def test_an_engine_that_dies_fails_what_ran_and_says_so(engine):
    engine.die_at = 2
    target, _ = started()
    answers = []
    planned = [PlannedRequest(n, [1], 4) for n in range(2)]
    with pytest.raises(TargetError, match="the engine stopped: stage 0 died"):
        target.run(Load(planned), answers.append)
    assert [(a.status, a.error) for a in answers] == [("failed", "stage 0 died")] * 2


def test_ctrl_c_hands_over_what_ran(engine):
    engine.interrupt_at = 2
    target, _ = started()
    answers = []
    with pytest.raises(KeyboardInterrupt):
        target.run(Load([PlannedRequest(0, [1], 4)]), answers.append)
    assert [(a.status, a.output_tokens) for a in answers] == [("cancelled", 1)]


def test_other_switches_turn_the_loaded_engine(engine):
    target, _ = started()
    target.start(SWITCHES | {"loop": "driven"}, 8, 64, 512)
    assert len(engine.made) == 1 and engine.made[0].switches.loop == "driven"
    target.start(SWITCHES, 8, 128, 512)
    assert len(engine.made) == 2 and engine.made[0].closed


def test_what_does_not_fit_is_one_line(engine):
    with pytest.raises(TargetError, match="needs 99 GB"):
        started(max_tokens=200_000)


def test_presets_and_models_are_known_by_name():
    assert bundled.resolve_switches("ark-1.0", {})["decode_batching"] == "off"
    with pytest.raises(UserError, match="unknown preset 'ark-3'"):
        bundled.resolve_switches("ark-3", {})
    assert bundled.canonical_model("Qwen3.5-122B") == "Qwen3.5-122B-A10B"
    assert bundled.canonical_model("my-own") == "my-own"


def test_facts_of_a_cut_model_shrink_with_its_layers():
    whole, cut = bundled.model_facts("SmolLM2-135M"), bundled.model_facts("SmolLM2-135M@layers=15")
    table = 49_152 * 576
    assert whole.parameters == 134_515_008
    assert cut.parameters == (134_515_008 - table) // 2 + table
    assert cut.cache_bytes_16bit == whole.cache_bytes_16bit // 2
    with pytest.raises(UserError, match="a number from 1 to 30"):
        bundled.model_facts("SmolLM2-135M@layers=31")
