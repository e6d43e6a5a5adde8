"""Limits, time-outs, clients that leave, engines that die, signals."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from typing import Any

import httpx
import pytest
import scripted_engine

from engine.config import EngineConfig, EngineError
from engine.server import _listen
from engine.serving import worker
from engine.serving.channel import Channel, ChannelClosed


def wait_until(condition: Any, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def in_background(call: Any) -> tuple[threading.Thread, list[Any]]:
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(call())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, result


def test_more_than_the_limit_is_refused(start: Any) -> None:
    server = start(max_concurrent=2)
    thread, result = in_background(
        lambda: httpx.post(
            f"{server.url}/completions",
            json={"prompt": [[scripted_engine.SLOW, 1]] * 2, "max_tokens": 20, "ignore_eos": True},
            timeout=30,
        )
    )
    wait_until(lambda: server.metric("arkbench_requests_running") == 1)
    refused = server.complete([1])
    assert refused.status_code == 429
    assert refused.json()["error"]["message"] == "2 requests are in flight, the limit is 2"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    thread.join()
    assert result[0].status_code == 200
    assert server.complete([1]).status_code == 200
    assert server.metric("arkbench_requests_total") == 4


@pytest.mark.parametrize("stream", [False, True])
def test_no_first_token_in_time(start: Any, stream: bool) -> None:
    server = start(first_token_timeout_s=0.2)
    response = server.complete([scripted_engine.SILENT], stream=stream)
    assert response.status_code == 504
    assert response.json()["error"]["message"] == "no first token within 0.2 s"
    # The engine has been told: its pages are free again.
    wait_until(lambda: server.metric("arkbench_pages_used") == 0)
    assert server.complete([1]).status_code == 200


@pytest.mark.parametrize("first", [scripted_engine.SLOW, scripted_engine.SILENT])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_cancelled(words: Any, first: int, stream: bool) -> None:
    with socket.create_connection(("127.0.0.1", int(words.url.split(":")[2].split("/")[0]))) as client:
        body = json.dumps({"prompt": [first, 1], "max_tokens": 190, "stream": stream, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        running = "arkbench_requests_running" if first == scripted_engine.SLOW else "arkbench_requests_waiting"
        wait_until(lambda: words.metric(running) == 1)
    wait_until(lambda: words.metric(running) == 0)
    wait_until(lambda: words.metric("arkbench_pages_used") == 0)


def test_an_api_key(start: Any) -> None:
    server = start(api_key="secret")
    assert server.complete([1]).status_code == 401
    assert server.http.get("/v1/models").status_code == 401
    assert server.http.get("/health").status_code == 200
    server.http.headers["Authorization"] = "Bearer wrong"
    assert server.complete([1]).status_code == 401
    server.http.headers["Authorization"] = "Bearer secret"
    assert server.complete([1]).status_code == 200


def test_a_body_that_is_too_large(start: Any) -> None:
    server = start(max_body_bytes=1000)
    assert server.complete("x" * 2000).status_code == 413
    assert server.complete([1]).status_code == 200


def test_failures_of_one_request(words: Any) -> None:
    rejected = words.complete([scripted_engine.FAILS, 1])
    assert (rejected.status_code, rejected.json()["error"]["message"]) == (400, "this prompt can never run")
    failed = words.complete([scripted_engine.FAILS])
    assert (failed.status_code, failed.json()["error"]["message"]) == (500, "the request is lost")
    stream = words.complete([scripted_engine.FAILS], stream=True)
    assert stream.status_code == 200
    error, done = (b.removeprefix("data: ") for b in stream.text.strip().split("\n\n")[-2:])
    assert (json.loads(error)["error"]["message"], done) == ("the request is lost", "[DONE]")


@pytest.mark.parametrize(
    ("first", "words_"), [(scripted_engine.KILLED, "signal 9"), (scripted_engine.DIES, "exit code 1")]
)
def test_an_engine_that_dies(start: Any, first: int, words_: str) -> None:
    server = start()
    response = server.complete([first, 1])
    assert response.status_code == 500
    assert f"the engine's process ended unexpectedly ({words_})" in response.json()["error"]["message"]
    server.http.close()
    code, errors = server.wait()
    assert code == 1
    assert errors.splitlines()[-1] == f"arkbench serve: the engine's process ended unexpectedly ({words_})"


def test_sigterm_lets_requests_finish(start: Any) -> None:
    server = start()
    thread, result = in_background(
        lambda: httpx.post(
            f"{server.url}/completions",
            json={"prompt": [scripted_engine.SLOW, 1], "max_tokens": 10, "temperature": 0},
            timeout=30,
        )
    )
    wait_until(lambda: server.metric("arkbench_requests_running") == 1)
    code, errors = server.end(signal.SIGTERM)
    thread.join()
    assert (code, errors) == (0, "")
    assert result[0].json()["usage"]["completion_tokens"] == 10


def test_a_server_that_ends_while_the_engine_loads_leaves_no_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    ours.close()
    with pytest.raises(ChannelClosed):
        worker._start(channel, EngineConfig(model="words", max_model_len=200), "scripted_engine:ScriptedEngine")
    assert capsys.readouterr().err == ""


def test_requests_that_do_not_finish_are_cut(start: Any) -> None:
    server = start(drain_s=1)
    thread, result = in_background(
        lambda: httpx.post(f"{server.url}/completions", json={"prompt": [scripted_engine.SILENT]}, timeout=30)
    )
    wait_until(lambda: server.metric("arkbench_requests_waiting") == 1)
    assert server.end(signal.SIGTERM)[0] == 0
    thread.join()
    assert isinstance(result[0], httpx.HTTPError) or result[0].status_code >= 500


def test_ctrl_c_ends_it_too(start: Any) -> None:
    assert start().end(signal.SIGINT) == (0, "")


def test_the_ready_line(words: Any) -> None:
    assert words.ready_line.startswith("ready: words at http://127.0.0.1:")
    assert words.ready_line.endswith("/v1 (engine started in 0.5 s)\n")


@pytest.mark.parametrize(
    ("model", "code", "message"),
    [
        ("unknown", 2, "unknown model 'unknown': take another"),
        ("broken", 1, "the engine did not start: ZeroDivisionError: by zero"),
        (
            "killed",
            1,
            "the engine's process ended at its start (signal 9); where the memory ran out, give fewer --cache-tokens",
        ),
    ],
)
def test_an_engine_that_does_not_start(start: Any, model: str, code: int, message: str) -> None:
    server = start(model)
    assert server.url == ""
    found, errors = server.wait()
    assert (found, errors.splitlines()[-1]) == (code, f"arkbench serve: {message}")


def test_a_port_that_is_taken(start: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = start(port=taken.getsockname()[1])
        code, errors = server.wait()
    assert code == 2
    assert "choose another --host or --port" in errors
    assert len(errors.splitlines()) == 1


def test_a_small_piece_is_sent_at_once() -> None:
    async def delay_is_off() -> bool:
        found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            sock = writer.get_extra_info("socket")
            found.set_result(bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
            writer.close()

        with _listen("127.0.0.1", 0) as sock:
            async with await asyncio.start_server(accepted, sock=sock):
                with socket.create_connection(sock.getsockname()):
                    return await found

    assert asyncio.run(delay_is_off())


@pytest.mark.parametrize("host", ["a" * 64, "no such host", "\ud800"])
def test_a_host_that_is_none(host: str) -> None:
    with pytest.raises(EngineError, match="cannot listen on"):
        _listen(host, 0)
