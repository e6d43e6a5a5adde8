"""The Triton kernels behind engine/kernels/deltanet.py, which alone imports this file.

Decode is one kernel. A prompt takes more: gates; convolution of q, k and v; the convolution's past columns; within
every chunk of 64 tokens the triangular solve; the pass over the chunks, which carries the state; the gated norm. A
chunk belongs to one request, so that requests of any lengths go together and none sees another.
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
    HEADS: tl.constexpr, D: tl.constexpr, NORMALIZE: tl.constexpr, CONV: tl.constexpr, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr, PARTS: tl.constexpr, REQUESTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One head of q, k or v (whose channels begin at `first`) of TOKENS rows: out [rows, HEADS, D]."""
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    dtype: tl.constexpr = conv.dtype.element_ty
    request = _request_of(row, query_start, requests, REQUESTS)
    live = (row < rows_total) & (request < requests)
    wide = row.to(tl.int64)
    channel = first + head * D + tl.arange(0, D)
    start = tl.load(query_start + request, mask=live, other=0)
    slot = tl.load(state_slots + request, mask=live, other=0).to(tl.int64)
    position = tl.load(positions + row, mask=live, other=0)
    total = tl.zeros((TOKENS, D), tl.float32)
    for back in tl.static_range(CONV):
        here = live & (row - back >= start)
        at = (wide - back)[:, None] * WIDTH + channel[None, :]
        value = _projected(y, at, here[:, None], size, PARTS, dtype)
        past = position - back
        stored = live & (row - back < start) & (past >= 0)
        at = (slot * CONV + (past + CONV) % CONV)[:, None] * CHANNELS + channel[None, :]
        value += tl.load(conv + at, mask=stored[:, None], other=0.0).to(tl.float32)
        total += value * tl.load(conv_weight + channel * CONV + CONV - 1 - back).to(tl.float32)[None, :]
    total = _silu(total)
    if NORMALIZE:
        total *= (scale * tl.rsqrt(tl.sum(total * total, 1) + l2_eps))[:, None]
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
def chunk_kernel(
    q, k, v, beta, g, query_start, u, w, attention, requests,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    REQUESTS: tl.constexpr,
):  # fmt: skip
    """What a chunk needs apart from the state, for one value head:

    with D_ij = exp(g_j+1 + .. + g_i) and L = strictly lower (beta_i k_i . k_j D_ij): u = (1 + L)^-1 beta v,
    w = (1 + L)^-1 beta k exp(cumsum g), attention = lower (q_i . k_j D_ij). g becomes its running sum.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    dtype: tl.constexpr = q.dtype.element_ty
    index = tl.arange(0, REQUESTS)
    starts = tl.load(query_start + index, mask=index < requests, other=0)
    ends = tl.load(query_start + 1 + index, mask=index < requests, other=0)
    chunks = (ends - starts + C - 1) // C
    before = tl.cumsum(chunks, 0) - chunks
    mine = (before <= chunk) & (chunk < before + chunks)
    if tl.sum(mine.to(tl.int32), 0) > 0:
        start = tl.sum(tl.where(mine, starts + (chunk - before) * C, 0), 0)
        end = tl.sum(tl.where(mine, ends, 0), 0)
        i = tl.arange(0, C)
        row = (start + i).to(tl.int64)
        live = row < end
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        dk, dv = tl.arange(0, DK), tl.arange(0, DV)
        key_at = (row * KEY_HEADS + key_head)[:, None] * DK + dk[None, :]
        ks = tl.load(k + key_at, mask=live[:, None], other=0.0)
        qs = tl.load(q + key_at, mask=live[:, None], other=0.0)
        b = tl.load(beta + row * VALUE_HEADS + head, mask=live, other=0.0)
        total = tl.cumsum(tl.load(g + row * VALUE_HEADS + head, mask=live, other=0.0), 0)
        lower = i[:, None] >= i[None, :]
        decay = tl.exp(tl.where(lower, total[:, None] - total[None, :], float("-inf")))
        kk = tl.dot(ks, tl.trans(ks), input_precision="ieee")
        x = tl.where(i[:, None] > i[None, :], -kk * decay * b[:, None], 0.0)
        for line in range(1, C):
            own = tl.sum(tl.where((i == line)[:, None], x, 0.0), 0)
            x = tl.where((i == line)[:, None], (own + tl.sum(own[:, None] * x, 0))[None, :], x)
        x += tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        vs = tl.load(v + (row * VALUE_HEADS + head)[:, None] * DV + dv[None, :], mask=live[:, None], other=0.0)
        us = tl.dot(x, vs.to(tl.float32) * b[:, None], input_precision="tf32")
        ws = tl.dot(x, ks.to(tl.float32) * (b * tl.exp(total))[:, None], input_precision="tf32")
        seen = tl.dot(qs, tl.trans(ks), input_precision="ieee") * decay
        to = (row * VALUE_HEADS + head)[:, None]
        tl.store(u + to * DV + dv[None, :], us.to(dtype), mask=live[:, None])
        tl.store(w + to * DK + dk[None, :], ws.to(dtype), mask=live[:, None])
        tl.store(attention + to * C + i[None, :], seen.to(dtype), mask=live[:, None])
        tl.store(g + row * VALUE_HEADS + head, total, mask=live)


@triton.jit
def state_kernel(
    q, k, u, w, attention, g, query_start, positions, state_slots, state, out,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Carries BV columns of one head's state over the chunks of one request: out [T, VALUE_HEADS, DV]."""
    request, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(query_start + request), tl.load(query_start + request + 1)
    if end > start:
        dtype: tl.constexpr = q.dtype.element_ty
        slot = tl.load(state_slots + request).to(tl.int64)
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        dk, dv, i = tl.arange(0, DK), tl.program_id(2) * BV + tl.arange(0, BV), tl.arange(0, C)
        at_state = state + ((slot * VALUE_HEADS + head) * DK + dk)[:, None] * DV + dv[None, :]
        started = tl.load(positions + start) > 0
        s = tl.load(at_state, mask=(dk < _if(started, DK))[:, None] & (dv < DV)[None, :], other=0.0)
        for first in range(start, end, C):
            row = (first + i).to(tl.int64)
            live = row < end
            line = row * VALUE_HEADS + head
            total = tl.load(g + line, mask=live, other=0.0)
            last = tl.load(g + (tl.minimum(first + C, end) - 1).to(tl.int64) * VALUE_HEADS + head)
            ws = tl.load(w + line[:, None] * DK + dk[None, :], mask=live[:, None], other=0.0)
            fresh = tl.load(u + line[:, None] * DV + dv[None, :], mask=live[:, None], other=0.0).to(tl.float32)
            rounded = s.to(dtype)
            fresh -= tl.dot(ws, rounded, input_precision="ieee")
            key_at = (row * KEY_HEADS + key_head)[:, None] * DK + dk[None, :]
            qs = tl.load(q + key_at, mask=live[:, None], other=0.0)
            seen = tl.load(attention + line[:, None] * C + i[None, :], mask=live[:, None], other=0.0)
            o = tl.dot(qs, rounded, input_precision="ieee") * tl.exp(total)[:, None]
            o = tl.dot(seen, fresh.to(dtype), o, input_precision="ieee")
            tl.store(out + line[:, None] * DV + dv[None, :], o.to(out.dtype.element_ty), mask=live[:, None])
            ks = tl.load(k + key_at, mask=live[:, None], other=0.0)
            fresh *= tl.where(live, tl.exp(last - total), 0.0)[:, None]
            s = tl.dot(tl.trans(ks), fresh.to(dtype), s * tl.exp(last), input_precision="ieee")
        tl.store(at_state, s)


