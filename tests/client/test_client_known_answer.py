"""The known-answer servers keep to their scripts, and the client's own measurement adds up."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from arkbench import doctor_client, known_answer
from arkbench.doctor_client import Shape
from arkbench.known_answer import KnownAnswerProcess, KnownAnswerServer, answer, event, read_body
from arkbench.targets.served import ServedTarget

SOURCE = Path(__file__).resolve().parents[2] / "tools" / "known_answer.c"


def test_the_schedule_of_an_answer() -> None:
    script = answer(3, 5, first_s=0.5, gap_s=0.1, per_piece=2, first_piece=1, role_s=0.2)
    assert [step.at_s for step in script.steps] == pytest.approx([0.2, 0.5, 0.6, 0.7, 0.7])
    texts = [json.loads(step.data[6:])["choices"][0]["text"] for step in script.steps[:-1]]
    assert texts == ["", " tok", " tok tok", " tok tok"]
    usage, done, _ = script.steps[-1].data.split(b"\n\n")
    assert json.loads(usage[6:])["usage"]["completion_tokens"] == 5
    assert done == b"data: [DONE]"


def test_events_in_every_framing() -> None:
    assert event({"a": 1}) == b'data: {"a":1}\n\n'
    assert event("[DONE]", "\r\n", space=False) == b"data:[DONE]\r\n\r\n"


def test_prompts_are_counted_however_long() -> None:
    assert read_body(b'{"prompt": [1, 2, 3]}')["prompt_tokens"] == 3
    assert read_body(b'{"prompt": "a b"}')["prompt_tokens"] == 2
    assert read_body(b'{"messages": [{"content": "a b"}, {"content": "c"}]}')["prompt_tokens"] == 3
    long = json.dumps({"max_tokens": 7, "prompt": list(range(64_000)), "stream": True}).encode()
    body = read_body(long)
    assert (body["prompt_tokens"], body["max_tokens"], body["stream"]) == (64_000, 7, True)


@pytest.fixture(scope="module", params=["python", "c"])
def server_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "python":
        with KnownAnswerProcess(first_s=0.02, gap_s=0.01) as server:
            yield server.url
        return
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here")
    binary = tmp_path_factory.mktemp("c") / "known_answer"
    subprocess.run([compiler, "-O1", "-D_GNU_SOURCE", "-o", str(binary), str(SOURCE)], check=True)
    process = subprocess.Popen([str(binary), "0", "20", "10"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.terminate()
    process.wait()


@pytest.mark.parametrize("prompt", [1, 3, 64_000])
@pytest.mark.parametrize("tokens", [1, 4])
def test_both_servers_say_the_same(server_url: str, prompt: int, tokens: int) -> None:
    body = json.dumps({"model": "m", "max_tokens": tokens, "prompt": list(range(prompt))})
    response = httpx.post(server_url + "/completions", content=body, trust_env=False)
    *pieces, usage, done, rest = response.text.split("\n\n")
    assert [json.loads(p[6:])["choices"][0]["text"] for p in pieces] == [" tok"] * tokens
    found = json.loads(usage[6:])["usage"]
    assert (found["prompt_tokens"], found["completion_tokens"]) == (prompt, tokens)
    assert found["total_tokens"] == prompt + tokens
    assert (done, rest) == ("data: [DONE]", "")
    assert doctor_client.lateness(server_url)["writes"] >= tokens


def test_the_client_measures_itself() -> None:
    row = doctor_client.measure_shape(Shape("small", 12, 0.05, 0.01, 5))
    assert (row.answered, row.most_in_flight) == (12, 12)
    assert row.ttft_error_p50_s is not None and row.ttft_error_p50_s >= 0
    assert 0 < row.pieces_s <= 12 * 5 / (0.05 + 4 * 0.01)
    assert row.cpu_s_per_1k > 0 and row.rss_bytes > 1 << 20


def test_a_client_that_fails_is_not_valid() -> None:
    broken = KnownAnswerServer(
        lambda body: known_answer.refusal(500, "lost") if body["max_tokens"] == 5 else answer(32, 2)
    )
    row = doctor_client.measure_shape(Shape("failing", 2, 0.0, 0.0, 5), lambda shape: broken)
    assert (row.answered, row.valid, row.ttft_error_p50_s) == (0, False, None)
    assert row.reason == "2 requests failed: HTTP 500: lost"


def test_the_served_target_says_what_the_engine_says() -> None:
    from arkbench.targets.base import TargetError

    with pytest.raises(TargetError, match="NoSuchModel"):
        ServedTarget("NoSuchModel").start({}, 1, 64, 64)
