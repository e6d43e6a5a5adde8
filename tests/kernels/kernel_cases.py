"""Batches and caches for the kernel tests: random page tables, and poison wherever no request has a token."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch import Batch, LayerCache
from engine.kernels.rope import write_cache_reference


def make_batch(
    query_lens: list[int], kv_lens: list[int], page_size: int, seed: int = 0, padding_rows: int = 0, device="cpu"
) -> tuple[Batch, int]:
    """A batch whose requests own shuffled pages, and the number of pages of its pool (page 0 and two spare included).

    Slots of the new rows are the last ones of each request; padding rows point into page 0.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_size) for length in kv_lens]
    pages = torch.randperm(sum(counts), generator=generator) + 1
    table = torch.zeros((len(kv_lens), max([*counts, 1])), dtype=torch.int32)
    positions, slots, taken = [], [], 0
    for r, count in enumerate(counts):
        table[r, :count] = pages[taken : taken + count]
        taken += count
        at = torch.arange(max(kv_lens[r] - query_lens[r], 0), max(kv_lens[r], query_lens[r]))
        positions.append(at)
        slots.append(table[r, at // page_size] * page_size + at % page_size if kv_lens[r] else at * 0)
    rows = sum(query_lens) + padding_rows
    pad = torch.zeros(padding_rows, dtype=torch.int64)
    batch = Batch(
        tokens=torch.zeros(rows, dtype=torch.int32, device=device),
        positions=torch.cat([*positions, pad]).int().to(device),
        slots=torch.cat([*slots, pad]).int().to(device),
        query_start=torch.tensor([0, *torch.tensor(query_lens).cumsum(0)], dtype=torch.int32, device=device),
        kv_len=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        page_table=table.to(device),
        state_slots=torch.zeros(len(kv_lens), dtype=torch.int32, device=device),
        sample_rows=torch.zeros(0, dtype=torch.int32, device=device),
        decode=all(n == 1 for n in query_lens) and not padding_rows,
        max_query=max(query_lens),
        max_kv=max(kv_lens),
    )
    return batch, sum(counts) + 3


def poisoned_cache(pages: int, kv_heads: int, page_size: int, dim: int, dtype: torch.dtype, device="cpu") -> LayerCache:
    """A cache in which every value (every scale of an 8-bit one) is NaN."""
    shape = (pages, kv_heads, page_size, dim)
    if dtype in (torch.int8, torch.float8_e4m3fn):
        k, v = (torch.full(shape, 77.0).to(dtype).to(device) for _ in range(2))
        k_scale, v_scale = (torch.full(shape[:3], float("nan"), device=device) for _ in range(2))
        return LayerCache(k, v, k_scale, v_scale)
    return LayerCache(*(torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2)))


def token_slots(batch: Batch, page_size: int) -> Tensor:
    """The slots of every token that the requests have in the cache, in order, int64."""
    slots = []
    for r, length in enumerate(batch.kv_len.tolist()):
        at = torch.arange(length, device=batch.kv_len.device)
        slots.append(batch.page_table[r, at // page_size].long() * page_size + at % page_size)
    return torch.cat(slots)


def filled_cache(
    batch: Batch, pages: int, kv_heads: int, page_size: int, dim: int, dtype: torch.dtype, seed: int = 1, device="cpu"
) -> LayerCache:
    """A poisoned cache in which only the tokens of the batch's requests have (normal) keys and values."""
    cache = poisoned_cache(pages, kv_heads, page_size, dim, dtype, device)
    slots = token_slots(batch, page_size)
    generator = torch.Generator().manual_seed(seed)
    for stored, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)):
        values = torch.randn((len(slots), kv_heads, dim), generator=generator).to(device)
        write_cache_reference(stored, scale, slots, values)
    return cache
