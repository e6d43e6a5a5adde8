"""Tokenizers, and turning tokens into text piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from engine.config import EngineError

REPLACEMENT = "�"


class Tokenizer(Protocol):
    """What the engine and the server need of a tokenizer; `transformers` tokenizers wrapped by `HfTokenizer`."""

    eos_token_ids: tuple[int, ...]

    def encode(self, text: str, special: bool = True) -> list[int]: ...

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str: ...

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]: ...


class HfTokenizer:
    """A `transformers` tokenizer behind the protocol above."""

    def __init__(self, inner: Any, eos_token_ids: Sequence[int] = ()) -> None:
        self.inner = inner
        own = () if inner.eos_token_id is None else (inner.eos_token_id,)
        self.eos_token_ids = tuple(dict.fromkeys((*eos_token_ids, *own)))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text; `special`: with the tokens that the model puts around one (begin of text)."""
        return self.inner.encode(text, add_special_tokens=special)

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        return self.inner.decode(list(tokens), skip_special_tokens=skip_special)

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        """The prompt of a conversation, the assistant's turn opened. Raises EngineError where there is no template."""
        if self.inner.chat_template is None:
            raise EngineError("this model has no chat template: use the completions endpoint or another model")
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False, **options}
        return list(self.inner.apply_chat_template(list(messages), **options))


def load_tokenizer(folder: Path, eos_token_ids: Sequence[int] = ()) -> HfTokenizer | None:
    """The tokenizer in a model's folder, or None when it has none."""
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    from transformers import AutoTokenizer

    return HfTokenizer(AutoTokenizer.from_pretrained(folder), eos_token_ids)


class IncrementalDecoder:
    """Text of a growing answer, never cutting a character: bytes of an unfinished one wait for the next token.

    Each token is decoded together with the few before it, because a tokenizer may join them (a leading space).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._tokens: list[int] = []
        self._prefix = 0
        self._read = 0

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens add ("" while a character is unfinished)."""
        self._tokens += tokens
        before = self.tokenizer.decode(self._tokens[self._prefix : self._read])
        after = self.tokenizer.decode(self._tokens[self._prefix :])
        if after.endswith(REPLACEMENT) or len(after) <= len(before):
            return ""
        self._prefix, self._read = self._read, len(self._tokens)
        return after[len(before) :]

    def finish(self) -> str:
        """What is still held back when the answer ends, an unfinished character as U+FFFD."""
        before = self.tokenizer.decode(self._tokens[self._prefix : self._read])
        after = self.tokenizer.decode(self._tokens[self._prefix :])
        self._prefix = self._read = len(self._tokens)
        return after[len(before) :]
