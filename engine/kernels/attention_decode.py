"""Attention of one new token of every request over the paged cache, split over the keys (flash decoding).

Keys are cut into segments of a fixed length, so that a row's result does not depend on what else is in the batch. The
work items (request, segment, key head) are dealt to as many programs as the GPU holds; a second launch combines the
segments of every head in order. The grid depends on bounds alone: a captured graph serves every length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch import Batch, LayerCache
from engine.kernels._launch import launch, multiprocessors, power_of_2
from engine.kernels.attention_prefill import LOG2_E, compute_dtype, fast_int8, prefill_attention_reference, triton_dtype


def decode_attention_reference(
    q: Tensor, cache: LayerCache, batch: Batch, scale: float, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """q [R, heads, D] -> [R, heads, D]: see prefill_attention_reference; every request has one row."""
    return prefill_attention_reference(q, cache, batch, scale, window, sinks)


def decode_attention(
    q: Tensor,
    cache: LayerCache,
    batch: Batch,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    contiguous: bool = False,
) -> Tensor:
    """See decode_attention_reference. `contiguous`: the pages of every request follow each other in the cache."""
    if q.is_cuda:
        return decode_attention_triton(q, cache, batch, scale, window, sinks, contiguous)
    return decode_attention_reference(q, cache, batch, scale, window, sinks)


def segment_length(kv_heads: int) -> int:
    """Keys of a segment. Few key heads need more segments to fill a GPU; longer segments write fewer partials."""
    return 128 if kv_heads <= 2 else 256


def decode_config(head_dim: int, cache_bytes: int) -> dict[str, int]:
    """Keys of a tile, warps, stages, and programs a multiprocessor (what shared memory holds of them on sm_90).

    Half of the stages go to the page ids, which the pages wait for: five keep two tiles of keys in flight.
    """
    if cache_bytes == 4:
        return {"BLOCK_N": 16, "num_warps": 4, "num_stages": 1, "programs": 2}
    return {"BLOCK_N": 32 if head_dim > 128 else 64, "num_warps": 4, "num_stages": 5, "programs": 3}


def decode_attention_triton(
    q: Tensor,
    cache: LayerCache,
    batch: Batch,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    contiguous: bool = False,
    config: dict[str, int] | None = None,
    segment: int | None = None,
) -> Tensor:
    """decode_attention in two launches: reads every key and value once; a segment leaves D + 1 floats a head."""
    from engine.kernels.attention_triton import combine_segments_kernel, decode_attention_kernel

    requests, heads, dim = q.shape
    out = torch.empty_like(q)
    if not requests:
        return out
    _, kv_heads, page_size, _ = cache.k.shape
    group = heads // kv_heads
    config = dict(config or decode_config(dim, cache.k.element_size()))
    segment = segment or segment_length(kv_heads)
    segments = max(1, -(-batch.max_kv // segment))
    programs = min(requests * segments * kv_heads, multiprocessors(q) * config.pop("programs"))
    partial = torch.empty((requests, heads, segments, dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((requests, heads, segments), dtype=torch.float32, device=q.device)
    dim_block = max(16, power_of_2(dim))
    launch(
        decode_attention_kernel, (programs,),
        q, partial, lse, cache.k, cache.v, cache.k_scale, cache.v_scale, batch.kv_len, batch.page_table,
        batch.page_table.stride(0), requests, segments, scale * LOG2_E,
        KV_HEADS=kv_heads, GROUP=group, DIM=dim, DIM_BLOCK=dim_block, PAGE=page_size, SEGMENT=segment,
        BLOCK_M=max(16, power_of_2(group)), REQUESTS=max(64, power_of_2(requests)), WINDOW=window or 0,
        EIGHT_BIT=cache.k_scale is not None, FAST_INT8=fast_int8(q, cache),
        COMPUTE=triton_dtype(compute_dtype(q, cache)), CONTIGUOUS=contiguous,
        ONE_PAGE=page_size % config["BLOCK_N"] == 0, **config,
    )  # fmt: skip
    launch(
        combine_segments_kernel, (requests, heads), partial, lse, out, sinks, batch.kv_len, segments,
        DIM=dim, DIM_BLOCK=dim_block, SEGMENT=segment, WINDOW=window or 0, SINKS=sinks is not None, BLOCK_S=16,
        num_warps=4 if dim_block * 16 >= 2048 else 2,
    )  # fmt: skip
    return out
