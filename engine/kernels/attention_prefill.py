"""Attention of prompt pieces over the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch import Batch, LayerCache


def _pages(cache: Tensor, scale: Tensor | None, pages: Tensor, length: int) -> Tensor:
    """The first `length` keys or values of a request: float32 [kv_heads, length, D]."""
    rows = cache[pages.long()].float()
    if scale is not None:
        rows = rows * scale[pages.long()][..., None]
    return rows.transpose(0, 1).flatten(1, 2)[:, :length]


def _one(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, sinks: Tensor | None) -> Tensor:
    """q [n, heads, D] at the last n positions of k, v [kv_heads, length, D] -> [n, heads, D], float32."""
    n, heads, _ = q.shape
    kv_heads, length, _ = k.shape
    grouped = q.float().transpose(0, 1).reshape(kv_heads, heads // kv_heads, n, -1)
    scores = grouped @ k[:, None].transpose(-1, -2) * scale
    query = torch.arange(length - n, length, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)[None]
    hidden = (key > query) if window is None else (key > query) | (key <= query - window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.float().reshape(kv_heads, heads // kv_heads, 1, 1).expand(-1, -1, n, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :length]
    return (weights @ v[:, None]).reshape(heads, n, -1).transpose(0, 1)


def prefill_attention_reference(
    q: Tensor, cache: LayerCache, batch: Batch, scale: float, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """q [T, heads, D] -> [T, heads, D]: causal attention of every request's rows over its cached tokens."""
    out = torch.zeros_like(q)
    starts, lengths = batch.query_start.tolist(), batch.kv_len.tolist()
    for r, length in enumerate(lengths):
        begin, end = starts[r], starts[r + 1]
        if begin == end or length == 0:
            continue
        pages = batch.page_table[r, : -(-length // cache.page_size)]
        k = _pages(cache.k, cache.k_scale, pages, length)
        v = _pages(cache.v, cache.v_scale, pages, length)
        out[begin:end] = _one(q[begin:end], k, v, scale, window, sinks).to(q.dtype)
    return out


prefill_attention = prefill_attention_reference
