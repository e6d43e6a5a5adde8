"""Triton kernel of rope.py.

A head of DIM values is handled in three pieces: the first and the second members of the rotated pairs (HALF values
each) and the REST that passes through. No piece is ever read twice, whatever the pairing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels._device import load_sum


@triton.jit
def _load_piece(y_row, bias_ptr, column, mask, split_stride, SPLITS: tl.constexpr, BIAS: tl.constexpr):
    x = load_sum(y_row + column, mask, split_stride, SPLITS)
    if BIAS:
        x += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _weight_piece(weight_ptr, index, mask, PLUS_ONE: tl.constexpr):
    weight = tl.load(weight_ptr + index, mask=mask, other=0.0).to(tl.float32)
    if PLUS_ONE:
        weight += 1.0
    return weight


@triton.jit
def _store_quantized(pointer, a, b, c, at, a_index, b_index, c_index, a_mask, c_mask, inverse,
                     LARGEST: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    """Stores the pieces of the heads, times `inverse` and rounded for an 8-bit cache (LARGEST > 0)."""
    _store_piece(pointer + at + a_index, a, a_mask, inverse, LARGEST)
    _store_piece(pointer + at + b_index, b, a_mask, inverse, LARGEST)
    if REST:
        _store_piece(pointer + at + c_index, c, c_mask, inverse, LARGEST)


@triton.jit
def _store_piece(pointers, x, mask, inverse, LARGEST: tl.constexpr):
    dtype: tl.constexpr = pointers.dtype.element_ty
    if LARGEST > 0:
        x = x * inverse
        if LARGEST == 127:
            x = tl.floor(x + 0.5)
        x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    tl.store(pointers, x.to(dtype), mask=mask)


@triton.jit
def _write_cache(cache_ptr, scale_ptr, slot, head, head_inside, a, b, c, a_index, b_index, c_index, a_mask, c_mask,
                 KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, LARGEST: tl.constexpr,
                 REST: tl.constexpr):  # fmt: skip
    """Writes the pieces of the heads at the slot of the paged cache, with their scales where it is quantized."""
    page = (slot // PAGE).to(tl.int64)
    place = (page * KV_HEADS + head) * PAGE + slot % PAGE
    inverse = 1.0
    if LARGEST > 0:
        extreme = tl.maximum(tl.max(tl.abs(a), axis=1), tl.max(tl.abs(b), axis=1))
        if REST:
            extreme = tl.maximum(extreme, tl.max(tl.abs(c), axis=1))
        extreme = extreme[:, None]
        inverse = tl.where(extreme > 0, LARGEST / tl.where(extreme > 0, extreme, 1.0), 0.0)
        tl.store(scale_ptr + place, extreme / LARGEST, mask=head_inside)
    _store_quantized(cache_ptr, a, b, c, place * DIM, a_index, b_index, c_index, a_mask, c_mask, inverse,
                     LARGEST, REST)  # fmt: skip


@triton.jit
def qk_norm_rope_write_kernel(
    y_ptr, q_ptr, gate_ptr, bias_ptr, q_weight_ptr, k_weight_ptr, table_ptr, positions_ptr, slots_ptr,
    k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, split_stride, row_stride, table_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    PER_PROGRAM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST: tl.constexpr,
    REST_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, QUERY_SCALE: tl.constexpr, GATE: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr, LARGEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, query blocks + key blocks): PER_PROGRAM query heads a program, or as many key and value heads."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    query_blocks: tl.constexpr = (HEADS + PER_PROGRAM - 1) // PER_PROGRAM
    is_query = block < query_blocks
    head = tl.where(is_query, block, block - query_blocks) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)[:, None]
    head_inside = head < tl.where(is_query, HEADS, KV_HEADS)
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    a_index = 2 * pair if INTERLEAVED else pair
    b_index = a_index + (1 if INTERLEAVED else HALF)
    c_index = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
    a_mask = head_inside & (pair < HALF)
    c_mask = head_inside & (c_index < DIM)
    head_width: tl.constexpr = 2 * DIM if GATE else DIM
    k_start: tl.constexpr = HEADS * head_width
    start = tl.where(is_query, head * head_width, k_start + head * DIM)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    y_row = y_ptr + row * row_stride
    a = _load_piece(y_row, bias_ptr, start + a_index, a_mask, split_stride, SPLITS, BIAS)
    b = _load_piece(y_row, bias_ptr, start + b_index, a_mask, split_stride, SPLITS, BIAS)
    c = tl.zeros([PER_PROGRAM, REST_BLOCK], tl.float32)
    if REST:
        c = _load_piece(y_row, bias_ptr, start + c_index, c_mask, split_stride, SPLITS, BIAS)
    if NORM:
        square = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        if REST:
            square += tl.sum(c * c, axis=1)
        scale = tl.rsqrt(square / DIM + eps)[:, None]
        weight_ptr = k_weight_ptr
        if is_query:
            weight_ptr = q_weight_ptr
        a *= scale * _weight_piece(weight_ptr, a_index, pair < HALF, PLUS_ONE)
        b *= scale * _weight_piece(weight_ptr, b_index, pair < HALF, PLUS_ONE)
        if REST:
            c *= scale * _weight_piece(weight_ptr, c_index, c_index < DIM, PLUS_ONE)
    table_row = table_ptr + tl.load(positions_ptr + row).to(tl.int64) * table_stride
    cos = tl.load(table_row + pair, mask=pair < HALF, other=0.0)
    sin = tl.load(table_row + HALF + pair, mask=pair < HALF, other=0.0)
    a, b = a * cos - b * sin, b * cos + a * sin

    if is_query:
        if QUERY_SCALE:
            factor = tl.load(table_row + 2 * HALF)
            a *= factor
            b *= factor
            c *= factor
        at = (row * HEADS + head) * DIM
        _store_quantized(q_ptr, a, b, c, at, a_index, b_index, c_index, a_mask, c_mask, 1.0, 0, REST)
        if GATE:
            gate_a = _load_piece(y_row, bias_ptr, start + DIM + a_index, a_mask, split_stride, SPLITS, BIAS)
            gate_b = _load_piece(y_row, bias_ptr, start + DIM + b_index, a_mask, split_stride, SPLITS, BIAS)
            gate_c = c
            if REST:
                gate_c = _load_piece(y_row, bias_ptr, start + DIM + c_index, c_mask, split_stride, SPLITS, BIAS)
            _store_quantized(
                gate_ptr, gate_a, gate_b, gate_c, at, a_index, b_index, c_index, a_mask, c_mask, 1.0, 0, REST
            )
    else:
        slot = tl.load(slots_ptr + row)
        _write_cache(k_cache_ptr, k_scale_ptr, slot, head, head_inside, a, b, c, a_index, b_index, c_index,
                     a_mask, c_mask, KV_HEADS, DIM, PAGE, LARGEST, REST)  # fmt: skip
        start += KV_HEADS * DIM
        a = _load_piece(y_row, bias_ptr, start + a_index, a_mask, split_stride, SPLITS, BIAS)
        b = _load_piece(y_row, bias_ptr, start + b_index, a_mask, split_stride, SPLITS, BIAS)
        if REST:
            c = _load_piece(y_row, bias_ptr, start + c_index, c_mask, split_stride, SPLITS, BIAS)
        _write_cache(v_cache_ptr, v_scale_ptr, slot, head, head_inside, a, b, c, a_index, b_index, c_index,
                     a_mask, c_mask, KV_HEADS, DIM, PAGE, LARGEST, REST)  # fmt: skip
