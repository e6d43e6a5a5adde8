"""The HTTP target against the known-answer server, with both clients.

Nothing here asserts how long something took: a server never sends before its time, so times have lower bounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from arkbench import known_answer
from arkbench.known_answer import KnownAnswerServer, Plan, Script, Step, answer, event, refusal, text_piece
from arkbench.targets.base import Answer, Load, LoadReport, PlannedRequest, TargetError
from arkbench.targets.endpoint import parse_url, served_model
from arkbench.targets.openai import OpenAITarget


@pytest.fixture(params=["raw", "httpx"], scope="module")
def client(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def worker() -> Iterator[dict[str, list]]:
    """Client processes are shared by the tests of this file: starting one costs more than most tests."""
    shared: dict[str, list] = {}
    yield shared
    for processes in shared.values():
        for process in processes:
            process.close()


def requests(count: int, prompt: int = 8, output: int = 4, **more: Any) -> list[PlannedRequest]:
    return [PlannedRequest(n, [n + 1] * prompt, output, **more) for n in range(count)]


class Driven:
    """A target on a server that answers the probe well and the rest by `plan`."""

    def __init__(self, plan: Plan, client: str, worker: dict[str, list], at_once: int | None = None) -> None:
        self.target_client, self.worker = client, worker
        self.plan, self.probed = plan, False
        self.server = KnownAnswerServer(self._play, at_once=at_once)

    def _play(self, body: dict[str, Any]) -> Script:
        return self.plan(body) if self.probed else answer(body["prompt_tokens"], body["max_tokens"])

    def run(self, load: Load) -> tuple[dict[int, Answer], LoadReport]:
        with self.server:
            target = OpenAITarget(self.server.url, client=self.target_client, processes=1)
            target._processes = self.worker.setdefault(self.target_client, [])
            info = target.start({}, len(load.requests), 100, 0)
            assert info.model == "known-answer"
            self.probed = True
            answers: dict[int, Answer] = {}
            report = target.run(load, lambda a: answers.__setitem__(a.request, a))
        return answers, report


@pytest.fixture
def drive(client: str, worker: dict[str, list]) -> Any:
    def run(plan: Plan, load: Load, at_once: int | None = None) -> tuple[dict[int, Answer], LoadReport]:
        return Driven(plan, client, worker, at_once).run(load)

    return run


def test_a_burst(drive: Any) -> None:
    answers, report = drive(known_answer.constant(first_s=0.05, gap_s=0.01, role_s=0.0), Load(requests(5), "burst"))
    assert sorted(answers) == [0, 1, 2, 3, 4]
    assert len({a.sent for a in answers.values()}) == 1
    for a in answers.values():
        assert (a.status, a.error) == ("ok", None)
        assert a.piece_counts == [1, 1, 1, 1]
        assert (a.prompt_tokens, a.output_tokens, a.cached_tokens) == (8, 4, 0)
        assert a.piece_times[0] - a.sent >= 0.05
        assert a.piece_times == sorted(a.piece_times)
        assert a.piece_times[-1] - a.sent >= 0.08
        assert a.text == " tok tok tok tok"
    assert report.client_lag_p99_s is not None


def test_together_each_is_measured_from_its_own_sending(drive: Any) -> None:
    answers, _ = drive(known_answer.constant(first_s=0.05, gap_s=0.01, role_s=0.0), Load(requests(5)))
    assert len({a.scheduled for a in answers.values()}) == 1
    assert len({a.sent for a in answers.values()}) == 5
    for a in answers.values():
        assert a.scheduled <= a.sent <= a.piece_times[0] - 0.05


@pytest.mark.parametrize("split", [1, 7])
@pytest.mark.parametrize("chunked", [True, False])
def test_any_framing(drive: Any, split: int, chunked: bool) -> None:
    pieces = [event(text_piece("a"), "\r\n", space=False), b": ping\r\n\r\n", event(text_piece("b"), "\r")]
    tail = event(text_piece("", finish="length"), "\r\n") + event("[DONE]", "\r\n", space=False)
    script = Script((Step(0.0, b"\xef\xbb\xbf" + b"".join(pieces)), Step(0.01, tail)), split=split, chunked=chunked)
    answers, _ = drive(lambda body: script, Load(requests(2, output=2)))
    assert [(a.status, a.text, a.output_tokens) for a in answers.values()] == [("ok", "ab", 2)] * 2


def failing(name: str) -> Script:
    good = answer(8, 4)
    return {
        "refused": refusal(429, "busy"),
        "unavailable": refusal(503, "loading"),
        "broken": refusal(500, "boom"),
        "gateway": refusal(504, "no first token"),
        "error": Script((*good.steps[:2], Step(0.0, event({"error": {"message": "lost"}}) + event("[DONE]")))),
        "cut": replace(good, steps=good.steps[:2], ending="cut"),
        "cut at once": Script(ending="cut"),
        "early end": replace(good, steps=good.steps[:2]),
        "html": Script((Step(0.0, b"<html>"),), content_type="text/html"),
    }[name]


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("refused", "refused", "HTTP 429: busy"),
        ("unavailable", "refused", "HTTP 503: loading"),
        ("broken", "failed", "HTTP 500: boom"),
        ("gateway", "timeout", "HTTP 504: no first token"),
        ("error", "failed", "an error in the stream: lost"),
        ("cut", "failed", ""),
        ("cut at once", "failed", ""),
        ("early end", "failed", "the stream ended before its answer did"),
        ("html", "failed", "the endpoint answered text/html instead of a stream of events"),
    ],
)
def test_failures_are_told_apart_and_spoil_no_other_request(drive: Any, name: str, status: str, message: str) -> None:
    def plan(body: dict[str, Any]) -> Script:
        return failing(name) if body["prompt"][0] % 2 else answer(8, 4)

    answers, _ = drive(plan, Load(requests(4)))
    for number, a in answers.items():
        assert a.status == ("ok" if number % 2 else status)
        assert message in (a.error or "") if not number % 2 else a.error is None


def test_no_first_token_in_time_is_a_timeout(drive: Any) -> None:
    role = replace(answer(8, 4), steps=(Step(0.0, event(text_piece(""))),), ending="hang")
    silent = Script(head_at_s=0.0, ending="hang")
    scripts = {1: role, 2: silent, 3: answer(8, 4)}
    load = Load(requests(3), first_token_timeout_s=0.3)
    answers, _ = drive(lambda body: scripts[body["prompt"][0]], load)
    assert [answers[n].status for n in range(3)] == ["timeout", "timeout", "ok"]
    assert answers[0].error == "no first token within 0.3 s"


def test_a_stream_that_does_not_end_is_cut_after_the_grace_time(drive: Any) -> None:
    endless = replace(answer(8, 4), steps=answer(8, 4).steps[:3], ending="hang")
    load = Load(requests(3), grace_s=0.4)
    answers, report = drive(lambda body: endless if body["prompt"][0] == 1 else answer(8, 4), load)
    assert [answers[n].status for n in range(3)] == ["cancelled", "ok", "ok"]
    assert answers[0].output_tokens == 3
    assert report.notes[-1] == "1 requests were still running after the grace time and were cut"


def test_a_closed_loop_sends_the_next_when_the_last_has_ended(drive: Any) -> None:
    planned = [PlannedRequest(n, [n + 1] * 8, 2, stream=n % 2) for n in range(6)]
    answers, _ = drive(known_answer.constant(first_s=0.02), Load(planned, mode="closed"))
    for stream in (0, 1):
        mine = [answers[n] for n in range(stream, 6, 2)]
        for last, following in itertools.pairwise(mine):
            assert following.sent >= last.piece_times[-1]


def test_a_closed_loop_goes_on_after_a_failure(drive: Any) -> None:
    planned = [PlannedRequest(n, [n + 1] * 8, 2) for n in range(4)]
    plan = lambda body: failing("cut") if body["prompt"][0] == 2 else answer(8, 2)  # noqa: E731
    answers, _ = drive(plan, Load(planned, mode="closed"))
    assert [answers[n].status for n in range(4)] == ["ok", "failed", "ok", "ok"]


def test_a_closed_loop_ends_after_its_duration(drive: Any) -> None:
    planned = [PlannedRequest(n, [1] * 8, 1) for n in range(1000)]
    answers, _ = drive(known_answer.constant(first_s=0.1), Load(planned, mode="closed", duration_s=0.35))
    assert 1 <= len(answers) <= 4
    assert all(a.status == "ok" for a in answers.values())


def test_an_open_loop_sends_at_its_times_and_counts_waiting_from_them(drive: Any) -> None:
    planned = [PlannedRequest(n, [n + 1] * 8, 1, offset_s=0.05 * n) for n in range(5)]
    answers, _ = drive(known_answer.constant(first_s=0.2), Load(planned, mode="open"), at_once=1)
    first = answers[0].scheduled
    assert [round(answers[n].scheduled - first, 6) for n in range(5)] == [0.0, 0.05, 0.1, 0.15, 0.2]
    # One at a time, 0.2 s each: request n waits for n others, and its wait counts from its own due time.
    for n in range(5):
        assert answers[n].piece_times[0] - answers[n].scheduled >= 0.2 * (n + 1) - 0.05 * n - 1e-3


def test_lengths_that_differ_are_reported(drive: Any) -> None:
    answers, report = drive(lambda body: answer(body["prompt_tokens"] + 2, 3), Load(requests(2)))
    assert {a.prompt_tokens for a in answers.values()} == {10}
    assert report.notes == (
        "2 of 2 prompts were not as long as asked: +2 tokens by the endpoint's usage",
        "2 of 2 answers were not as long as asked: -1 tokens by the endpoint's usage",
    )


def test_estimated_pieces_are_reported(drive: Any) -> None:
    answers, report = drive(known_answer.constant(per_piece=2, first_piece=4), Load(requests(1, output=8)))
    assert answers[0].piece_counts == [4, 2, 2]
    assert "estimated" in report.notes[0]


def test_ctrl_c_hands_over_what_runs(client: str, worker: dict[str, list]) -> None:
    driven = Driven(lambda body: replace(answer(8, 1), ending="hang"), client, worker)
    answers: list[Answer] = []

    def interrupt(a: Answer) -> None:
        answers.append(a)
        if len(answers) == 1:
            raise KeyboardInterrupt

    planned = [PlannedRequest(0, [1] * 8, 1), *(PlannedRequest(n, [2] * 8, 1) for n in range(1, 4))]
    driven.plan = lambda body: answer(8, 1) if body["prompt"][0] == 1 else replace(answer(8, 1), ending="hang")
    with driven.server:
        target = OpenAITarget(driven.server.url, client=client, processes=1)
        target._processes = worker.setdefault(client, [])
        target.start({}, 4, 100, 0)
        driven.probed = True
        with pytest.raises(KeyboardInterrupt):
            target.run(Load(planned), interrupt)
        assert [a.status for a in answers] == ["ok", "cancelled", "cancelled", "cancelled"]
        # The client process is fit for the next load.
        answers.extend([Answer(9, 0.0)])
        target.run(Load(planned[:1]), interrupt)
        assert answers[-1].status == "ok"


def test_several_client_processes_share_a_load() -> None:
    with KnownAnswerServer(known_answer.constant()) as server:
        target = OpenAITarget(server.url, client="raw", processes=2)
        target.start({}, 7, 100, 0)
        answers: list[Answer] = []
        target.run(Load(requests(7), "burst"), answers.append)
        assert sorted(a.request for a in answers) == list(range(7))
        assert sorted(len(s.send_lags_s) for s in target.client_stats) == [3, 4]
        assert len({a.sent for a in answers}) == 1
        target.close()


# ------------------------------------------------------------------------------------------ the endpoint


def probed(plan: Plan) -> tuple[Any, OpenAITarget, list[dict[str, Any]]]:
    with KnownAnswerServer(plan) as server:
        target = OpenAITarget(server.url)
        target._processes = [None]  # type: ignore[list-item]
        info = target.start({"kernels": "fused"}, 1, 100, 0)
        return info, target, server.requests


def test_an_endpoint_that_takes_everything() -> None:
    info, target, _ = probed(known_answer.constant())
    form = target._probed.form
    assert (form.prompt, form.model) == ("ids", "known-answer")
    assert form.options["ignore_eos"] and form.options["return_token_ids"]
    assert info.notes == ("the endpoint's switches are not known",)


def test_an_endpoint_without_ignore_eos() -> None:
    def plan(body: dict[str, Any]) -> Script:
        return refusal(400, "unknown field ignore_eos") if "ignore_eos" in body else answer(16, body["max_tokens"])

    info, target, _ = probed(plan)
    assert "ignore_eos" not in target._probed.form.options
    assert "does not take ignore_eos" in info.notes[0]


def test_an_endpoint_that_takes_only_text() -> None:
    def plan(body: dict[str, Any]) -> Script:
        if isinstance(body["prompt"], list):
            return refusal(422, "prompt must be a string")
        return answer(3 + 2 * len(body["prompt"].split()), body["max_tokens"])

    info, target, _ = probed(plan)
    form = target._probed.form
    assert (form.prompt, form.text_overhead, form.tokens_per_word) == ("text", 3.0, 2.0)
    assert "sent as text" in info.notes[0]


def test_an_endpoint_with_chat_only() -> None:
    def plan(body: dict[str, Any]) -> Script:
        return answer(7 + body["prompt_tokens"], 2) if "messages" in body else refusal(404, "no such route")

    _, target, _ = probed(plan)
    assert (target._probed.form.prompt, target._probed.form.text_overhead) == ("chat", 7.0)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (lambda body: refusal(401, "no key"), "give --api-key"),
        (lambda body: refusal(500, "out of order"), "out of order"),
        (lambda body: answer(16, 0), "an answer without tokens"),
    ],
)
def test_an_endpoint_that_cannot_be_used_says_why(plan: Plan, words: str) -> None:
    with pytest.raises(TargetError, match=words):
        probed(plan)


def test_nobody_answers() -> None:
    with pytest.raises(TargetError, match="does not answer"):
        served_model("http://127.0.0.1:9/v1", None, None)


def test_served_model() -> None:
    with KnownAnswerServer(known_answer.constant()) as server:
        assert served_model(server.url, None, None) == "known-answer"
        assert served_model(server.url.removesuffix("/v1"), None, ["known-answer"]) == "known-answer"
        with pytest.raises(TargetError, match="does not serve 'other': it lists known-answer"):
            served_model(server.url, None, ["other"])


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("h:1", "http://h:1/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("http://h:1/v1/", "http://h:1/v1"),
        ("https://h/api/v1/chat/completions", "https://h:443/api/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
    ],
)
def test_urls(url: str, base: str) -> None:
    assert parse_url(url, None).base == base


@pytest.mark.parametrize("url", ["", "ftp://h", "http://", "http://h:port"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(TargetError, match="is no endpoint"):
        parse_url(url, None)


def test_prompts_of_a_load_arrive_as_they_were_asked_for() -> None:
    with KnownAnswerServer(known_answer.constant()) as server:
        target = OpenAITarget(server.url, client="raw")
        target.start({}, 3, 100, 0)
        server.requests.clear()
        target.run(Load([PlannedRequest(n, [n, 70_000 + n], 2) for n in range(3)]), lambda a: None)
        target.close()
        assert sorted(body["prompt"] for body in server.requests) == [[0, 70_000], [1, 70_001], [2, 70_002]]
