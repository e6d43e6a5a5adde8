"""The Triton kernels behind engine/kernels/mla.py, which alone imports this file."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.batch import Batch, LayerCache
from engine.config import LatentAttention
from engine.kernels._launch import capability, launch, power_of_2


@triton.jit
def _summed(y, at, mask, size, PARTS: tl.constexpr):
    value = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(y + part * size + at, mask=mask, other=0.0)
    return value


@triton.jit
def _rms_norm(x, weight, column, mask, width, eps):
    return x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _quantized(x, step, dtype: tl.constexpr):
    """x / step in an 8-bit type, rounded to the nearest."""
    value = x / tl.where(step == 0.0, 1.0, step)
    if dtype == tl.int8:
        value = tl.floor(tl.minimum(tl.maximum(value, -127.0), 127.0) + 0.5)
    else:
        value = tl.minimum(tl.maximum(value, -448.0), 448.0)
    return value.to(dtype)


@triton.jit
def latent_write_kernel(
    y, q_weight, kv_weight, table, positions, slots, q, k, v, k_scale, v_scale, size, table_width, eps,
    Q_RANK: tl.constexpr, KV_RANK: tl.constexpr, HALF: tl.constexpr, Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, SCALED: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: query latents normalised, key latents normalised and the shared key rotated into the cache."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    base = row * (Q_RANK + KV_RANK + 2 * HALF)
    column = tl.arange(0, Q_BLOCK)
    x = _rms_norm(
        _summed(y, base + column, column < Q_RANK, size, PARTS), q_weight, column, column < Q_RANK, Q_RANK, eps
    )
    tl.store(q + row * Q_RANK + column, x.to(q.dtype.element_ty), mask=column < Q_RANK)

    latent_column = tl.arange(0, KV_BLOCK)
    latent_known = latent_column < KV_RANK
    latent = _summed(y, base + Q_RANK + latent_column, latent_known, size, PARTS)
    latent = _rms_norm(latent, kv_weight, latent_column, latent_known, KV_RANK, eps)
    pair = tl.arange(0, HALF_BLOCK)
    turned = pair < HALF
    first = base + Q_RANK + KV_RANK + (2 * pair if INTERLEAVED else pair)
    a = _summed(y, first, turned, size, PARTS)
    b = _summed(y, first + (1 if INTERLEAVED else HALF), turned, size, PARTS)
    at = table + tl.load(positions + row).to(tl.int64) * table_width + pair
    cos, sin = tl.load(at, mask=turned, other=0.0), tl.load(at + HALF, mask=turned, other=0.0)
    a, b = a * cos - b * sin, b * cos + a * sin

    slot = tl.load(slots + row).to(tl.int64)
    stored: tl.constexpr = k.dtype.element_ty
    if SCALED:
        largest: tl.constexpr = 127.0 if stored == tl.int8 else 448.0
        k_step = tl.max(tl.abs(latent), 0) / largest
        v_step = tl.maximum(tl.max(tl.abs(a), 0), tl.max(tl.abs(b), 0)) / largest
        tl.store(k_scale + slot, k_step)
        tl.store(v_scale + slot, v_step)
        tl.store(k + slot * KV_RANK + latent_column, _quantized(latent, k_step, stored), mask=latent_known)
        tl.store(v + slot * 2 * HALF + pair, _quantized(a, v_step, stored), mask=turned)
        tl.store(v + slot * 2 * HALF + HALF + pair, _quantized(b, v_step, stored), mask=turned)
    else:
        tl.store(k + slot * KV_RANK + latent_column, latent.to(stored), mask=latent_known)
        tl.store(v + slot * 2 * HALF + pair, a.to(stored), mask=turned)
        tl.store(v + slot * 2 * HALF + HALF + pair, b.to(stored), mask=turned)


@triton.jit
def latent_attention_kernel(
    q_latent, q_rope, table, k, v, k_scale, v_scale, positions, query_start, kv_len, page_table, out, partial, stats,
    rows_total, latent_token, latent_head, rope_token, rope_head, table_width, max_pages, scale,
    HEADS: tl.constexpr, KV_RANK: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, INTERLEAVED: tl.constexpr, SCALED: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """M (token, head) rows of one request against every num_programs(2)-th tile of N of its cached tokens.

    SPLIT: leaves the unnormalised sum in partial [programs, rows_total * HEADS, KV_RANK] and (max, sum) in stats
    [2, programs, rows_total * HEADS]; otherwise there is one program, and out [T, HEADS, KV_RANK] is final. A short
    context has one tile a program: no program waits twice for memory.
    """
    block, request, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = tl.load(query_start + request), tl.load(query_start + request + 1)
    length = tl.load(kv_len + request)
    first_token = share * N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if (block * M < (end - start) * HEADS) & (first_token < length):
        dtype: tl.constexpr = q_latent.dtype.element_ty
        m = block * M + tl.arange(0, M)
        token = (start + m // HEADS).to(tl.int64)
        head = m % HEADS
        live = token < end
        column, pair = tl.arange(0, KV_RANK), tl.arange(0, HALF)
        position = tl.load(positions + token, mask=live, other=-1)
        at = (token * latent_token + head * latent_head)[:, None] + column[None, :]
        ql = tl.load(q_latent + at, mask=live[:, None], other=0.0)
        at = (token * rope_token + head * rope_head)[:, None] + (2 * pair if INTERLEAVED else pair)[None, :]
        a = tl.load(q_rope + at, mask=live[:, None], other=0.0).to(tl.float32)
        b = tl.load(q_rope + at + (1 if INTERLEAVED else HALF), mask=live[:, None], other=0.0).to(tl.float32)
        at = tl.maximum(position, 0).to(tl.int64)[:, None] * table_width + pair[None, :]
        cos, sin = tl.load(table + at), tl.load(table + at + HALF)
        qa, qb = (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)

        best = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, KV_RANK), tl.float32)
        newest = tl.max(position, 0) + 1
        last_token = tl.minimum(length, newest)
        for n in range(first_token, last_token, N * tl.num_programs(2)):
            cached = n + tl.arange(0, N)
            known = cached < last_token
            page = tl.load(page_table + request * max_pages + cached // PAGE, mask=known, other=0).to(tl.int64)
            slot = page * PAGE + cached % PAGE
            c = tl.load(k + slot[:, None] * KV_RANK + column[None, :], mask=known[:, None], other=0.0).to(dtype)
            turned_at = v + slot[None, :] * (2 * HALF) + pair[:, None]
            ra = tl.load(turned_at, mask=known[None, :], other=0.0).to(dtype)
            rb = tl.load(turned_at + HALF, mask=known[None, :], other=0.0).to(dtype)
            scores = tl.dot(ql, tl.trans(c), input_precision="ieee")
            turned = tl.dot(qa, ra, input_precision="ieee")
            turned = tl.dot(qb, rb, turned, input_precision="ieee")
            if SCALED:
                c_step = tl.load(k_scale + slot, mask=known, other=0.0)
                scores = scores * c_step[None, :] + turned * tl.load(v_scale + slot, mask=known, other=0.0)[None, :]
            else:
                scores += turned
            seen = known[None, :] & (cached[None, :] <= position[:, None])
            scores = tl.where(seen, scores * scale, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, 1))
            safe = tl.where(new_best == float("-inf"), 0.0, new_best)
            p = tl.exp(scores - safe[:, None])
            shrink = tl.exp(best - safe)
            total = total * shrink + tl.sum(p, 1)
            if SCALED:
                p *= c_step[None, :]
            acc = tl.dot(p.to(dtype), c, acc * shrink[:, None], input_precision="ieee")
            best = new_best
        line = token * HEADS + head
        if SPLIT:
            first = share.to(tl.int64) * (rows_total * HEADS)
            tl.store(partial + (first + line)[:, None] * KV_RANK + column[None, :], acc, mask=live[:, None])
            tl.store(stats + first + line, best, mask=live)
            first += tl.num_programs(2).to(tl.int64) * (rows_total * HEADS)
            tl.store(stats + first + line, total, mask=live)
        else:
            value = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(out + line[:, None] * KV_RANK + column[None, :], value.to(dtype), mask=live[:, None])


@triton.jit
def absorb_kernel(
    x, weight, out, rows, row_stride, head_stride,
    HEADS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, M: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [rows, HEADS, N] = x [rows, HEADS, K] times weight [HEADS, K, N], head by head; BK >= K.

    Grid (HEADS, N / BN, row blocks of M). A program reads its part of the weight, [K, BN], before the wait.
    """
    head = tl.program_id(0)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    row = tl.program_id(2) * M + tl.arange(0, M)
    k = tl.arange(0, BK)
    at = weight + (head * K + k)[:, None] * N + column[None, :]
    matrix = tl.load(at, mask=(k < K)[:, None], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    live = (row < rows)[:, None]
    at = x + row.to(tl.int64)[:, None] * row_stride + head * head_stride + k[None, :]
    value = tl.dot(tl.load(at, mask=live & (k < K)[None, :], other=0.0), matrix, input_precision="ieee")
    to = out + (row.to(tl.int64) * HEADS + head)[:, None] * N + column[None, :]
    tl.store(to, value.to(out.dtype.element_ty), mask=live)


@triton.jit
def combine_values_kernel(
    partial, stats, kv_len, weight, out, rows, shares,
    HEADS: tl.constexpr, KV_RANK: tl.constexpr, VALUES: tl.constexpr, BN: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds the shares of one head of M rows of a decode step, in order, and multiplies with weight [KV_RANK, VALUES].

    out [rows, HEADS, VALUES]; zeros where nothing is cached. Grid (HEADS, VALUES / BN, row blocks of M). The weight is
    read before the wait; what the attention left is read VALUES / BN times, from L2.
    """
    head = tl.program_id(0)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    row = tl.program_id(2) * M + tl.arange(0, M)
    latent = tl.arange(0, KV_RANK)
    matrix = tl.load(weight + (head * KV_RANK + latent)[:, None] * VALUES + column[None, :])
    live = row < rows
    used = tl.minimum((tl.load(kv_len + row, mask=live, other=0) + N - 1) // N, shares)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    line = row.to(tl.int64) * HEADS + head
    lines = rows * HEADS
    most = tl.max(used, 0)
    best = tl.full((M,), float("-inf"), tl.float32)
    for share in range(most):
        best = tl.maximum(best, tl.load(stats + share * lines + line, mask=share < used, other=float("-inf")))
    best = tl.where(best == float("-inf"), 0.0, best)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, KV_RANK), tl.float32)
    for share in range(most):
        there = share < used
        weight_of = tl.exp(tl.load(stats + share * lines + line, mask=there, other=float("-inf")) - best)
        total += weight_of * tl.load(stats + (shares + share) * lines + line, mask=there, other=0.0)
        at = partial + (share * lines + line)[:, None] * KV_RANK + latent[None, :]
        acc += weight_of[:, None] * tl.load(at, mask=there[:, None], other=0.0)
    mixed = (acc / tl.where(total == 0.0, 1.0, total)[:, None]).to(matrix.dtype)
    value = tl.dot(mixed, matrix, input_precision="ieee")
    to = out + line[:, None] * VALUES + column[None, :]
    tl.store(to, value.to(out.dtype.element_ty), mask=live[:, None])


def latent_write(
    y: Tensor, spec: LatentAttention, q_weight: Tensor, kv_weight: Tensor, table: Tensor, batch: Batch,
    cache: LayerCache, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """See `engine.kernels.mla.latent_write`."""
    parts, rows = (1, y.shape[0]) if y.dim() == 2 else (y.shape[0], y.shape[1])
    q = torch.empty(rows, spec.q_rank, dtype=dtype, device=y.device)
    half = spec.rope_dim // 2
    launch(
        latent_write_kernel, (rows,),
        y, q_weight, kv_weight, table, batch.positions, batch.slots, q, cache.k, cache.v, cache.k_scale, cache.v_scale,
        rows * y.shape[-1], table.stride(0), spec.latent_eps, spec.q_rank, spec.kv_rank, half,
        power_of_2(spec.q_rank), power_of_2(spec.kv_rank), power_of_2(half), spec.rope.interleaved,
        cache.k_scale is not None, parts, num_warps=4,
    )  # fmt: skip
    return q


def absorb(nope: Tensor, key_up: Tensor) -> Tensor:
    """See `engine.kernels.mla.absorb`."""
    (rows, heads, k), n = nope.shape, key_up.shape[2]
    out = torch.empty(rows, heads, n, dtype=nope.dtype, device=nope.device)
    block = min(64, n)
    launch(
        absorb_kernel, (heads, n // block, -(-rows // 16)), nope, key_up, out, rows, nope.stride(0), nope.stride(1),
        heads, k, n, power_of_2(k), block, 16, num_warps=4,
    )  # fmt: skip
    return out


def latent_attention(
    q_latent: Tensor, q_rope: Tensor, spec: LatentAttention, table: Tensor, batch: Batch, cache: LayerCache
) -> Tensor:
    """`engine.kernels.mla.latent_attention` of prompts; kv_rank and rope_dim are powers of two."""
    out = torch.zeros(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    _attend(q_latent, q_rope, spec, table, batch, cache, 32, 1, out, out, out)
    return out


def latent_decode(
    q_latent: Tensor, q_rope: Tensor, value_down: Tensor, spec: LatentAttention, table: Tensor, batch: Batch,
    cache: LayerCache,
) -> Tensor:  # fmt: skip
    """`engine.kernels.mla.latent_values` of a decode step: attention by shares, then their sum times value_down."""
    (rows, heads, rank), width = q_latent.shape, value_down.shape[2]
    n, shares = 64 if _roomy(q_latent) else 32, _shares(batch.max_kv)
    device = q_latent.device
    partial = torch.empty(shares, rows * heads, rank, dtype=torch.float32, device=device)
    stats = torch.empty(2, shares, rows * heads, dtype=torch.float32, device=device)
    _attend(q_latent, q_rope, spec, table, batch, cache, n, shares, q_latent, partial, stats)
    out = torch.empty(rows, heads * width, dtype=q_latent.dtype, device=device)
    block = min(64 if _roomy(q_latent) else 32, width)
    launch(
        combine_values_kernel, (heads, width // block, -(-rows // 16)),
        partial, stats, batch.kv_len, value_down, out, rows, shares, heads, rank, width, block, 16, n,
        num_warps=8, num_stages=1,
    )  # fmt: skip
    return out


def _roomy(x: Tensor) -> bool:
    """Whether a multiprocessor has shared memory for 64 rows of 512 latents."""
    return capability(x)[0] in (9, 10)


def _attend(
    q_latent: Tensor, q_rope: Tensor, spec: LatentAttention, table: Tensor, batch: Batch, cache: LayerCache,
    n: int, shares: int, out: Tensor, partial: Tensor, stats: Tensor,
) -> None:  # fmt: skip
    """One launch of the attention kernel; `out` for prompts, else `partial` and `stats` are written."""
    rows, heads, rank = q_latent.shape
    most = 64 if _roomy(q_latent) and cache.k_scale is None else 32
    m = min(most, max(16, power_of_2(batch.max_query * heads)))
    launch(
        latent_attention_kernel, (-(-batch.max_query * heads // m), batch.kv_len.shape[0], shares),
        q_latent, q_rope, table, cache.k, cache.v, cache.k_scale, cache.v_scale, batch.positions, batch.query_start,
        batch.kv_len, batch.page_table, out, partial, stats, rows, q_latent.stride(0), q_latent.stride(1),
        q_rope.stride(0), q_rope.stride(1), table.stride(0), batch.page_table.stride(0), spec.scale,
        heads, rank, spec.rope_dim // 2, cache.page_size, m, n, spec.rope.interleaved, cache.k_scale is not None,
        batch.decode, num_warps=8 if m >= 32 else 4, num_stages=2,
    )  # fmt: skip


def _shares(max_kv: int) -> int:
    """Programs that share a request's tiles in a decode step: by the bound on the context, never by the batch."""
    return max(16, min(64, power_of_2(max_kv // 512)))
