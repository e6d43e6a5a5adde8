"""Prompts of an exact length that share nothing, not even their first token.

Every prompt of a run has a number. The number, spread over the vocabulary, is what a prompt begins with: prompts with
different numbers differ at their first token as long as the vocabulary has enough of them (at the second or third
where it has not), so that no prompt can be answered from the cache of another. What follows is drawn from
(seed, number). The same cell and repetition has the same numbers in every variant: only so do the hashes of their
answers compare. A prompt is therefore never sent twice to one started target, except where the prompt cache is off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

MOST_PROMPTS = 2**24


def usable_tokens(vocab: int) -> tuple[int, int]:
    """First id and number of the ids that prompts are drawn from.

    The lowest ids of real vocabularies are control tokens, and rows at the end are padding of the matrix: where there
    is room for it, both are left out.
    """
    if vocab < 4096:
        return 0, vocab
    return 1000, vocab - 1000 - vocab // 20


def prompt(number: int, length: int, vocab: int, seed: int = 0) -> list[int]:
    """Prompt `number` of a run: `length` token ids below `vocab`. Raises ValueError where no such prompt exists."""
    if length < 1 or number < 0:
        raise ValueError(f"a prompt needs a length of at least 1 and a number of at least 0, not {length} and {number}")
    first, count = usable_tokens(vocab)
    width = min(length, math.ceil(math.log(MOST_PROMPTS) / math.log(count)))
    if number >= count**width:
        raise ValueError(f"{number + 1} prompts of {length} token(s) cannot differ in a vocabulary of {vocab}")
    digits = _digits(number, width, count, seed)
    generator = np.random.Generator(np.random.PCG64([seed, number]))
    rest = generator.integers(0, count, size=length - width)
    return [first + digit for digit in digits] + (rest + first).tolist()


def _digits(number: int, width: int, base: int, seed: int) -> list[int]:
    """The lowest `width` digits of `number`, lowest first, each moved by a permutation that depends on the seed."""
    step = _coprime_step(base)
    digits = []
    for _ in range(width):
        number, digit = divmod(number, base)
        digits.append((digit * step + seed) % base)
    return digits


def _coprime_step(base: int) -> int:
    """A step near the golden section of `base` that shares no factor with it, so that multiples visit every value."""
    step = max(1, round(base * 0.618))
    while math.gcd(step, base) != 1:
        step += 1
    return step


def shared_beginning(length: int, vocab: int, seed: int, group: int) -> list[int]:
    """The common beginning of the prompts of one group (a system prompt), `length` token ids; it may be empty."""
    first, count = usable_tokens(vocab)
    generator = np.random.Generator(np.random.PCG64([seed, group, 1]))
    return (generator.integers(0, count, size=length) + first).tolist()


def mixed_lengths(mix: Sequence[tuple[int, float]], count: int) -> list[int]:
    """`count` lengths in the shares of `mix` [(tokens, share)], spread evenly and always the same.

    Each next length is the one that lags most behind its share.
    """
    total = sum(share for _, share in mix)
    given = [0] * len(mix)
    lengths = []
    for n in range(1, count + 1):
        lag = [share / total * n - have for (_, share), have in zip(mix, given, strict=True)]
        chosen = lag.index(max(lag))
        given[chosen] += 1
        lengths.append(mix[chosen][0])
    return lengths
