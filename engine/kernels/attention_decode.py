"""Attention of one new token of every request over the paged cache, split over the keys (flash decoding).

Keys are cut into segments whose length depends on the request alone, so that a row's result does not depend on what
else is in the batch. The work items (request, segment, key head) are dealt to as many programs as the GPU holds. The
grid depends on bounds alone: a captured graph serves every length. The only segment of a request is written as it is;
of several, the last program of a request and key head to finish combines them in order. Two forms:

- Triton, for every dtype, page and head; beyond MOST_COMBINED segments a second launch combines them.
- Gluon (sm_80 and later; 16-bit pages of the query's dtype, or 8 bit; pages of 64 keys; heads of 64 and 128).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from engine.batch import Batch, LayerCache
from engine.kernels._launch import arrival_counters, capability, launch, multiprocessors, power_of_2
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
    if q.is_cuda and gluon_serves(q, cache):
        return decode_attention_gluon(q, cache, batch, scale, window, sinks, contiguous)
    if q.is_cuda:
        return decode_attention_triton(q, cache, batch, scale, window, sinks, contiguous)
    return decode_attention_reference(q, cache, batch, scale, window, sinks)


@dataclass(frozen=True)
class Segments:
    """How the keys of a request are cut; a function of the model, so that a row's bits do not depend on the batch.

    A segment has `shortest` keys, doubled up to `longest` while more than `parts` would be needed: a short request
    needs no combining, one long request fills the GPU, and many long ones leave few partial results.
    """

    parts: int
    shortest: int
    longest: int

    def most(self, max_kv: int) -> int:
        """Most segments of a request of at most `max_kv` tokens."""
        return max(1, min(-(-max_kv // self.shortest), max(self.parts, -(-max_kv // self.longest))))


def segments_for(kv_heads: int) -> Segments:
    """Few key heads need more segments to fill a GPU."""
    return Segments(8 if kv_heads >= 8 else 16 if kv_heads >= 4 else 32, 256, 1024)


MOST_COMBINED = 32
"""Segments up to which the last program of a request and key head combines them; more are combined a head a program."""


def decode_config(head_dim: int, cache_bytes: int, capability: tuple[int, int]) -> dict[str, int]:
    """Keys of a tile, warps, stages, and programs a multiprocessor (what sm_90 holds of them).

    Half of the stages go to the page ids, which the pages wait for: five keep two tiles of keys in flight, seven three.
    """
    if cache_bytes == 4:
        return {"BLOCK_N": 16, "num_warps": 4, "num_stages": 1, "programs": 2}
    if head_dim > 128:
        return {"BLOCK_N": 32, "num_warps": 4, "num_stages": 7 if capability in ((8, 0), (9, 0)) else 5, "programs": 2}
    return {"BLOCK_N": 64, "num_warps": 4, "num_stages": 5, "programs": 3}


def decode_attention_triton(
    q: Tensor,
    cache: LayerCache,
    batch: Batch,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    contiguous: bool = False,
    config: dict[str, int] | None = None,
    segments: Segments | None = None,
) -> Tensor:
    """decode_attention in one launch, in two for many segments; a segment of several leaves D + 1 floats a head."""
    from engine.kernels.attention_triton import combine_segments_kernel, decode_attention_kernel

    requests, heads, dim = q.shape
    out = torch.empty_like(q)
    if not requests:
        return out
    _, kv_heads, page_size, _ = cache.k.shape
    group = heads // kv_heads
    config = dict(config or decode_config(dim, cache.k.element_size(), capability(q)))
    cut = segments or segments_for(kv_heads)
    most = cut.most(batch.max_kv)
    programs = min(requests * most * kv_heads, multiprocessors(q) * config.pop("programs"))
    partial = torch.empty((requests, heads, most, dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((requests, heads, most), dtype=torch.float32, device=q.device)
    dim_block = max(16, power_of_2(dim))
    lengths = {"PARTS": cut.parts, "SHORTEST": cut.shortest, "LONGEST": cut.longest, "BLOCK_N": config.pop("BLOCK_N")}
    launch(
        decode_attention_kernel, (programs,),
        q, out, partial, lse, arrival_counters(q), cache.k, cache.v, cache.k_scale, cache.v_scale, sinks,
        batch.kv_len, batch.page_table, batch.page_table.stride(0), requests, most, scale * LOG2_E,
        KV_HEADS=kv_heads, GROUP=group, ROWS=power_of_2(group), DIM=dim, DIM_BLOCK=dim_block, PAGE=page_size,
        BLOCK_M=max(16, power_of_2(group)), REQUESTS=max(64, power_of_2(requests)), WINDOW=window or 0,
        SINKS=sinks is not None, EIGHT_BIT=cache.k_scale is not None, FAST_INT8=fast_int8(q, cache),
        COMPUTE=triton_dtype(compute_dtype(q, cache)), CONTIGUOUS=contiguous,
        ONE_PAGE=page_size % lengths["BLOCK_N"] == 0, COMBINE=most <= MOST_COMBINED, **lengths, **config,
    )  # fmt: skip
    if most > MOST_COMBINED:
        launch(
            combine_segments_kernel, (requests, heads), partial, lse, out, sinks, batch.kv_len, most,
            DIM=dim, DIM_BLOCK=dim_block, WINDOW=window or 0, SINKS=sinks is not None, BLOCK_S=16,
            num_warps=4 if dim_block * 16 >= 2048 else 2, **lengths,
        )  # fmt: skip
    return out


@dataclass(frozen=True)
class GluonConfig:
    """`stages`: tiles of 64 keys in the ring, one less in flight; `programs`: programs a multiprocessor."""

    segments: Segments
    stages: int
    programs: int


def gluon_serves(q: Tensor, cache: LayerCache) -> bool:
    """Whether decode_attention_gluon takes these dtypes and shapes on this device."""
    _, heads, dim = q.shape
    _, kv_heads, page_size, _ = cache.k.shape
    sixteen = q.dtype in (torch.float16, torch.bfloat16)
    if cache.k_scale is None:
        stored = cache.k.dtype == q.dtype
    else:
        stored = cache.k.dtype == torch.int8 or capability(q) >= (8, 9)
    return (
        sixteen and stored and dim in (64, 128) and page_size % 64 == 0 and heads // kv_heads <= 16
        and capability(q) >= (8, 0)
    )  # fmt: skip


def gluon_config(kv_heads: int, head_dim: int, cache_bytes: int, major: int, minor: int) -> GluonConfig:
    """A ring that leaves room for two programs on sm_90.

    Joining the warps takes 128 bytes a head dimension beside the ring, the scales of 8-bit values 512 bytes a tile.
    """
    tile = 2 * 64 * head_dim * cache_bytes + (512 if cache_bytes == 1 else 0)
    ring = 96 * 1024 if (major, minor) == (9, 0) else 48 * 1024
    return GluonConfig(segments_for(kv_heads), max(2, min(6, ring // tile)), 2)


@lru_cache(maxsize=8)
def _word_layouts(words: int) -> dict[str, Any]:
    """How the int32 words [64, words] of a tile lie in four warps, so that no value moves before the products.

    Lane = 4 g + t. Keys: a thread holds words t * vec .. of keys g and g + 8 of its warp's 16, as the B operand of q.k
    wants them. Values: words g * vec .. of keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9, as that of p.v does once the columns
    are renamed; `v_pairs` counts the registers so that two neighbours hold keys 2 t and 2 t + 1.
    """
    from triton.experimental.gluon import language as gl

    vec = min(4, words // 8)
    column = [[0, 1 << i] for i in range(vec.bit_length() - 1)]
    k_more = [[0, 1 << i] for i in range((4 * vec).bit_length() - 1, words.bit_length() - 1)]
    v_more = [[0, 1 << i] for i in range((8 * vec).bit_length() - 1, words.bit_length() - 1)]
    warps = [[16, 0], [32, 0]]

    def layout(registers: list[list[int]], lanes: list[list[int]]) -> Any:
        return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, words])

    k_lanes = [[0, vec], [0, 2 * vec], [1, 0], [2, 0], [4, 0]]
    v_lanes = [[2, 0], [4, 0], [0, vec], [0, 2 * vec], [0, 4 * vec]]
    return {
        "k_layout": layout([*column, *k_more, [8, 0]], k_lanes),
        "v_layout": layout([*column, [1, 0], [8, 0], *v_more], v_lanes),
        "v_pairs": layout([[1, 0], [8, 0], *column, *v_more], v_lanes),
    }


def decode_attention_gluon(
    q: Tensor,
    cache: LayerCache,
    batch: Batch,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    contiguous: bool = False,
    config: GluonConfig | None = None,
) -> Tensor:
    """decode_attention in one launch, where gluon_serves; reads every key and value once."""
    from engine.kernels.attention_gluon import decode_attention_kernel

    requests, heads, dim = q.shape
    out = torch.empty_like(q)
    if not requests:
        return out
    _, kv_heads, page_size, _ = cache.k.shape
    config = config or gluon_config(kv_heads, dim, cache.k.element_size(), *capability(q))
    cut = config.segments
    segments = cut.most(batch.max_kv)
    programs = min(requests * segments * kv_heads, multiprocessors(q) * config.programs)
    partial = torch.empty((requests, heads, segments, dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((requests, heads, segments), dtype=torch.float32, device=q.device)
    values = 4 // cache.k.element_size()
    computed = triton_dtype(compute_dtype(q, cache))
    launch(
        decode_attention_kernel, (programs,),
        q.contiguous().view(torch.int32), out, partial, lse, arrival_counters(q), cache.k.view(torch.int32),
        cache.v.view(torch.int32), cache.k_scale, cache.v_scale, sinks, batch.kv_len, batch.page_table,
        batch.page_table.stride(0), requests, segments, scale * LOG2_E,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, PAGE=page_size, REQUESTS=max(32, power_of_2(requests)),
        E=values, FP8=cache.k.dtype == torch.float8_e4m3fn, T=computed, Q=triton_dtype(q.dtype), WINDOW=window or 0,
        SINKS=sinks is not None, PARTS=cut.parts, SHORTEST=cut.shortest, LONGEST=cut.longest,
        CONTIGUOUS=contiguous, STAGES=config.stages, num_warps=4, **_word_layouts(dim // values),
    )  # fmt: skip
    return out