@triton.jit
def gated_norm_kernel(
    o, y, norm, query_start, out, rows_total, requests, size, eps,
    VALUE_HEADS: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """out = norm * o / rms(o) * silu(z); rows of no request become zeros."""
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head, column = tl.program_id(1), tl.arange(0, DV)
    dtype: tl.constexpr = out.dtype.element_ty
    inside = (row < rows_total)[:, None]
    live = (row < tl.load(query_start + requests))[:, None] & inside
    at = (row.to(tl.int64) * VALUE_HEADS + head)[:, None] * DV + column[None, :]
    value = tl.load(o + at, mask=live, other=0.0).to(tl.float32)
    gate_at = row.to(tl.int64)[:, None] * WIDTH + CHANNELS + head * DV + column[None, :]
    z = _projected(y, gate_at, live, size, PARTS, dtype)
    value *= tl.rsqrt(tl.sum(value * value, 1) / DV + eps)[:, None]
    value *= tl.load(norm + column).to(tl.float32)[None, :] * _silu(z)
    tl.store(out + at, value.to(dtype), mask=inside)


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
    size, width, columns = rows * row_width(spec), row_width(spec), channels(spec)
    requests, dtype = batch.state_slots.shape[0], cache.conv.dtype
    bound = triton.next_power_of_2(requests)
    heads, dk, dv = spec.value_heads, spec.key_dim, spec.value_dim

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=y.device)

    q, k = empty(rows, spec.key_heads, dk), empty(rows, spec.key_heads, dk)
    v, u, w = empty(rows, heads, dv), empty(rows, heads, dv), empty(rows, heads, dk)
    beta, g = empty(rows, heads, dtype=torch.float32), empty(rows, heads, dtype=torch.float32)
    attention, out = empty(rows, heads, CHUNK), empty(rows, heads * dv)
    blocks = triton.cdiv(rows, BLOCK_TOKENS)
    gates_kernel[(blocks,)](
        y, weights.a_log, weights.dt_bias, beta, g, rows, size, heads, triton.next_power_of_2(heads),
        columns + heads * dv, width, parts, BLOCK_TOKENS, TRITON_DTYPES[dtype], num_warps=2,
    )  # fmt: skip
    keys = spec.key_heads * dk
    for part, first, scale in ((q, 0, dk**-0.5), (k, keys, 1.0), (v, 2 * keys, 1.0)):
        prepare_kernel[(blocks, part.shape[1])](
            y, weights.conv, cache.conv, batch.positions, batch.state_slots, batch.query_start, part,
            rows, requests, size, first, scale, L2_EPS, part.shape[1], part.shape[2], part is not v,
            spec.conv, width, columns, parts, bound, BLOCK_TOKENS, num_warps=4,
        )  # fmt: skip
    keep_columns_kernel[(requests, triton.cdiv(columns, 1024))](
        y, cache.conv, batch.positions, batch.state_slots, batch.query_start, size,
        width, columns, spec.conv, parts, 1024, num_warps=4,
    )  # fmt: skip
    chunk_kernel[(rows // CHUNK + requests, heads)](
        q, k, v, beta, g, batch.query_start, u, w, attention, requests, *_heads(spec), CHUNK, bound, num_warps=4,
    )  # fmt: skip
    block_v = min(32, dv)
    state_kernel[(requests, heads, dv // block_v)](
        q, k, u, w, attention, g, batch.query_start, batch.positions, batch.state_slots, cache.state, v,
        *_heads(spec), block_v, CHUNK, num_warps=4, num_stages=2,
    )  # fmt: skip
    gated_norm_kernel[(blocks, heads)](
        v, y, weights.norm, batch.query_start, out, rows, requests, size, weights.eps,
        heads, dv, width, columns, parts, BLOCK_TOKENS, num_warps=4,
    )  # fmt: skip
    return out


def _parts(y: Tensor) -> tuple[int, int]:
    """(parts, rows) of [T, N] or Partials [S, T, N]."""
    return (1, y.shape[0]) if y.dim() == 2 else (y.shape[0], y.shape[1])


def _heads(spec: DeltaNet) -> tuple[int, int, int, int]:
    return spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim
