"""From bytes and arrival times to an answer: literal values, without network and without a clock."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arkbench.known_answer import chat_piece, event, text_piece, usage_piece
from arkbench.targets._exchange import Exchange, apportion
from arkbench.targets.base import Answer

DONE = event("[DONE]")


def answer_of(*arrivals: tuple[float, bytes], clean: bool = True, status: int = 200) -> Answer:
    exchange = Exchange(Answer(0, scheduled=0.0, sent=0.0))
    exchange.head(status, "text/event-stream" if status == 200 else "application/json")
    for now, data in arrivals:
        exchange.body(data, now)
    return exchange.end(clean)


def chat(text: str, **more: object) -> bytes:
    return event(chat_piece({"content": text, **more}))


def test_a_role_only_piece_is_no_token() -> None:
    role = event(chat_piece({"role": "assistant", "content": ""}))
    empty = event(chat_piece({}))
    null = event(chat_piece({"role": "assistant", "content": None}))
    answer = answer_of((0.005, role + empty + null), (0.2, chat("a")), (0.25, DONE))
    assert (answer.piece_times, answer.piece_counts, answer.status) == ([0.2], [1], "ok")


def test_pieces_of_several_tokens_take_their_number_from_usage() -> None:
    pieces = [(0.04 * (i + 1), event(text_piece(" tok" * 4))) for i in range(8)]
    answer = answer_of(*pieces, (0.33, event(usage_piece(16, 32)) + DONE))
    assert answer.piece_counts == [4] * 8
    assert answer.piece_times == pytest.approx([0.04, 0.08, 0.12, 0.16, 0.20, 0.24, 0.28, 0.32])
    assert (answer.prompt_tokens, answer.output_tokens) == (16, 32)


def test_a_large_first_piece() -> None:
    pieces = [(0.1, event(text_piece(" tok" * 8)))] + [(0.11 + 0.01 * i, event(text_piece(" tok"))) for i in range(24)]
    answer = answer_of(*pieces, (0.4, event(usage_piece(4, 32)) + DONE))
    assert answer.piece_counts == [8] + [1] * 24
    tpot = (answer.piece_times[-1] - answer.piece_times[0]) / (answer.output_tokens - answer.piece_counts[0])
    assert tpot == pytest.approx(0.010)


@pytest.mark.parametrize("channel", ["reasoning_content", "reasoning"])
def test_reasoning_counts_from_its_first_piece(channel: str) -> None:
    thinking = [(0.1 * (i + 1), event(chat_piece({channel: f"t{i}"}))) for i in range(10)]
    answer = answer_of(*thinking, (1.1, chat("answer")), (1.2, event(usage_piece(3, 11)) + DONE))
    assert answer.piece_times[0] == pytest.approx(0.1)
    assert (len(answer.piece_times), answer.output_tokens) == (11, 11)


def test_an_answer_that_is_cut_in_the_middle_of_its_reasoning() -> None:
    end = event(chat_piece({}, finish="length"))
    answer = answer_of((0.1, event(chat_piece({"reasoning_content": "a"}))), (0.2, end + DONE))
    assert (answer.piece_times, answer.status, answer.output_tokens) == ([0.1], "ok", 1)


def test_tool_calls_count() -> None:
    call = {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}
    arguments = {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}
    answer = answer_of((0.1, event(chat_piece(call))), (0.2, event(chat_piece(arguments))), (0.3, DONE))
    assert answer.piece_times == [0.1, 0.2]


def test_an_error_in_the_stream_fails_the_request() -> None:
    tokens = b"".join(chat(c) for c in "abc")
    answer = answer_of((0.1, tokens), (0.2, event({"error": {"message": "out of memory", "code": 500}}) + DONE))
    assert answer.status == "failed"
    assert answer.error == "an error in the stream: out of memory"
    assert answer.output_tokens == 3


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (b'event: error\ndata: {"message": "boom"}\n\n', "boom"),
        (b"event: error\ndata: boom\n\n", "boom"),
        (event({"error": "boom"}), "boom"),
        (event("boom"), "not JSON in the stream: boom"),
        (event([1]), "not JSON in the stream: [1]"),
        (event(text_piece("", finish="abort")), "gave up"),
        (event(text_piece("", finish="error")), "gave up"),
    ],
)
def test_other_failures_in_the_stream(stream: bytes, message: str) -> None:
    answer = answer_of((0.1, chat("a")), (0.2, stream + DONE))
    assert answer.status == "failed"
    assert message in (answer.error or "")


def test_a_null_error_field_is_no_error() -> None:
    piece = {**text_piece("a", finish="stop"), "error": None}
    assert answer_of((0.1, event(piece) + DONE)).status == "ok"


def test_usage_is_the_source_of_the_number_of_tokens() -> None:
    pieces = [(0.1 * (i + 1), event(text_piece("   "))) for i in range(5)]
    answer = answer_of(*pieces, (0.6, event(usage_piece(2, 64, cached=1)) + DONE))
    assert (answer.output_tokens, sum(answer.piece_counts), answer.cached_tokens) == (64, 64, 1)


def test_usage_in_every_piece_gives_exact_counts() -> None:
    def piece(text: str, total: int) -> bytes:
        return event({**text_piece(text), "usage": {"prompt_tokens": 9, "completion_tokens": total}})

    answer = answer_of((0.1, piece("", 0)), (0.2, piece("", 2)), (0.3, piece("abcdefgh", 3)), (0.4, DONE), clean=True)
    assert answer.piece_times == [0.2, 0.3]
    assert (answer.piece_counts, answer.output_tokens) == ([2, 1], 3)


def test_token_ids_give_exact_counts_and_the_tokens() -> None:
    pieces = event(text_piece("")) + event({"choices": [{"index": 0, "text": "ab", "token_ids": [7, 8]}]})
    answer = answer_of((0.2, pieces), (0.3, event(usage_piece(1, 2)) + DONE))
    assert (answer.tokens, answer.piece_counts) == ([7, 8], [2])


def test_logprobs_give_exact_counts() -> None:
    entry = {"token": "a", "logprob": -1.0}
    piece = chat_piece({"content": "aaa"})
    piece["choices"][0]["logprobs"] = {"content": [entry] * 3}
    answer = answer_of((0.1, event(piece)), (0.2, chat("b")), (0.3, DONE))
    assert answer.piece_counts == [3, 1]


def test_usage_zero_in_every_piece_is_not_believed() -> None:
    piece = {**text_piece("a"), "usage": {"prompt_tokens": 1, "completion_tokens": 0}}
    answer = answer_of((0.1, event(piece)), (0.2, event(piece)), (0.3, event(usage_piece(1, 2)) + DONE))
    assert (answer.piece_times, answer.output_tokens, answer.piece_counts) == ([0.1, 0.2], 2, [1, 1])


def test_other_choices_are_not_this_answer() -> None:
    other = event({"choices": [{"index": 1, "text": "x"}]})
    answer = answer_of((0.1, other), (0.2, event(text_piece("a"))), (0.3, DONE))
    assert (answer.piece_times, answer.text) == ([0.2], "a")


def test_text_is_kept_in_order() -> None:
    assert answer_of((0.1, chat("hä")), (0.2, chat("lt")), (0.3, DONE)).text == "hält"


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(429, "refused"), (503, "refused"), (504, "timeout"), (408, "timeout"), (400, "failed"), (500, "failed")],
)
def test_error_statuses(status: int, outcome: str) -> None:
    body = json.dumps({"error": {"message": "too\nmany"}}).encode()
    answer = answer_of((0.1, body[:5]), (0.2, body[5:]), status=status)
    assert (answer.status, answer.error) == (outcome, f"HTTP {status}: too many")
    assert answer.piece_times == []


@pytest.mark.parametrize(
    ("body", "message"), [(b"", "(no message)"), (b"<html>busy</html>", "<html>busy</html>"), (b'{"detail": "x"}', "x")]
)
def test_error_bodies(body: bytes, message: str) -> None:
    assert answer_of((0.1, body), status=500).error == f"HTTP 500: {message}"


def test_a_stream_that_is_cut_fails() -> None:
    assert answer_of((0.1, chat("a")), clean=False).error == "the connection was cut"
    assert answer_of(clean=False).status == "failed"


def test_a_stream_that_ends_without_an_end_fails() -> None:
    answer = answer_of((0.1, chat("a")))
    assert (answer.status, answer.error) == ("failed", "the stream ended before its answer did")


def test_an_end_without_done_is_an_end_when_the_answer_had_a_reason() -> None:
    assert answer_of((0.1, event(text_piece("a", finish="length")))).status == "ok"


def test_an_answer_that_is_no_stream_fails() -> None:
    exchange = Exchange(Answer(0, 0.0, 0.0))
    exchange.head(200, "application/json")
    assert "instead of a stream" in (exchange.end(True).error or "")


@given(st.integers(0, 300), st.lists(st.integers(0, 50), min_size=1, max_size=40))
def test_apportion(total: int, weights: list[int]) -> None:
    counts = apportion(total, weights)
    assert sum(counts) == total
    assert len(counts) == len(weights)
    assert all(count >= 1 for count in counts[: min(total, len(weights))])


def test_apportion_follows_the_weights() -> None:
    assert apportion(32, [32] + [4] * 24) == [8] + [1] * 24
    assert apportion(10, [1, 1, 1]) == [4, 3, 3]
    assert apportion(2, [5, 5, 5]) == [1, 1, 0]
    assert apportion(4, [0, 0]) == [2, 2]


chunks = st.lists(
    st.sampled_from(
        [
            event(text_piece("ab")),
            event(text_piece("")),
            event(chat_piece({"role": "assistant"})),
            event(chat_piece({"reasoning": "x"}), newline="\r\n", space=False),
            event(usage_piece(3, 5)),
            b": ping\n\n",
        ]
    ),
    max_size=12,
)


@given(chunks, st.integers(1, 60))
def test_where_the_transport_splits_changes_nothing_but_times(parts: list[bytes], size: int) -> None:
    stream = b"".join(parts) + DONE
    whole = answer_of((1.0, stream))
    split = answer_of(*((1.0, stream[i : i + size]) for i in range(0, len(stream), size)))
    assert split == whole


@given(st.binary(max_size=200), st.sampled_from([200, 400, 429]))
def test_any_bytes_end_in_a_status(stream: bytes, status: int) -> None:
    answer = answer_of((0.1, stream), status=status)
    assert answer.status in ("ok", "failed", "refused")
    assert (answer.error is None) == (answer.status == "ok")
