"""The Triton kernels behind engine/kernels/deltanet.py, which alone imports this file.

Decode is one kernel. A prompt takes more: gates; convolution of q, k and v; the convolution's past columns; within
every chunk of 64 tokens the triangular solve; the pass over the chunks, which carries the state; the outputs with their
gated norm. All but the pass over the chunks run over chunks and heads at once. A chunk belongs to one request, so that
requests of any lengths go together and none sees another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.batch import Batch, StateCache
from engine.config import DeltaNet
from engine.kernels.deltanet import CHUNK, L2_EPS, DeltaWeights, channels, row_width

BLOCK_TOKENS = 16
STATE_COLUMNS, STATE_STAGES = 32, 2
"""Columns of the state that a program of the serial pass carries, and its stages: on sm_90 two programs fit a
multiprocessor, so that 48 heads run at once."""

TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _projected(y, at, mask, size, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """Elements `at` of the rows y, its PARTS parts (of `size` elements) summed, as the activation dtype holds them."""
    value = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(y + part * size + at, mask=mask, other=0.0)
    return value.to(DTYPE).to(tl.float32)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _if(condition, bound):
    """The bound of a mask that a scalar condition opens: `bound`, or 0.

    Not a mask of its own, because the interpreter makes an int32 of a comparison that it broadcasts, and Triton 3.9
    refuses a mask of int32.
    """
    return tl.where(condition, bound, 0)


@triton.jit
def _decay(a, head, a_log, dt_bias, mask):
    """g = -exp(A_log) softplus(a + dt_bias)."""
    x = a + tl.load(dt_bias + head, mask=mask, other=0.0)
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return -tl.exp(tl.load(a_log + head, mask=mask, other=0.0)) * softplus


@triton.jit
def _convolve_step(
    y, conv_weight, conv, row, slot, position, channel, writes, size,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, CONV: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """silu of the convolution at one position for `channel`; writes the position's own column into the ring."""
    now = _projected(y, row * WIDTH + channel, channel < CHANNELS, size, PARTS, DTYPE)
    total = now * tl.load(conv_weight + channel * CONV + CONV - 1).to(tl.float32)
    for back in tl.static_range(1, CONV):
        past = position - back
        at = (slot * CONV + (past + CONV) % CONV) * CHANNELS + channel
        value = tl.load(conv + at, mask=channel < _if(past >= 0, CHANNELS), other=0.0).to(tl.float32)
        total += value * tl.load(conv_weight + channel * CONV + CONV - 1 - back).to(tl.float32)
    to = conv + (slot * CONV + position % CONV) * CHANNELS + channel
    tl.store(to, now.to(DTYPE), mask=channel < _if(writes, CHANNELS))
    return _silu(total)


