"""One request and what came back: from body bytes and arrival times to an Answer; no I/O, no clock."""

from __future__ import annotations

import json
from typing import Any

from arkbench.targets._sse import SseError, SseParser
from arkbench.targets.base import Answer

_MAX_ERROR_BODY = 64 << 10
_REFUSED = (429, 503)
_TIMED_OUT = (408, 504)


class Exchange:
    """Collects the answer to one request. Every method takes the monotonic time at which its bytes arrived."""

    __slots__ = (
        "_counted", "_done", "_error_body", "_exact", "_finish", "_sse", "_status", "_texts", "_weights", "answer",
        "estimated",
    )  # fmt: skip

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.estimated = False
        self._status = 0
        self._sse = SseParser()
        self._error_body = b""
        self._texts: list[str] = []
        self._weights: list[int] = []
        self._exact = True
        self._counted = 0
        self._finish: str | None = None
        self._done = False

    @property
    def has_first_token(self) -> bool:
        return bool(self.answer.piece_times)

    @property
    def failed(self) -> bool:
        """The answer has already gone wrong: the rest of the stream is of no interest."""
        return self.answer.status != "ok"

    def head(self, status: int, content_type: str) -> None:
        self._status = status
        if status == 200 and "text/event-stream" not in content_type.lower():
            self.fail(f"the endpoint answered {content_type or 'without a content type'} instead of a stream of events")

    def body(self, data: bytes, now: float) -> None:
        """Bytes of the body that arrived at `now`."""
        if self._status != 200:
            self._error_body = (self._error_body + data)[:_MAX_ERROR_BODY]
            return
        try:
            for kind, payload in self._sse.feed(data):
                if not self._done and not self.failed:
                    self._event(kind, payload, now)
        except SseError as error:
            self.fail(str(error))

    def end(self, clean: bool, why: str = "the connection was cut") -> Answer:
        """The response has ended, cleanly or not; the finished answer."""
        answer = self.answer
        if answer.status == "ok" and self._status != 200:
            self._end_with_status(clean, why)
        elif answer.status == "ok" and not self._done and not (clean and self._finish):
            self.fail(why if not clean else "the stream ended before its answer did")
        self._settle_counts()
        if self._texts:
            answer.text = "".join(self._texts)
        return answer

    def fail(self, error: str, status: Any = "failed") -> None:
        """Marks the answer; the first reason stays."""
        if self.answer.status == "ok":
            self.answer.status = status
            self.answer.error = error

    def _end_with_status(self, clean: bool, why: str) -> None:
        if not self._status:
            self.fail(why)
            return
        status = "refused" if self._status in _REFUSED else "timeout" if self._status in _TIMED_OUT else "failed"
        self.fail(f"HTTP {self._status}: {_error_text(self._error_body)}", status)

    def _event(self, kind: str, payload: bytes, now: float) -> None:
        if payload == b"[DONE]" or payload.strip() == b"[DONE]":
            self._done = True
            return
        try:
            event = json.loads(payload)
        except ValueError:
            event = None
        if kind == "error" or not isinstance(event, dict) or event.get("error"):
            what = "an error in the stream" if isinstance(event, dict) or kind == "error" else "not JSON in the stream"
            self.fail(f"{what}: {_error_text(payload)}")
            return
        usage = event.get("usage")
        if usage:
            self._usage(usage)
        for choice in event.get("choices") or ():
            if choice.get("index", 0) == 0:
                self._choice(choice, usage, now)

    def _usage(self, usage: dict) -> None:
        answer = self.answer
        if usage.get("prompt_tokens") is not None:
            answer.prompt_tokens = usage["prompt_tokens"]
        if usage.get("completion_tokens") is not None:
            answer.output_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details")
        if details and details.get("cached_tokens") is not None:
            answer.cached_tokens = details["cached_tokens"]

    def _choice(self, choice: dict, usage: dict | None, now: float) -> None:
        text = choice.get("text") or ""
        delta = choice.get("delta")
        if delta:
            text += _delta_text(delta)
        if choice.get("finish_reason"):
            self._finish = str(choice["finish_reason"])
        ids = choice.get("token_ids")
        if ids:
            if self.answer.tokens is None:
                self.answer.tokens = []
            self.answer.tokens += ids
        count = self._exact_count(choice, usage)
        if text or count:
            self._piece(text, count, now)
        if self._finish in ("error", "abort"):
            self.fail(f"the endpoint gave up on the request (finish_reason '{self._finish}')")

    def _exact_count(self, choice: dict, usage: dict | None) -> int | None:
        """How many tokens a piece holds, where the endpoint says so: ids, running usage or log probabilities."""
        ids = choice.get("token_ids")
        if ids is not None:
            return len(ids)
        if usage and usage.get("completion_tokens") is not None:
            return max(usage["completion_tokens"] - self._counted, 0)
        logprobs = choice.get("logprobs")
        if logprobs:
            tokens = logprobs.get("content") or logprobs.get("tokens")
            return len(tokens) if tokens else None
        return None

    def _piece(self, text: str, count: int | None, now: float) -> None:
        answer = self.answer
        if not count:
            self._exact = False
            count = 1
        self._counted += count
        answer.piece_times.append(now)
        answer.piece_counts.append(count)
        self._weights.append(len(text))
        self._texts.append(text)

    def _settle_counts(self) -> None:
        """Usage is the source of the number of tokens; pieces of unknown size share it by the length of their text."""
        answer = self.answer
        counted = sum(answer.piece_counts)
        if not answer.output_tokens:
            answer.output_tokens = counted
        elif not self._exact and counted != answer.output_tokens:
            answer.piece_counts = apportion(answer.output_tokens, self._weights)
            self.estimated = True


def apportion(total: int, weights: list[int]) -> list[int]:
    """`total` whole tokens over pieces in proportion to their weights, at least one each while there are enough.

    Largest remainders; the sum is exactly `total`. With fewer tokens than pieces the first pieces get one each.
    """
    pieces = len(weights)
    if total <= pieces:
        return [1] * total + [0] * (pieces - total)
    whole = sum(weights)
    shares = [total * w / whole if whole else total / pieces for w in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(pieces), key=lambda i: (counts[i] - shares[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    for i in (i for i in range(pieces) if counts[i] == 0):
        counts[max(range(pieces), key=counts.__getitem__)] -= 1
        counts[i] = 1
    return counts


def _delta_text(delta: dict) -> str:
    """What a chat delta generates, on any channel: text, reasoning, refusals, tool calls."""
    text = delta.get("content") or ""
    text += delta.get("reasoning_content") or delta.get("reasoning") or ""
    text += delta.get("refusal") or ""
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        text += (function.get("name") or "") + (function.get("arguments") or "")
    return text


def _error_text(body: bytes) -> str:
    """The message of an error body, in one short line."""
    text = body.decode("utf-8", "replace")
    try:
        value = json.loads(text)
        for key in ("error", "detail", "message"):
            if isinstance(value, dict) and value.get(key):
                value = value[key]
        text = value if isinstance(value, str) else json.dumps(value)
    except ValueError:
        pass
    return " ".join(text.split())[:300] or "(no message)"
