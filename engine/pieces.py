"""How long the pieces of a prompt are that flow through several stages. Pure functions; no torch.

A pipeline has no gaps when its pieces take equal time. Reading the first l tokens of a prompt takes about
f(l) = a l^2 + b l + c: products are linear in the tokens, attention is quadratic. With r = a / b, x tokens after L take
as long as b (x + r (2 L x + x^2)), c apart, so the times of pieces compare without a clock. P stages work off C pieces
in (P + C - 1) times: enough pieces keep the idle ends small, and pieces that are too short waste the stages' speed.
"""

from __future__ import annotations

import math

PIECES_PER_STAGE = 8
FLOOR = 1024
"""Tokens below which a piece is not worth its fixed cost."""

ALIGN = 64
SMOOTHING = 0.65
"""How far a piece follows the formula from the first piece's length towards equal time: r is an estimate."""


class PieceSizer:
    """The lengths of pieces over `stages`; `most` tokens at most; `ratio`: r."""

    def __init__(self, stages: int, most: int, ratio: float) -> None:
        self.stages, self.most, self.ratio = stages, most, ratio
        self._first = 0

    def budget(self, waiting: int) -> float:
        """The time of the next piece, in tokens without context, where `waiting` prompt tokens are to be read.

        It follows the largest number that has been waiting since `waiting` was last 0: pieces of a burst are equal.
        """
        wanted = math.ceil(waiting / (PIECES_PER_STAGE * self.stages) / ALIGN) * ALIGN
        self._first = max(self._first, min(max(wanted, FLOOR), self.most)) if waiting else 0
        return self.time(0, self._first)

    def time(self, context: int, count: int) -> float:
        """The time of `count` tokens after `context`, in tokens without context."""
        return count + self.ratio * (2 * context * count + count * count)

    def count(self, budget: float, context: int) -> int:
        """How many tokens after `context` the budget has room for: a multiple of 64 where it is 64 or more."""
        linear = 1 + 2 * self.ratio * context
        alone = budget if self.ratio == 0 else self._solve(linear, budget)
        level = self._solve(1.0, budget) if self.ratio else budget
        smoothed = level + SMOOTHING * (alone - level)
        tokens = max(int(smoothed + 1e-6), int(level) // 4, 1)
        return tokens // ALIGN * ALIGN if tokens >= ALIGN else tokens

    def _solve(self, linear: float, budget: float) -> float:
        """x with ratio x^2 + linear x = budget."""
        return 2 * budget / (linear + math.sqrt(linear * linear + 4 * self.ratio * budget))
