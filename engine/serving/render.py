"""The JSON of answers: whole ones and the pieces of a stream, for both completion routes."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from engine.serving.output import Output, Piece, TokenLogprob, usage

_FINISH = {"length": "length", "stop": "stop", "cancelled": "abort", "error": "error", "rejected": "error"}
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


class CompletionRender:
    """/v1/completions."""

    def __init__(self, model: str, token_ids: bool) -> None:
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._token_ids = token_ids
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> bytes:
        """What a stream begins with before any token."""
        return b""

    def piece(self, index: int, piece: Piece, running: dict[str, Any] | None) -> bytes:
        """One event; `running`: the usage so far, for clients that want it in every piece."""
        value = {**self._head, "choices": [self._choice(index, piece)]}
        if running is not None:
            value["usage"] = running
        return event(value)

    def usage_event(self, outputs: list[Output]) -> bytes:
        return event({**self._head, "choices": [], "usage": usage(outputs)})

    def whole(self, outputs: list[Output], pieces: list[Piece]) -> bytes:
        choices = [self._choice(index, piece) for index, piece in enumerate(pieces)]
        return json.dumps({**self._head, "choices": choices, "usage": usage(outputs)}, ensure_ascii=False).encode()

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": piece.text,
            "logprobs": None if piece.logprobs is None else self._logprobs(index, piece.logprobs),
            "finish_reason": piece.finish and _FINISH[piece.finish],
        }
        if self._token_ids:
            choice["token_ids"] = piece.tokens
        return choice

    def _logprobs(self, index: int, logprobs: tuple[TokenLogprob, ...]) -> dict[str, Any]:
        offsets = []
        for entry in logprobs:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(entry.text)
        return {
            "tokens": [entry.text for entry in logprobs],
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": [dict(entry.top) for entry in logprobs],
            "text_offset": offsets,
        }


class ChatRender:
    """/v1/chat/completions."""

    def __init__(self, model: str, token_ids: bool) -> None:
        created = int(time.time())
        self._id = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": created, "model": model}
        self._head = {**self._id, "object": "chat.completion.chunk"}
        self._token_ids = token_ids

    def opening(self, index: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return event({**self._head, "choices": [{"index": index, "delta": delta, "finish_reason": None}]})

    def piece(self, index: int, piece: Piece, running: dict[str, Any] | None) -> bytes:
        choice = {"index": index, "delta": {"content": piece.text}, **self._rest(piece)}
        value = {**self._head, "choices": [choice]}
        if running is not None:
            value["usage"] = running
        return event(value)

    def usage_event(self, outputs: list[Output]) -> bytes:
        return event({**self._head, "choices": [], "usage": usage(outputs)})

    def whole(self, outputs: list[Output], pieces: list[Piece]) -> bytes:
        choices = [
            {"index": index, "message": {"role": "assistant", "content": piece.text}, **self._rest(piece)}
            for index, piece in enumerate(pieces)
        ]
        value = {**self._id, "object": "chat.completion", "choices": choices, "usage": usage(outputs)}
        return json.dumps(value, ensure_ascii=False).encode()

    def _rest(self, piece: Piece) -> dict[str, Any]:
        logprobs = None if piece.logprobs is None else {"content": [_chat_logprob(e) for e in piece.logprobs]}
        rest: dict[str, Any] = {"logprobs": logprobs, "finish_reason": piece.finish and _FINISH[piece.finish]}
        if self._token_ids:
            rest["token_ids"] = piece.tokens
        return rest


def _chat_logprob(entry: TokenLogprob) -> dict[str, Any]:
    def named(text: str, value: float) -> dict[str, Any]:
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    top = [named(text, value) for text, value in entry.top]
    return {**named(entry.text, entry.logprob), "top_logprobs": top}
