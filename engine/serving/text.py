"""From tokens to text: the tokenizer's interface, a fixed mapping for models without one, and stop strings."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Protocol

_REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """What the server needs of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def apply_chat_template(self, messages: list[dict[str, Any]]) -> list[int]: ...


class WordTokenizer:
    """The fixed mapping of a model without a tokenizer (random weights): token n is the word " n".

    Words that are no such number become one token each, by their CRC-32.
    """

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab

    def encode(self, text: str) -> list[int]:
        return [self._word(word) for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(f" {token}" for token in tokens)

    def apply_chat_template(self, messages: list[dict[str, Any]]) -> list[int]:
        return [token for m in messages for token in self.encode(f"{m['role']} {m['content']}")]

    def _word(self, word: str) -> int:
        if word.isascii() and word.isdigit() and len(word) < 10 and int(word) < self._vocab:
            return int(word)
        return zlib.crc32(word.encode()) % self._vocab


class TextStream:
    """The text of a growing list of tokens, without half characters and without re-reading what has been given out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = 0
        self._read = 0

    def add(self, tokens: Sequence[int]) -> str:
        """The text these tokens add; a character that is not complete yet is kept back."""
        self._tokens += tokens
        text = self._ahead()
        if text.endswith(_REPLACEMENT):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return text

    def rest(self) -> str:
        """What was kept back, at the end of the tokens."""
        text = self._ahead()
        self._start = self._read = len(self._tokens)
        return text

    def _ahead(self) -> str:
        # Decoding starts a few tokens early: whether a word begins with a space depends on what stands before it.
        known = self._tokenizer.decode(self._tokens[self._start : self._read])
        return self._tokenizer.decode(self._tokens[self._start :])[len(known) :]


class StopStrings:
    """Cuts a stream of text before the first of the stop strings; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """The text that can be given out now."""
        if not self._stops or self.stopped:
            return "" if self.stopped else text
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
