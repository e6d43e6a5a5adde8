"""A linear layer over 4-bit or dense weights; the `kernels` switch chooses the product."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import w4, w4_cpu
from engine.kernels.w4_ahead import Ahead, Place
from engine.quant import QuantWeight

Kernels = Literal["standard", "fused"]
Stored = QuantWeight | w4_cpu.CpuWeight | Tensor


class Linear:
    """y = x Wᵀ + bias, W [n, k] in the canonical 4-bit form, in a 4-bit form of the CPU, or dense.

    On a GPU one stored form serves both kernels and `kernels` may be set at any time. On a CPU each has its own form
    of the same size, made when the layer is built. `place`: where the weight stands among those that fused prompts of
    many rows unpack one ahead (see unpack_ahead). `hands_over_one_row`: see `partials`.
    """

    place: Place | None = None
    hands_over_one_row = False

    def __init__(self, weight: QuantWeight | Tensor, bias: Tensor | None, kernels: Kernels) -> None:
        self.out_features, self.in_features = (
            (weight.n, weight.k) if isinstance(weight, QuantWeight) else (weight.shape[0], weight.shape[1])
        )
        on_cpu = isinstance(weight, QuantWeight) and weight.packed.device.type == "cpu"
        self.weight: Stored = w4_cpu.store(weight, kernels) if on_cpu else weight
        self.bias = bias
        self.kernels = kernels

    @property
    def quantized(self) -> bool:
        return not isinstance(self.weight, Tensor)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored weight: what one product must read."""
        if isinstance(self.weight, Tensor):
            return self.weight.numel() * self.weight.element_size()
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, k] -> [T, n] in the dtype of x."""
        y = self._product(x)
        return y if self.bias is None else y + self.bias

    def partials(self, x: Tensor) -> Tensor:
        """x [T, k] -> Partials (float32 [S, T, n]) where the kernel leaves partial sums, else [T, n].

        A layer with a bias returns whole sums: the next kernel would add the bias to none of its parts. For a single
        row so does every layer but those that hand over to a kernel with many programs a row (on an H200, Qwen3-8B:
        466 tokens a second where none hands over, 476 where q/k/v and gate/up do, 470 where all do: a norm has one
        program a row).
        """
        parts = self.bias is None and self.kernels == "fused" and (x.shape[0] > 1 or self.hands_over_one_row)
        if parts and isinstance(self.weight, QuantWeight) and not self._is_ahead(x):
            return w4.w4_partials(x, self.weight)
        return self(x)

    def _product(self, x: Tensor) -> Tensor:
        weight = self.weight
        if isinstance(weight, Tensor):
            return F.linear(x.to(weight.dtype), weight).to(x.dtype)
        if self._is_ahead(x):
            return self.place.product(x)
        if isinstance(weight, QuantWeight):
            return w4.w4_matmul(x, weight) if self.kernels == "fused" else w4.w4_standard(x, weight)
        return w4_cpu.matmul(x, weight)

    def _is_ahead(self, x: Tensor) -> bool:
        return self.kernels == "fused" and self.place is not None and self.place.takes(x)


def unpack_ahead(layers: Iterable[Any], dtype: torch.dtype, device: torch.device) -> None:
    """Gives the 4-bit linear layers among `layers`, which are in the order of their products, their places.

    All of them must be given the same rows of a step, on a GPU.
    """
    linears = [layer for layer in layers if isinstance(layer, Linear) and isinstance(layer.weight, QuantWeight)]
    if not linears:
        return
    ahead = Ahead([linear.weight for linear in linears], dtype, device)
    for index, linear in enumerate(linears):
        linear.place = Place(ahead, index)
