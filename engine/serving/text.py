"""Text for models without a tokenizer, and stop strings."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any


class WordTokenizer:
    """The fixed mapping of a model without a tokenizer (random weights): token n is the word " n".

    Words that are no such number become one token each, by their CRC-32.
    """

    def __init__(self, vocab: int, eos_token_ids: tuple[int, ...] = ()) -> None:
        self._vocab = vocab
        self.eos_token_ids = eos_token_ids

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [self._word(word) for word in text.split()]

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        return "".join(f" {token}" for token in tokens)

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        return [token for m in messages for token in self.encode(f"{m['role']} {m['content']}")]

    def _word(self, word: str) -> int:
        if word.isascii() and word.isdigit() and len(word) < 10 and int(word) < self._vocab:
            return int(word)
        return zlib.crc32(word.encode()) % self._vocab


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
