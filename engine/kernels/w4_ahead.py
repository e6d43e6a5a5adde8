"""Many rows: while cuBLAS multiplies with one unpacked matrix, a second stream unpacks the next one of the model.

Unpacking waits for memory and the product for the matrix units. Its blocks run on the multiprocessors that the last
wave of a product leaves idle, and beside the kernels between two products. Both events and the second stream cost the
host launches, so that it takes long products to gain anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.w4 import FUSED_ROWS, w4_dequantize_triton
from engine.quant import QuantWeight

LONG_PRODUCT = 9e10
"""Multiply-adds of a mean product from which the GPU, not the host, sets the pace: 0.3 ms on an H200, a quarter of a
layer, for whose launches the host takes about 1 ms."""


class Ahead:
    """Two workspaces and a stream for the `order` in which a model multiplies by its 4-bit matrices.

    A product out of order is right too, only not ahead. After the last product of the order nothing is pending, so
    that a captured graph ends joined. For one stream of steps, one after the other. `rows`: fewest rows of a step that
    it is meant for.
    """

    def __init__(self, order: Sequence[QuantWeight], dtype: torch.dtype, device: torch.device) -> None:
        self.order = list(order)
        self.dtype = dtype
        self.stream = torch.cuda.Stream(device)
        sizes = [w.n * w.k for w in self.order]
        self.rows = max(FUSED_ROWS + 1, math.ceil(LONG_PRODUCT * len(sizes) / sum(sizes)))
        self._spaces = [torch.empty(max(sizes), dtype=dtype, device=device) for _ in range(2)]
        self._turn = 0
        self._pending: tuple[int, torch.cuda.Event] | None = None

    def product(self, x: Tensor, index: int) -> Tensor:
        """x [T, K] times order[index] [N, K] transposed -> [T, N]."""
        current = torch.cuda.current_stream(x.device)
        pending, self._pending = self._pending, None
        if pending is not None:
            current.wait_event(pending[1])
        if pending is None or pending[0] != index:
            self._unpack(index)
        # From here on the other workspace is free: what read it was launched before.
        free = current.record_event()
        y = x @ self._matrix(index).T
        if index + 1 < len(self.order):
            self.stream.wait_event(free)
            self._turn ^= 1
            with torch.cuda.stream(self.stream):
                self._unpack(index + 1)
                self._pending = index + 1, self.stream.record_event()
        return y

    def _matrix(self, index: int) -> Tensor:
        w = self.order[index]
        return self._spaces[self._turn][: w.n * w.k].view(w.n, w.k)

    def _unpack(self, index: int) -> None:
        w4_dequantize_triton(self.order[index], self.dtype, self._matrix(index))


@dataclass(frozen=True)
class Place:
    """The place of one matrix in an Ahead."""

    ahead: Ahead
    index: int

    def takes(self, x: Tensor) -> bool:
        """Whether x has enough rows, and the workspaces' dtype."""
        return x.shape[0] >= self.ahead.rows and x.dtype == self.ahead.dtype

    def product(self, x: Tensor) -> Tensor:
        return self.ahead.product(x, self.index)
