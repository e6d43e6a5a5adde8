"""/v1/completions and /v1/chat/completions: answers, streams, usage, limits, by literal values."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from engine.serving.requests import Limits, parse_completion
from engine.serving.text import WordTokenizer


def events(response: httpx.Response) -> list[dict[str, Any]]:
    *blocks, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def choices(response: httpx.Response) -> list[dict[str, Any]]:
    return [choice for piece in events(response) for choice in piece["choices"]]


def test_token_ids(words: Any) -> None:
    answer = words.complete([1, 2, 3]).json()
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": " 4 5 6 7", "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_text_and_lists(words: Any) -> None:
    assert words.complete("10 20").json()["choices"][0]["text"] == " 21 22 23 24"
    both = words.complete([[1], [5, 6]], max_tokens=2).json()
    assert [c["text"] for c in both["choices"]] == [" 2 3", " 7 8"]
    assert [c["index"] for c in both["choices"]] == [0, 1]
    assert (both["usage"]["prompt_tokens"], both["usage"]["completion_tokens"]) == (3, 4)
    assert [c["text"] for c in words.complete(["3", "4"], max_tokens=1).json()["choices"]] == [" 4", " 5"]


def test_default_length_is_sixteen(words: Any) -> None:
    response = words.http.post("/v1/completions", json={"prompt": [1], "temperature": 0})
    assert response.json()["usage"]["completion_tokens"] == 16


def test_stream(words: Any) -> None:
    response = words.complete([1, 2, 3], stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    pieces = choices(response)
    assert "".join(p["text"] for p in pieces) == " 4 5 6 7"
    assert [p["finish_reason"] for p in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert all("usage" not in e for e in events(response))


def test_stream_with_usage(words: Any) -> None:
    *pieces, last = events(words.complete([7, 2, 3], stream=True, stream_options={"include_usage": True}))
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert all("usage" not in p for p in pieces)


def test_running_usage_and_token_ids(words: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    pieces = events(words.complete([1], stream=True, stream_options=options, return_token_ids=True))
    seen: list[int] = []
    for piece in pieces[:-1]:
        seen += piece["choices"][0]["token_ids"]
        assert piece["usage"]["completion_tokens"] == len(seen)
    assert seen == [2, 3, 4, 5]


def test_a_list_of_prompts_streams_with_indices(words: Any) -> None:
    texts = ["", ""]
    for choice in choices(words.complete([[1], [5]], stream=True)):
        texts[choice["index"]] += choice["text"]
    assert texts == [" 2 3 4 5", " 6 7 8 9"]


def test_end_of_text(words: Any) -> None:
    stopped = words.complete([995], max_tokens=10).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] == 4
    ignored = words.complete([995], max_tokens=10, ignore_eos=True).json()
    assert (ignored["choices"][0]["finish_reason"], ignored["usage"]["completion_tokens"]) == ("length", 10)
    later = words.complete([995], max_tokens=10, min_tokens=6).json()
    assert later["usage"]["completion_tokens"] == 10


def test_stop_token_ids(words: Any) -> None:
    answer = words.complete([1], max_tokens=10, stop_token_ids=[4]).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [("d", "bc", 3), (["zz", "de"], "bc", 4), ("cde", "b", 4), ("h", "bcdefg", 7), ("xyz", "bcdefghi", 8)],
)
def test_stop_strings(bytes_: Any, stream: bool, stop: Any, text: str, tokens: int) -> None:
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = bytes_.complete("a", max_tokens=8, stop=stop, **more)
    if stream:
        *pieces, last = events(response)
        said = "".join(p["choices"][0]["text"] for p in pieces)
        finish, usage = pieces[-1]["choices"][0]["finish_reason"], last["usage"]
    else:
        said = response.json()["choices"][0]["text"]
        finish, usage = response.json()["choices"][0]["finish_reason"], response.json()["usage"]
    assert (said, finish) == (text, "length" if stop == "xyz" else "stop")
    assert usage["completion_tokens"] == tokens


def test_characters_of_several_tokens_come_whole(bytes_: Any) -> None:
    # Bytes C3 84, C3 85 ... cannot come of counting: 0xC3 is followed by 0xC4, no continuation byte.
    response = bytes_.complete([0xC2], max_tokens=2, stream=True)
    assert "".join(c["text"] for c in choices(response)) == "\ufffd\ufffd"


def test_seed(words: Any) -> None:
    one, same, other = (
        words.complete([1], temperature=1, seed=seed).json()["choices"][0]["text"] for seed in (10, 10, 20)
    )
    assert one == same == " 12 13 14 15"
    assert other == " 22 23 24 25"


def test_logprobs(words: Any) -> None:
    found = words.complete([1], max_tokens=2, logprobs=2).json()["choices"][0]["logprobs"]
    assert found == {
        "tokens": [" 2", " 3"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{" 2": -0.5, " 3": -1.5}, {" 3": -0.5, " 4": -1.5}],
        "text_offset": [0, 2],
    }


def test_chat(words: Any) -> None:
    answer = words.chat("5", max_tokens=2).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": " 6 7"}
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 2


def test_chat_fills_the_context_by_default(words: Any) -> None:
    assert words.chat("5", ignore_eos=True).json()["usage"]["completion_tokens"] == 198


def test_chat_stream_begins_with_the_role(words: Any) -> None:
    pieces = choices(words.chat("5", max_completion_tokens=2, stream=True))
    assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(p["delta"]["content"] for p in pieces) == " 6 7"


def test_chat_parts_and_logprobs(words: Any) -> None:
    content = [{"type": "text", "text": "1 "}, {"type": "text", "text": "5"}]
    answer = words.chat(content, max_tokens=1, logprobs=True, top_logprobs=2).json()
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == (" 6", -0.5, [32, 54])
    assert [top["token"] for top in entry["top_logprobs"]] == [" 6", " 7"]


@pytest.mark.parametrize(
    ("change", "words_"),
    [
        ({"prompt": None}, "prompt: give a text"),
        ({"prompt": []}, "prompt: it is empty"),
        ({"prompt": ""}, "prompt: it is empty"),
        ({"prompt": [[1], []]}, "prompt: it is empty"),
        ({"prompt": [1, "a"]}, "prompt: give a text"),
        ({"prompt": [1, True]}, "prompt: give a text"),
        ({"prompt": [1000]}, "between 0 and 999"),
        ({"prompt": [-1]}, "between 0 and 999"),
        ({"prompt": [1] * 200}, "200 tokens leave no room"),
        ({"prompt": [1] * 199}, "199 prompt tokens and max_tokens 4 exceed the limit of 200"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 5}, "min_tokens: 5 is more than max_tokens 4"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 2}, "n (more than one answer a prompt) is not supported"),
        ({"best_of": 2}, "best_of is not supported"),
        ({"echo": True}, "echo is not supported"),
        ({"logit_bias": {"1": 2.0}}, "logit_bias is not supported"),
        ({"stop": [""]}, "stop: "),
        ({"stop": ["a"] * 17}, "stop: "),
        ({"stop_token_ids": [-1]}, "stop_token_ids: token ids must lie between 0 and 999"),
        ({"stop_token_ids": [10**30]}, "stop_token_ids: token ids must lie between 0 and 999"),
        ({"prompt": [[1]] * 65}, "65 prompts in one request, the limit is 64"),
    ],
)
def test_mistakes_in_a_request(words: Any, change: dict[str, Any], words_: str) -> None:
    response = words.complete(change.pop("prompt", [1]), **change)
    assert response.status_code == 400
    assert words_ in response.json()["error"]["message"]


def test_null_is_as_good_as_left_out(words: Any) -> None:
    names = [
        "stream",
        "temperature",
        "top_p",
        "n",
        "stop",
        "seed",
        "logprobs",
        "echo",
        "best_of",
        "suffix",
        "min_tokens",
    ]
    response = words.complete([1], max_tokens=None, stream_options={"include_usage": None}, **dict.fromkeys(names))
    assert (response.status_code, response.json()["usage"]["completion_tokens"]) == (200, 16)
    assert words.chat("a", max_tokens=1, tools=None, top_logprobs=None, stream_options=None).status_code == 200


def test_no_top_k_is_too_large_for_the_engine() -> None:
    raw = json.dumps({"prompt": [1], "top_k": 10**30}).encode()
    assert parse_completion(raw, "words", WordTokenizer(1000), Limits(1000, 200, 64)).sampling.top_k == 1000


@pytest.mark.parametrize("name", ["prompt", "model", "stop"])
def test_half_a_surrogate_pair_is_no_text(words: Any, name: str) -> None:
    response = words.http.post("/v1/completions", content=json.dumps({"prompt": "a", name: "\ud800"}))
    assert response.status_code == 400
    assert "half of a surrogate pair" in response.json()["error"]["message"]


def test_what_is_no_json(words: Any) -> None:
    assert words.http.post("/v1/completions", content=b"{").status_code == 400
    assert words.http.post("/v1/completions", content=b"[1]").status_code == 400
    assert words.http.post("/v1/chat/completions", json={"messages": []}).status_code == 400
    assert words.http.post("/v1/chat/completions", json={"messages": [{"role": "user"}]}).status_code == 400


def test_routes(words: Any) -> None:
    assert words.http.get("/v1/nothing").status_code == 404
    assert words.http.get("/v1/completions").status_code == 405
    assert words.http.get("/health").json() == {"status": "ok"}
    (card,) = words.http.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"], card["meta"]["n_vocab"]) == ("words", 200, 1000)
    assert words.http.get("/v1/models/words").json()["id"] == "words"
    assert words.http.get("/v1/models/other").status_code == 404
    assert words.complete([1], model="other").status_code == 404
    assert words.complete([1], model="words").status_code == 200


def test_the_official_client(words: Any) -> None:
    client = openai.OpenAI(base_url=words.url, api_key="none", max_retries=0)
    assert [m.id for m in client.models.list()] == ["words"]
    completion = client.completions.create(model="words", prompt=[1, 2], max_tokens=3, temperature=0)
    assert completion.choices[0].text == " 3 4 5"
    stream = client.chat.completions.create(
        model="words",
        messages=[{"role": "user", "content": "5"}],
        max_tokens=3,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == " 6 7 8"
    assert chunks[-1].usage.completion_tokens == 3
    with pytest.raises(openai.BadRequestError, match="n \\(more than one"):
        client.completions.create(model="words", prompt="1", n=2)
    client.close()


def test_metrics(words: Any) -> None:
    before = words.metric("arkbench_output_tokens_total"), words.metric("arkbench_ttft_seconds_count")
    words.complete([7, 1], max_tokens=5)
    assert words.metric("arkbench_output_tokens_total") - before[0] == 5
    assert words.metric("arkbench_ttft_seconds_count") - before[1] == 1
    assert words.metric("arkbench_requests_running") == 0
    assert words.metric("arkbench_cache_tokens") == 5000
