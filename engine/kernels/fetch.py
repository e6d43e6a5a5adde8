"""Weights that are put into the L2 cache while a decode step hardly reads memory.

Between the projection and the attention of a decode step with short contexts memory is all but idle: a few programs
wait for each other. So the kernel before the attention has further programs that wait for nothing and ask for the
weights of the next products. Nothing is returned: a weight that is not there in time is read as ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

CHUNK = 2048
"""Bytes that are asked for at once: a tile of 64 x 64 4-bit weights."""

PROGRAMS = 128
"""Programs of one warp that ask, at least."""


@dataclass
class Budget:
    """fetch_bytes: most bytes asked for by one layer; 0 turns it off. resident_bytes: most of these and of the keys and
    values that the attention reads together: more would push each other out (an H200's L2 cache: two of 25 MB)."""

    fetch_bytes: int = 16 << 20
    resident_bytes: int = 24 << 20


BUDGET = Budget()


@dataclass(frozen=True)
class Fetch:
    """Two weights in the order of their products: of `first` everything is asked for, of `second` evenly spread chunks,
    as far as the budget goes (every program of its product then finds the same share of its work)."""

    first: Tensor
    second: Tensor | None = None

    def chunks(self) -> tuple[int, int, int]:
        """(chunks of the first weight, of the second, and how many the second has in all)."""
        left = BUDGET.fetch_bytes // CHUNK
        first = min(left, _nbytes(self.first) // CHUNK)
        whole = 0 if self.second is None else _nbytes(self.second) // CHUNK
        return first, min(left - first, whole), max(whole, 1)

    def most_tokens(self, bytes_per_token: int) -> int:
        """Tokens in the cache, of all requests of the step, up to which it pays."""
        first, second, _ = self.chunks()
        return (BUDGET.resident_bytes - (first + second) * CHUNK) // bytes_per_token


def _nbytes(weight: Tensor) -> int:
    return weight.numel() * weight.element_size()
