"""The 4-bit product over the canonical form."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.quant import QuantWeight, dequantize


def w4_dequantize_reference(w: QuantWeight, dtype: torch.dtype) -> Tensor:
    """[n, k] in dtype."""
    return dequantize(w, dtype)


def w4_matmul_reference(x: Tensor, w: QuantWeight) -> Tensor:
    """x [T, k] -> [T, n] in the dtype of x."""
    return F.linear(x, dequantize(w, x.dtype))


w4_dequantize = w4_dequantize_reference
w4_matmul = w4_partials = w4_standard = w4_matmul_reference
