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
    """Grid (rows, blocks of query, gate, key and value heads): a program has PER_PROGRAM heads of one kind and row.

    It reads its values of y (and of every partial sum) once and writes them once. Positions, slots, the table and the
    weights were written by no kernel: they are read before the wait.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    query_blocks: tl.constexpr = (HEADS + PER_PROGRAM - 1) // PER_PROGRAM
    key_first: tl.constexpr = 2 * query_blocks if GATE else query_blocks
    value_first: tl.constexpr = key_first + (KV_HEADS + PER_PROGRAM - 1) // PER_PROGRAM
    is_query = block < query_blocks
    is_gate = (block >= query_blocks) & (block < key_first)
    is_value = block >= value_first
    of_queries = block < key_first
    first = tl.where(is_query, 0, tl.where(is_gate, query_blocks, tl.where(is_value, value_first, key_first)))
    head = (block - first) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)[:, None]
    head_inside = head < tl.where(of_queries, HEADS, KV_HEADS)
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    a_index = 2 * pair if INTERLEAVED else pair
    b_index = a_index + (1 if INTERLEAVED else HALF)
    c_index = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
    a_mask = head_inside & (pair < HALF)
    c_mask = head_inside & (c_index < DIM)
    head_width: tl.constexpr = 2 * DIM if GATE else DIM
    k_start: tl.constexpr = HEADS * head_width
    v_start: tl.constexpr = k_start + KV_HEADS * DIM
    own_start = tl.where(is_gate, DIM, tl.where(is_value, v_start, tl.where(of_queries, 0, k_start)))
    start = own_start + head * tl.where(of_queries, head_width, DIM)

    slot = tl.load(slots_ptr + row)
    table_row = table_ptr + tl.load(positions_ptr + row).to(tl.int64) * table_stride
    cos = tl.load(table_row + pair, mask=pair < HALF, other=0.0)
    sin = tl.load(table_row + HALF + pair, mask=pair < HALF, other=0.0)
    if NORM:
        weight_ptr = k_weight_ptr
        if is_query:
            weight_ptr = q_weight_ptr
        a_weight = _weight_piece(weight_ptr, a_index, pair < HALF, PLUS_ONE)
        b_weight = _weight_piece(weight_ptr, b_index, pair < HALF, PLUS_ONE)
        if REST:
            c_weight = _weight_piece(weight_ptr, c_index, c_index < DIM, PLUS_ONE)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    y_row = y_ptr + row * row_stride
    a = _load_piece(y_row, bias_ptr, start + a_index, a_mask, split_stride, SPLITS, BIAS)
    b = _load_piece(y_row, bias_ptr, start + b_index, a_mask, split_stride, SPLITS, BIAS)
    c = tl.zeros([PER_PROGRAM, REST_BLOCK], tl.float32)
    if REST:
        c = _load_piece(y_row, bias_ptr, start + c_index, c_mask, split_stride, SPLITS, BIAS)
    if (not is_gate) & (not is_value):
        if NORM:
            square = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
            if REST:
                square += tl.sum(c * c, axis=1)
            scale = tl.rsqrt(square / DIM + eps)[:, None]
            a *= scale * a_weight
            b *= scale * b_weight
            if REST:
                c *= scale * c_weight
        a, b = a * cos - b * sin, b * cos + a * sin
        if QUERY_SCALE:
            factor = tl.where(is_query, tl.load(table_row + 2 * HALF), 1.0)
            a *= factor
            b *= factor
            c *= factor
    if of_queries:
        out_ptr = q_ptr
        if GATE:  # noqa: SIM102 - the outer branch is taken when compiling
            if is_gate:
                out_ptr = gate_ptr
        at = (row * HEADS + head) * DIM
        _store_quantized(out_ptr, a, b, c, at, a_index, b_index, c_index, a_mask, c_mask, 1.0, 0, REST)
    else:
        cache_ptr, scale_ptr = k_cache_ptr, k_scale_ptr
        if is_value:
            cache_ptr = v_cache_ptr
            if LARGEST > 0:
                scale_ptr = v_scale_ptr
        _write_cache(cache_ptr, scale_ptr, slot, head, head_inside, a, b, c, a_index, b_index, c_index,
                     a_mask, c_mask, KV_HEADS, DIM, PAGE, LARGEST, REST)  # fmt: skip