@triton.jit
def step_kernel(
    y, conv_weight, a_log, dt_bias, norm, conv, state, positions, state_slots, out, size, scale, eps, l2_eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CONV: tl.constexpr,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One token of one request and value head: convolution, gates, state update in place, gated norm."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype: tl.constexpr = conv.dtype.element_ty
    slot = tl.load(state_slots + row).to(tl.int64)
    position = tl.load(positions + row)
    repeat: tl.constexpr = VALUE_HEADS // KEY_HEADS
    key = (head // repeat) * DK + tl.arange(0, DK)
    first = head % repeat == 0
    values = tl.arange(0, DV)
    q = _convolve_step(y, conv_weight, conv, row, slot, position, key, first, size,
                       WIDTH, CHANNELS, CONV, PARTS, dtype)  # fmt: skip
    k = _convolve_step(y, conv_weight, conv, row, slot, position, key + KEY_HEADS * DK, first, size,
                       WIDTH, CHANNELS, CONV, PARTS, dtype)  # fmt: skip
    v = _convolve_step(y, conv_weight, conv, row, slot, position, 2 * KEY_HEADS * DK + head * DV + values, True, size,
                       WIDTH, CHANNELS, CONV, PARTS, dtype)  # fmt: skip
    q = q * tl.rsqrt(tl.sum(q * q, 0) + l2_eps) * scale
    k = k * tl.rsqrt(tl.sum(k * k, 0) + l2_eps)
    gates = row * WIDTH + CHANNELS + VALUE_HEADS * DV + head
    beta = 1.0 / (1.0 + tl.exp(-_projected(y, gates, True, size, PARTS, dtype)))
    g = _decay(_projected(y, gates + VALUE_HEADS, True, size, PARTS, dtype), head, a_log, dt_bias, True)

    rows = tl.arange(0, DK)
    at = state + ((slot * VALUE_HEADS + head) * DK + rows)[:, None] * DV + values[None, :]
    started = (rows < _if(position > 0, DK))[:, None] & (values < DV)[None, :]
    s = tl.load(at, mask=started, other=0.0) * tl.exp(g)
    delta = beta * (v - tl.sum(s * k[:, None], 0))
    s += k[:, None] * delta[None, :]
    tl.store(at, s)
    o = tl.sum(s * q[:, None], 0)
    z = _projected(y, row * WIDTH + CHANNELS + head * DV + values, values < DV, size, PARTS, dtype)
    o = o * tl.rsqrt(tl.sum(o * o, 0) / DV + eps) * tl.load(norm + values).to(tl.float32) * _silu(z)
    tl.store(out + (row * VALUE_HEADS + head) * DV + values, o.to(dtype))


@triton.jit
def _request_of(row, query_start, requests, REQUESTS: tl.constexpr):
    """For each row the request whose rows it is among (`requests` past the last row)."""
    index = tl.arange(0, REQUESTS)
    ends = tl.load(query_start + 1 + index, mask=index < requests, other=2147483647)
    return tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), axis=1)


