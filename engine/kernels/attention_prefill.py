"""Causal attention of prompt pieces over the paged cache, in the FlashAttention-2 form (arXiv 2307.08691)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.batch import Batch, LayerCache
from engine.kernels._launch import capability, launch, power_of_2
from engine.kernels.attention_library import library_backend, prefill_attention_library

LOG2_E = 1.4426950408889634


def cached_rows(cache: Tensor, scale: Tensor | None, pages: Tensor, length: int) -> Tensor:
    """The first `length` rows of `pages` of cache [pages, kv_heads, page_size, D]: float32 [kv_heads, length, D]."""
    rows = cache[pages.long()].float()
    if scale is not None:
        rows = rows * scale[pages.long()][..., None]
    return rows.transpose(0, 1).flatten(1, 2)[:, :length]


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, sinks: Tensor | None) -> Tensor:
    """q [n, heads, D] at the last n positions of k, v [kv_heads, length, D] -> float32 [n, heads, D]."""
    n, heads, _ = q.shape
    kv_heads, length, _ = k.shape
    group = heads // kv_heads
    grouped = q.float().transpose(0, 1).reshape(kv_heads, group, n, -1)
    scores = grouped @ k[:, None].transpose(-1, -2) * scale
    query = torch.arange(length - n, length, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)[None]
    hidden = key > query
    if window is not None:
        hidden = hidden | (key <= query - window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.float().reshape(kv_heads, group, 1, 1).expand(-1, -1, n, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :length]
    return (weights @ v[:, None]).reshape(heads, n, -1).transpose(0, 1)


def prefill_attention_reference(
    q: Tensor, cache: LayerCache, batch: Batch, scale: float, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """q [T, heads, D] -> [T, heads, D]: every row attends to its request's cached tokens up to its own position.

    The rows of a request are the last ones of its kv_len tokens. `window`: a row sees that many tokens, itself
    included. `sinks` [heads]: a score that joins the softmax and has no value. Rows of no request, and requests with
    kv_len 0, give zeros.
    """
    out = torch.zeros_like(q)
    starts, lengths = batch.query_start.tolist(), batch.kv_len.tolist()
    for r, length in enumerate(lengths):
        begin, end = starts[r], starts[r + 1]
        if begin == end or length == 0:
            continue
        pages = batch.page_table[r, : -(-length // cache.page_size)]
        k = cached_rows(cache.k, cache.k_scale, pages, length)
        v = cached_rows(cache.v, cache.v_scale, pages, length)
        out[begin:end] = _attend(q[begin:end], k, v, scale, window, sinks).to(q.dtype)
    return out


def prefill_attention(
    q: Tensor,
    cache: LayerCache,
    batch: Batch,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    contiguous: bool = False,
) -> Tensor:
    """See prefill_attention_reference. `contiguous`: the pages of every request follow each other in the cache."""
    if not q.is_cuda:
        return prefill_attention_reference(q, cache, batch, scale, window, sinks)
    backend = library_backend(q, cache, batch, window, sinks)
    if backend is not None:
        return prefill_attention_library(q, cache, batch, scale, backend)
    return prefill_attention_triton(q, cache, batch, scale, window, sinks, contiguous)


def compute_dtype(q: Tensor, cache: LayerCache) -> torch.dtype:
    """The dtype of the two matrix products: that of a 16- or 32-bit cache; float16 for 8 bits.

    sm_90 turns e4m3 into float16 in one instruction a pair; int8 becomes float16 in six instructions for four values
    (see _convert). Both are exact.
    """
    if cache.k_scale is None:
        return cache.k.dtype
    return torch.float32 if q.dtype == torch.float32 and cache.k.dtype == torch.int8 else torch.float16


def fast_int8(q: Tensor, cache: LayerCache) -> bool:
    """Whether int8 pages are converted by inline assembly, which Triton's interpreter does not have."""
    return cache.k.dtype == torch.int8 and compute_dtype(q, cache) == torch.float16 and capability(q) >= (8, 0)


def prefill_config(head_dim: int, cache_bytes: int, major: int, minor: int) -> dict[str, int]:
    """Rows and keys of a tile, warps and stages, within the shared memory of the GPU.

    228 KB on sm_90, 164 KB on sm_80, 100 KB on the others. 32-bit caches serve tests.
    """
    if cache_bytes == 4:
        return {"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 4, "num_stages": 1}
    big = (major, minor) == (9, 0)
    if head_dim > 128:
        if big:
            return {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2}
        return {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2}
    if big:
        return {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}
    return {"BLOCK_M": 128, "BLOCK_N": 32, "num_warps": 8, "num_stages": 3}


def prefill_attention_triton(
    q: Tensor,
    cache: LayerCache,
    batch: Batch,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    contiguous: bool = False,
    config: dict[str, int] | None = None,
) -> Tensor:
    """prefill_attention in one launch, whatever the lengths of the requests.

    The query heads of one key head are packed into a tile's rows (row = position * group + head), so that short
    pieces fill tiles and a diagonal tile wastes little. Keys before the diagonal are not masked.
    """
    from engine.kernels.attention_triton import prefill_attention_kernel

    rows, heads, dim = q.shape
    out = torch.empty_like(q)
    if not rows:
        return out
    requests = batch.kv_len.shape[0]
    _, kv_heads, page_size, _ = cache.k.shape
    group = heads // kv_heads
    config = config or prefill_config(dim, cache.k.element_size(), *capability(q))
    tiles = -(-rows * group // config["BLOCK_M"]) + requests
    launch(
        prefill_attention_kernel, (tiles, kv_heads),
        q, out, cache.k, cache.v, cache.k_scale, cache.v_scale, sinks,
        batch.query_start, batch.kv_len, batch.page_table, batch.page_table.stride(0), requests, rows, scale * LOG2_E,
        KV_HEADS=kv_heads, GROUP=group, DIM=dim, DIM_BLOCK=max(16, power_of_2(dim)), PAGE=page_size,
        REQUESTS=max(64, power_of_2(requests)), WINDOW=window or 0, SINKS=sinks is not None,
        EIGHT_BIT=cache.k_scale is not None, FAST_INT8=fast_int8(q, cache),
        COMPUTE=triton_dtype(compute_dtype(q, cache)), CONTIGUOUS=contiguous,
        ONE_PAGE=page_size % config["BLOCK_N"] == 0, **config,
    )  # fmt: skip
    return out


def triton_dtype(dtype: torch.dtype) -> Any:
    """The Triton type of a torch dtype."""
    import triton.language as tl

    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[dtype]
