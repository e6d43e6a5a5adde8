"""One answer as it grows: engine events in, pieces of text out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from engine.serving.text import StopStrings
from engine.serving.worker import WireEvent
from engine.tokens import IncrementalDecoder, Tokenizer


@dataclass(frozen=True)
class TokenLogprob:
    """A token's text and log probability, and the best alternatives as (text, log probability)."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Piece:
    """What a client gets at once: the text of one token or of several."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish: str | None


class Output:
    """The answer to one prompt. Events wait in `events` until `take` turns all of them into one piece."""

    def __init__(self, tokenizer: Tokenizer, prompt_tokens: int, stops: tuple[str, ...], logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = StopStrings(stops)
        self._logprobs = logprobs
        # A stop string ends the answer at the token that completes it, and log probabilities belong to single tokens.
        self._one_by_one = bool(stops) or logprobs
        self.events: deque[WireEvent] = deque()
        self.prompt_tokens = prompt_tokens
        self.output_tokens = 0
        self.cached_tokens = 0
        self.finish: str | None = None
        self.error: str | None = None

    @property
    def has_news(self) -> bool:
        return bool(self.events) and self.finish is None

    @property
    def stopped_here(self) -> bool:
        """A stop string ended the answer, which the engine does not know of."""
        return self._stops.stopped

    def take(self) -> Piece | None:
        """One piece of all that has come; None when nothing is to be sent yet."""
        text = ""
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        while self.events and self.finish is None:
            event = self.events.popleft()
            self.cached_tokens = self.cached_tokens or event.cached_tokens
            text += self._read(event, tokens, logprobs)
        self.output_tokens += len(tokens)
        if not text and not tokens and self.finish is None:
            return None
        return Piece(text, tuple(tokens), tuple(logprobs) if self._logprobs else None, self.finish)

    def _read(self, event: WireEvent, tokens: list[int], logprobs: list[TokenLogprob]) -> str:
        text = ""
        for index, group in enumerate((token,) for token in event.tokens) if self._one_by_one else ((0, event.tokens),):
            text += self._stops.add(self._decoder.push(group))
            tokens += group
            if self._logprobs and event.logprobs is not None:
                logprobs.append(self._logprob(group[0], *event.logprobs[index]))
            if self._stops.stopped:
                self.finish = "stop"
                return text
        if event.finished:
            text += self._stops.add(self._decoder.finish()) + self._stops.rest()
            self.finish, self.error = event.finished, event.error
        return text

    def _logprob(self, token: int, logprob: float, top: dict[int, float]) -> TokenLogprob:
        name = self._tokenizer.decode
        best = sorted(top.items(), key=lambda item: -item[1])
        return TokenLogprob(name([token]), logprob, tuple((name([t]), value) for t, value in best))


def usage(outputs: list[Output]) -> dict[str, Any]:
    """The usage object of a whole request."""
    prompt = sum(o.prompt_tokens for o in outputs)
    answer = sum(o.output_tokens for o in outputs)
    cached = sum(o.cached_tokens for o in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