@triton.jit
def gates_kernel(
    y, a_log, dt_bias, beta, g, rows_total, size,
    VALUE_HEADS: tl.constexpr, HEADS: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    TOKENS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """beta and g of TOKENS rows, from the columns of b and a, which begin at FIRST."""
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.arange(0, HEADS)
    known = head < VALUE_HEADS
    mask = (row < rows_total)[:, None] & known[None, :]
    at = row.to(tl.int64)[:, None] * WIDTH + FIRST + head[None, :]
    b = _projected(y, at, mask, size, PARTS, DTYPE)
    a = _projected(y, at + VALUE_HEADS, mask, size, PARTS, DTYPE)
    to = row.to(tl.int64)[:, None] * VALUE_HEADS + head[None, :]
    tl.store(beta + to, 1.0 / (1.0 + tl.exp(-b)), mask=mask)
    tl.store(g + to, _decay(a, head[None, :], a_log, dt_bias, known[None, :]), mask=mask)


@triton.jit
def prepare_kernel(
    y, conv_weight, conv, positions, state_slots, query_start, out, rows_total, requests, size, first, scale, l2_eps,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr, NORMALIZE: tl.constexpr, CONV: tl.constexpr,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr, REQUESTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One of HEADS heads, whose channels begin at `first`, of TOKENS rows: out [rows, HEADS, D].

    NORMALIZE: to length 1; the first QUERIES heads are scaled too.
    """
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    dtype: tl.constexpr = conv.dtype.element_ty
    request = _request_of(row, query_start, requests, REQUESTS)
    live = (row < rows_total) & (request < requests)
    wide = row.to(tl.int64)
    channel = first + head * D + tl.arange(0, D)
    start = tl.load(query_start + request, mask=live, other=0)
    weights = conv_weight + channel * CONV + CONV - 1
    total = tl.zeros((TOKENS, D), tl.float32)
    for back in tl.static_range(CONV):
        at = (wide - back)[:, None] * WIDTH + channel[None, :]
        value = _projected(y, at, (live & (row - back >= start))[:, None], size, PARTS, dtype)
        total += value * tl.load(weights - back).to(tl.float32)[None, :]
    if tl.sum((live & (row - start < CONV - 1)).to(tl.int32), 0) > 0:
        slot = tl.load(state_slots + request, mask=live, other=0).to(tl.int64)
        position = tl.load(positions + row, mask=live, other=0)
        for back in tl.static_range(1, CONV):
            past = position - back
            stored = live & (row - back < start) & (past >= 0)
            at = (slot * CONV + (past + CONV) % CONV)[:, None] * CHANNELS + channel[None, :]
            value = tl.load(conv + at, mask=stored[:, None], other=0.0).to(tl.float32)
            total += value * tl.load(weights - back).to(tl.float32)[None, :]
    total = _silu(total)
    if NORMALIZE:
        factor = tl.where(head < QUERIES, scale, 1.0)
        total *= (factor * tl.rsqrt(tl.sum(total * total, 1) + l2_eps))[:, None]
    to = out + (wide * HEADS + head)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(to, total.to(dtype), mask=live[:, None])


@triton.jit
def keep_columns_kernel(
    y, conv, positions, state_slots, query_start, size,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, CONV: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes a request's last CONV columns into its slot's ring."""
    request = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype: tl.constexpr = conv.dtype.element_ty
    start, end = tl.load(query_start + request), tl.load(query_start + request + 1)
    slot = tl.load(state_slots + request).to(tl.int64)
    for back in tl.static_range(1, CONV + 1):
        row = end - back
        if row >= start:
            position = tl.load(positions + row)
            value = _projected(y, row.to(tl.int64) * WIDTH + channel, channel < CHANNELS, size, PARTS, dtype)
            to = conv + (slot * CONV + position % CONV) * CHANNELS + channel
            tl.store(to, value.to(dtype), mask=channel < CHANNELS)


@triton.jit
def _chunk_of(index, query_start, requests, C: tl.constexpr, REQUESTS: tl.constexpr):
    """(chunks in all, first row, end of the request's rows) of a chunk; chunks are counted request by request."""
    lane = tl.arange(0, REQUESTS)
    starts = tl.load(query_start + lane, mask=lane < requests, other=0)
    ends = tl.load(query_start + 1 + lane, mask=lane < requests, other=0)
    chunks = (ends - starts + C - 1) // C
    before = tl.cumsum(chunks, 0) - chunks
    mine = (before <= index) & (index < before + chunks)
    start = tl.sum(tl.where(mine, starts + (index - before) * C, 0), 0)
    return tl.sum(chunks, 0), start, tl.sum(tl.where(mine, ends, 0), 0)


@triton.jit
def _unit_lower_inverse(strict, C: tl.constexpr):
    """(1 + strict)^-1 of a strictly lower triangular float32 [C, C], by doubling.

    With X the inverses of the diagonal blocks of a size and M what stands left below them in blocks of twice the size,
    X - X M X are the inverses of the larger blocks. i and j meet in M where the highest bit in which they differ is
    that of the size. In tf32 the outputs of a chunk of nearly equal keys err by 3e-3 of the largest, a tenth of what
    rounding u, w and the state to bfloat16 costs there.
    """
    i = tl.arange(0, C)
    differ = i[:, None] ^ i[None, :]
    x = tl.where(differ == 0, 1.0, tl.where(differ == 1, -strict, 0.0))
    for level in tl.static_range(1, 6):
        if 2**level < C:
            cross = tl.where((differ >> level) == 1, strict, 0.0)
            x -= tl.dot(tl.dot(x, cross, input_precision="tf32"), x, input_precision="tf32")
    return x


@triton.jit
def chunk_kernel(
    k, v, beta, g, query_start, u, w, totals, requests,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    REQUESTS: tl.constexpr,
):  # fmt: skip
    """What the state needs of a chunk, for one value head; rows behind the end of the request are zeros.

    Rows of q and k are 2 * KEY_HEADS heads apart.

    With D_ij = exp(g_j+1 + .. + g_i) and L = strictly lower (beta_i k_i . k_j D_ij): u [chunks, VALUE_HEADS, C, DV] =
    (1 + L)^-1 beta v, w [chunks, VALUE_HEADS, C, DK] = (1 + L)^-1 beta k exp(totals), totals [chunks, VALUE_HEADS, C]
    the running sum of g. Grid (chunks, VALUE_HEADS).
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    dtype: tl.constexpr = k.dtype.element_ty
    chunks, start, end = _chunk_of(chunk, query_start, requests, C, REQUESTS)
    if chunk < chunks:
        i = tl.arange(0, C)
        row = (start + i).to(tl.int64)
        live = row < end
        dk, dv = tl.arange(0, DK), tl.arange(0, DV)
        key_at = (row * 2 * KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS))[:, None] * DK + dk[None, :]
        ks = tl.load(k + key_at, mask=live[:, None], other=0.0)
        vs = tl.load(v + (row * VALUE_HEADS + head)[:, None] * DV + dv[None, :], mask=live[:, None], other=0.0)
        b = tl.load(beta + row * VALUE_HEADS + head, mask=live, other=0.0)
        total = tl.cumsum(tl.load(g + row * VALUE_HEADS + head, mask=live, other=0.0), 0)
        below = i[:, None] > i[None, :]
        decay = tl.exp(tl.where(below, total[:, None] - total[None, :], float("-inf")))
        kk = tl.dot(ks, tl.trans(ks), input_precision="ieee")
        x = _unit_lower_inverse(kk * decay * b[:, None], C) * b[None, :]
        us = tl.dot(x.to(dtype), vs, input_precision="ieee")
        ws = tl.dot((x * tl.exp(total)[None, :]).to(dtype), ks, input_precision="ieee")
        line = (chunk * VALUE_HEADS + head).to(tl.int64) * C + i
        tl.store(u + line[:, None] * DV + dv[None, :], us.to(dtype))
        tl.store(w + line[:, None] * DK + dk[None, :], ws.to(dtype))
        tl.store(totals + line, total)


@triton.jit
def state_kernel(
    k, u, w, totals, query_start, positions, state_slots, state, before, requests,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    """Carries BV columns of one head's state over the chunks of one request: the only part that is serial.

    Leaves the state before each chunk in before [chunks, VALUE_HEADS, DK, DV] and what the chunk's tokens add to it in
    u (u - w S). Grid (requests, VALUE_HEADS, DV / BV).
    """
    request, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(query_start + request), tl.load(query_start + request + 1)
    if end > start:
        dtype: tl.constexpr = k.dtype.element_ty
        lane = tl.arange(0, REQUESTS)
        starts = tl.load(query_start + lane, mask=lane < request, other=0)
        ends = tl.load(query_start + 1 + lane, mask=lane < request, other=0)
        chunk = tl.sum((ends - starts + C - 1) // C, 0)
        slot = tl.load(state_slots + request).to(tl.int64)
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        dk, dv, i = tl.arange(0, DK), tl.program_id(2) * BV + tl.arange(0, BV), tl.arange(0, C)
        at_state = ((slot * VALUE_HEADS + head) * DK + dk)[:, None] * DV + dv[None, :]
        started = tl.load(positions + start) > 0
        s = tl.load(state + at_state, mask=(dk < _if(started, DK))[:, None] & (dv < DV)[None, :], other=0.0)
        for first in range(start, end, C):
            place = ((chunk + (first - start) // C) * VALUE_HEADS + head).to(tl.int64)
            line = place * C + i
            row = (first + i).to(tl.int64)
            rounded = s.to(dtype)
            tl.store(before + (place * DK + dk)[:, None] * DV + dv[None, :], rounded)
            ws = tl.load(w + line[:, None] * DK + dk[None, :])
            at_fresh = line[:, None] * DV + dv[None, :]
            fresh = tl.load(u + at_fresh).to(tl.float32) - tl.dot(ws, rounded, input_precision="ieee")
            tl.store(u + at_fresh, fresh.to(dtype))
            last = tl.load(totals + place * C + C - 1)
            fresh *= tl.exp(last - tl.load(totals + line))[:, None]
            key_at = (row * 2 * KEY_HEADS + key_head)[:, None] * DK + dk[None, :]
            ks = tl.load(k + key_at, mask=(row < end)[:, None], other=0.0)
            s = tl.dot(tl.trans(ks), fresh.to(dtype), s * tl.exp(last), input_precision="ieee")
        tl.store(state + at_state, s)


@triton.jit
def output_kernel(
    q, k, fresh, totals, before, y, norm, query_start, out, rows_total, requests, size, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    """One chunk and head: o = exp(totals) q S + lower (q_i . k_j D_ij) fresh, out = norm * o / rms(o) * silu(z).

    S is the state before the chunk, D as in chunk_kernel. Programs behind the last chunk write zeros to the rows of no
    request. Grid (chunks, VALUE_HEADS).
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    dtype: tl.constexpr = q.dtype.element_ty
    chunks, start, end = _chunk_of(chunk, query_start, requests, C, REQUESTS)
    i, dk, dv = tl.arange(0, C), tl.arange(0, DK), tl.arange(0, DV)
    if chunk < chunks:
        row = (start + i).to(tl.int64)
        live = row < end
        key_at = (row * 2 * KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS))[:, None] * DK + dk[None, :]
        qs = tl.load(q + key_at, mask=live[:, None], other=0.0)
        ks = tl.load(k + key_at, mask=live[:, None], other=0.0)
        place = (chunk * VALUE_HEADS + head).to(tl.int64)
        line = place * C + i
        total = tl.load(totals + line)
        state = tl.load(before + (place * DK + dk)[:, None] * DV + dv[None, :])
        o = tl.dot(qs, state, input_precision="ieee") * tl.exp(total)[:, None]
        lower = i[:, None] >= i[None, :]
        decay = tl.exp(tl.where(lower, total[:, None] - total[None, :], float("-inf")))
        seen = tl.dot(qs, tl.trans(ks), input_precision="ieee") * decay
        values = tl.load(fresh + line[:, None] * DV + dv[None, :])
        o = tl.dot(seen.to(dtype), values, o, input_precision="ieee")
        o *= tl.rsqrt(tl.sum(o * o, 1) / DV + eps)[:, None]
        gate_at = row[:, None] * WIDTH + CHANNELS + head * DV + dv[None, :]
        z = _projected(y, gate_at, live[:, None], size, PARTS, dtype)
        o *= tl.load(norm + dv).to(tl.float32)[None, :] * _silu(z)
        tl.store(out + (row * VALUE_HEADS + head)[:, None] * DV + dv[None, :], o.to(dtype), mask=live[:, None])
    else:
        row = (tl.load(query_start + requests) + (chunk - chunks) * C + i).to(tl.int64)
        at = (row * VALUE_HEADS + head)[:, None] * DV + dv[None, :]
        tl.store(out + at, tl.zeros((C, DV), dtype), mask=(row < rows_total)[:, None])


def step(y: Tensor, spec: DeltaNet, weights: DeltaWeights, batch: Batch, cache: StateCache) -> Tensor:
    """See `engine.kernels.deltanet.delta_mix`; one row a request."""
    parts, rows = _parts(y)
    out = torch.empty(rows, spec.value_heads * spec.value_dim, dtype=cache.conv.dtype, device=y.device)
    step_kernel[(rows, spec.value_heads)](
        y, weights.conv, weights.a_log, weights.dt_bias, weights.norm, cache.conv, cache.state, batch.positions,
        batch.state_slots, out, rows * row_width(spec), spec.key_dim**-0.5, weights.eps, L2_EPS,
        *_heads(spec), spec.conv, row_width(spec), channels(spec), parts, num_warps=4,
    )  # fmt: skip
    return out


def prefill(y: Tensor, spec: DeltaNet, weights: DeltaWeights, batch: Batch, cache: StateCache) -> Tensor:
    """See `engine.kernels.deltanet.delta_mix`; any number of rows a request."""
    parts, rows = _parts(y)
    requests, heads, dk, dv = batch.state_slots.shape[0], spec.value_heads, spec.key_dim, spec.value_dim
    bound = triton.next_power_of_2(requests)
    # One more than the chunks there can be, so that a program is left for every chunk of rows of no request.
    chunks = rows // CHUNK + requests + 1
    qk, u, w, totals = _solved_chunks(y, spec, weights, batch, cache, chunks)
    q, k = qk, qk[:, spec.key_heads :]
    before, out = qk.new_empty(chunks, heads, dk, dv), qk.new_empty(rows, heads * dv)
    block_v = min(STATE_COLUMNS, dv)
    state_kernel[(requests, heads, dv // block_v)](
        k, u, w, totals, batch.query_start, batch.positions, batch.state_slots, cache.state, before, requests,
        *_heads(spec), block_v, CHUNK, bound, num_warps=4, num_stages=STATE_STAGES,
    )  # fmt: skip
    output_kernel[(chunks, heads)](
        q, k, u, totals, before, y, weights.norm, batch.query_start, out, rows, requests, rows * row_width(spec),
        weights.eps, *_heads(spec), CHUNK, row_width(spec), channels(spec), parts, bound, num_warps=4,
    )  # fmt: skip
    return out


def _solved_chunks(
    y: Tensor, spec: DeltaNet, weights: DeltaWeights, batch: Batch, cache: StateCache, chunks: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All that needs no state: qk [rows, 2 * key_heads, DK], and u, w, totals as chunk_kernel leaves them.

    Keeps the last columns of the convolution in the cache.
    """
    parts, rows = _parts(y)
    size, width, columns = rows * row_width(spec), row_width(spec), channels(spec)
    requests, dtype = batch.state_slots.shape[0], cache.conv.dtype
    bound = triton.next_power_of_2(requests)
    heads, dk, dv = spec.value_heads, spec.key_dim, spec.value_dim

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=y.device)

    qk, v = empty(rows, 2 * spec.key_heads, dk), empty(rows, heads, dv)
    u, w = empty(chunks, heads, CHUNK, dv), empty(chunks, heads, CHUNK, dk)
    beta, g, totals = (empty(n, heads, dtype=torch.float32) for n in (rows, rows, chunks * CHUNK))
    blocks = triton.cdiv(rows, BLOCK_TOKENS)
    gates_kernel[(blocks,)](
        y, weights.a_log, weights.dt_bias, beta, g, rows, size, heads, triton.next_power_of_2(heads),
        columns + heads * dv, width, parts, BLOCK_TOKENS, TRITON_DTYPES[dtype], num_warps=2,
    )  # fmt: skip
    for part, first, queries in ((qk, 0, spec.key_heads), (v, 2 * spec.key_heads * dk, 0)):
        prepare_kernel[(blocks, part.shape[1])](
            y, weights.conv, cache.conv, batch.positions, batch.state_slots, batch.query_start, part,
            rows, requests, size, first, dk**-0.5, L2_EPS, part.shape[1], queries, part.shape[2], part is qk,
            spec.conv, width, columns, parts, bound, BLOCK_TOKENS, num_warps=4,
        )  # fmt: skip
    keep_columns_kernel[(requests, triton.cdiv(columns, 1024))](
        y, cache.conv, batch.positions, batch.state_slots, batch.query_start, size,
        width, columns, spec.conv, parts, 1024, num_warps=4,
    )  # fmt: skip
    chunk_kernel[(chunks, heads)](
        qk[:, spec.key_heads :], v, beta, g, batch.query_start, u, w, totals, requests, *_heads(spec), CHUNK, bound,
        num_warps=4,
    )  # fmt: skip
    return qk, u, w, totals


def _parts(y: Tensor) -> tuple[int, int]:
    """(parts, rows) of [T, N] or Partials [S, T, N]."""
    return (1, y.shape[0]) if y.dim() == 2 else (y.shape[0], y.shape[1])


def _heads(spec: DeltaNet) -> tuple[int, int, int, int]:
    return spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim
