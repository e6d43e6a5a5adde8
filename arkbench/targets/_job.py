"""What a client process is asked to do and what it tells: the wire form of a load; bodies of requests."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

PromptForm = Literal["ids", "text", "chat"]

# Words that are one token with a leading space in every common vocabulary.
WORDS = (
    "time", "people", "year", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company",
    "system", "program", "question", "work", "government", "number", "night", "point", "home", "water", "room",
    "mother", "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word",
    "business", "issue", "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game",
    "line", "end", "member", "law", "car", "city",
)  # fmt: skip


@dataclass(frozen=True)
class BodyForm:
    """How this endpoint is asked.

    `text_overhead`: tokens the endpoint adds to a text prompt (begin-of-text, chat template); `tokens_per_word` what a
    word of WORDS costs there. `options`: what is put into every body beside prompt and length.
    """

    model: str
    prompt: PromptForm
    options: dict[str, Any] = field(default_factory=dict)
    text_overhead: float = 0.0
    tokens_per_word: float = 1.0

    @property
    def path(self) -> str:
        return "/chat/completions" if self.prompt == "chat" else "/completions"

    def build(self, prompt: Sequence[int], output_tokens: int) -> bytes:
        body: dict[str, Any] = {"model": self.model, "max_tokens": output_tokens, **self.options}
        if "min_tokens" in body:
            body["min_tokens"] = output_tokens
        if self.prompt == "ids":
            head = json.dumps(body)[:-1]
            ids = str(list(prompt)).replace(" ", "")
            return f'{head}, "prompt": {ids}}}'.encode()
        text = self._text(prompt)
        if self.prompt == "chat":
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        return json.dumps(body).encode()

    def _text(self, prompt: Sequence[int]) -> str:
        """As many words as cost len(prompt) tokens there; an id decides two of them, so that prompts stay distinct."""
        count = max(round((len(prompt) - self.text_overhead) / self.tokens_per_word), 1)
        words: list[str] = []
        for token in prompt:
            if len(words) >= count:
                break
            words.append(WORDS[token % len(WORDS)])
            words.append(WORDS[token // len(WORDS) % len(WORDS)])
        return " " + " ".join((words * (count // max(len(words), 1) + 1))[:count])


@dataclass(frozen=True, slots=True)
class WireRequest:
    """A planned request on its way to a client process; the prompt is an array("i") as bytes."""

    request: int
    prompt: bytes
    output_tokens: int
    offset_s: float
    stream: int

    def ids(self) -> array:
        ids = array("i")
        ids.frombytes(self.prompt)
        return ids


@dataclass(frozen=True)
class Endpoint:
    """Where requests go: `base` without a trailing slash (http://host:port/v1)."""

    scheme: str
    host: str
    port: int
    path: str
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def base(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


@dataclass(frozen=True)
class Job:
    """A load as one client process gets it; times in seconds, see base.Load."""

    endpoint: Endpoint
    form: BodyForm
    requests: tuple[WireRequest, ...]
    mode: str
    duration_s: float | None
    first_token_timeout_s: float
    grace_s: float
    client: Literal["httpx", "raw"]


@dataclass
class JobStats:
    """What a client process saw of itself. `lags_s`: how late its loop was, sampled every LAG_PERIOD_S.

    `send_lags_s`: how late each request left against its due time; `body_sent_s`: when its last byte had been handed
    to the system, against the same (the raw client alone knows it). `cpu_s`, `wall_s`: from release to the end.
    `rss_bytes`: the most memory it held. `most_in_flight`: requests sent and not ended, at most.
    """

    lags_s: array = field(default_factory=lambda: array("d"))
    send_lags_s: array = field(default_factory=lambda: array("d"))
    body_sent_s: array = field(default_factory=lambda: array("d"))
    cpu_s: float = 0.0
    wall_s: float = 0.0
    rss_bytes: int = 0
    most_in_flight: int = 0
    pieces: int = 0
    estimated_counts: int = 0
    cut: int = 0


LAG_PERIOD_S = 0.005


def peak_memory() -> int:
    """The most memory this process has held, in bytes; 0 where the system does not say.

    Not getrusage: its figure includes what the parent held when it started this process.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)
