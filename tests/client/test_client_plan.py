"""Which request is due when, on an invented clock."""

from __future__ import annotations

import json
from array import array

import pytest

from arkbench.targets._job import BodyForm, Endpoint, Job, WireRequest
from arkbench.targets._plan import Plan
from arkbench.targets.base import LoadReport
from arkbench.targets.openai import JobStats, arrival_delay, client_report, quantile


def wire(request: int, offset: float = 0.0, stream: int = 0) -> WireRequest:
    return WireRequest(request, array("i", [request + 1, 5, 6]).tobytes(), 4, offset, stream)


def job(mode: str, *requests: WireRequest, duration: float | None = None, grace: float = 10.0) -> Job:
    endpoint = Endpoint("http", "127.0.0.1", 1, "/v1")
    return Job(endpoint, BodyForm("m", "ids"), requests, mode, duration, 90.0, grace, "raw")


def due(plan: Plan, now: float) -> list[tuple[int, float]]:
    taken = []
    while (item := plan.pop(now)) is not None:
        taken.append((item[2].request, item[1]))
    return taken


def test_together_all_are_due_at_the_release() -> None:
    plan = Plan(job("together", wire(0), wire(1), wire(2)))
    plan.release(100.0)
    assert due(plan, 99.9) == []
    assert due(plan, 100.0) == [(0, 100.0), (1, 100.0), (2, 100.0)]
    assert not plan.waiting
    assert plan.cut_at() == 110.0


def test_open_each_at_its_offset_whatever_runs() -> None:
    plan = Plan(job("open", wire(0, 0.5), wire(1, 0.1), wire(2, 2.0)))
    plan.release(100.0)
    assert due(plan, 101.0) == [(1, 100.1), (0, 100.5)]
    assert plan.cut_at() is None
    assert due(plan, 102.5) == [(2, 102.0)]
    assert plan.cut_at() == 112.0


def test_closed_a_stream_sends_its_next_when_its_last_has_ended() -> None:
    plan = Plan(job("closed", wire(0, stream=0), wire(1, stream=1), wire(2, stream=0)))
    plan.release(100.0)
    assert due(plan, 100.0) == [(0, 100.0), (1, 100.0)]
    plan.ended(0, 101.5)
    assert due(plan, 101.5) == [(2, 101.5)]
    plan.ended(1, 102.0)
    plan.ended(0, 103.0)
    assert not plan.waiting
    assert plan.cut_at() == 111.5


def test_closed_sends_none_after_its_duration() -> None:
    plan = Plan(job("closed", wire(0, stream=0), wire(1, stream=0), duration=5.0))
    plan.release(100.0)
    assert due(plan, 100.0) == [(0, 100.0)]
    assert plan.cut_at() == 115.0
    plan.ended(0, 105.0)
    assert due(plan, 105.0) == []
    assert not plan.waiting


def test_bodies_are_the_same_whether_they_are_built_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [wire(n, stream=0) for n in range(3)]
    ahead = Plan(job("closed", *requests))
    monkeypatch.setattr("arkbench.targets._plan._PREBUILT_TOKENS", 0)
    late = Plan(job("closed", *requests))
    for plan in (ahead, late):
        plan.release(0.0)
    for _ in requests:
        a, b = ahead.pop(1.0), late.pop(1.0)
        assert a is not None and a == b
        for plan in (ahead, late):
            plan.prepare(0)
            plan.ended(0, 1.0)


def test_body_of_token_ids() -> None:
    form = BodyForm("m", "ids", {"stream": True, "min_tokens": 1})
    body = json.loads(form.build([3, 1, 2], 7))
    assert body == {"model": "m", "max_tokens": 7, "stream": True, "min_tokens": 7, "prompt": [3, 1, 2]}


@pytest.mark.parametrize(("overhead", "per_word", "words"), [(0.0, 1.0, 100), (4.0, 1.0, 96), (0.0, 2.0, 50)])
def test_text_prompts_have_as_many_words_as_their_tokens_cost(overhead: float, per_word: float, words: int) -> None:
    form = BodyForm("m", "text", {}, overhead, per_word)
    assert len(json.loads(form.build(range(100), 1))["prompt"].split()) == words


def test_text_prompts_of_different_ids_differ_in_their_first_words() -> None:
    form = BodyForm("m", "chat")
    texts = {json.loads(form.build([n] * 8, 1))["messages"][0]["content"].split(maxsplit=2)[:2][1] for n in range(72)}
    pairs = {tuple(json.loads(form.build([n] * 8, 1))["messages"][0]["content"].split()[:2]) for n in range(3000)}
    assert len(pairs) == 3000
    assert texts


def test_arrival_delay_solves_its_definition() -> None:
    assert arrival_delay([], 1.0, 0.99) is None
    assert arrival_delay([0.0, 0.0], 1.0, 0.99) == 0.0
    # 0.34 s held up in 1.7 s: all but 17 ms of arrivals wait less than 0.323 s.
    assert arrival_delay([0.0] * 200 + [0.34], 1.7, 0.99) == pytest.approx(0.323)
    # Two stalls of 50 ms in 2 s: 2 * (0.05 - d) = 0.02.
    assert arrival_delay([0.05, 0.001, 0.05], 2.0, 0.99) == pytest.approx(0.04)
    # A single stall of 15 ms in 2 s is below one in a hundred.
    assert arrival_delay([0.015], 2.0, 0.99) == 0.0


def test_quantile() -> None:
    assert quantile([], 0.5) is None
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile(list(range(101)), 0.99) == 99


def stats(lag: float = 0.0, cpu: float = 0.1, send_lag: float = 0.0, **more: int) -> JobStats:
    return JobStats(array("d", [lag]), array("d", [send_lag]), cpu_s=cpu, wall_s=1.0, **more)


def test_a_client_that_kept_up_is_valid() -> None:
    assert client_report([stats(lag=0.001)], "together") == LoadReport(client_lag_p99_s=0.0)


@pytest.mark.parametrize(
    ("seen", "mode", "words"),
    [
        (stats(lag=0.2), "together", "held pieces up by 190 ms"),
        (stats(cpu=0.95), "together", "filled 95% of a core"),
        (stats(send_lag=0.3), "open", "requests left 300 ms late"),
    ],
)
def test_a_client_that_was_the_limit_says_so(seen: JobStats, mode: str, words: str) -> None:
    report = client_report([seen], mode)
    assert not report.valid
    assert report.reason.startswith("the client was the limit: ")
    assert words in report.reason


def test_cut_requests_and_estimates_are_notes() -> None:
    notes = client_report([stats(cut=2, estimated_counts=3)], "closed", ("x",)).notes
    assert notes[0] == "x"
    assert notes[1].startswith("2 requests were still running")
    assert notes[2].startswith("3 answers: the tokens of a piece are estimated")
