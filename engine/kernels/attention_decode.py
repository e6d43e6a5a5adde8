"""Attention of one new token of every request over the paged cache."""

from __future__ import annotations

from torch import Tensor

from engine.batch import Batch, LayerCache
from engine.kernels.attention_prefill import prefill_attention_reference


def decode_attention_reference(
    q: Tensor, cache: LayerCache, batch: Batch, scale: float, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """q [R, heads, D] -> [R, heads, D]; rows with kv_len 0 give zeros."""
    return prefill_attention_reference(q, cache, batch, scale, window, sinks)


decode_attention = decode_attention_reference
