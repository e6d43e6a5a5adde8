"""Triton kernels of attention_decode.py and attention_prefill.py.

Scores are kept in base 2: log2(e) is part of the scale. A quantized cache is read as it is: the scale of a key
multiplies its column of scores, the scale of a value its column of probabilities. Masked keys and values are never
loaded: a page may hold anything behind a request's last token, and 0 * NaN is NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The scales of 8-bit values are small (max / 448): raised by this, probability times scale stays normal in float16.
RAISE = tl.constexpr(256.0)


@triton.jit
def _key_rows(table_ptr, first_page, key, key_inside, start, head, KV_HEADS: tl.constexpr, PAGE: tl.constexpr,
              ONE_PAGE: tl.constexpr, CONTIGUOUS: tl.constexpr):  # fmt: skip
    """Where keys of one head stand in the cache seen as [pages * kv_heads * page_size, D]: (int64 row, offsets to it).

    ONE_PAGE: the tile that begins at `start` lies in one page, so that only the row of its first key needs 64 bits.
    CONTIGUOUS: page i of the request is first_page + i.
    """
    if ONE_PAGE:
        page = start // PAGE
        page = first_page + page if CONTIGUOUS else tl.load(table_ptr + page)
        first_row = (page.to(tl.int64) * KV_HEADS + head) * PAGE + start % PAGE
        rows = key - start
    else:
        page = key // PAGE
        page = first_page + page if CONTIGUOUS else tl.load(table_ptr + page, mask=key_inside, other=0)
        first_row = tl.full([], 0, tl.int64)
        rows = (page.to(tl.int64) * KV_HEADS + head) * PAGE + key % PAGE
    return first_row, rows


@triton.jit
def _convert(x, COMPUTE: tl.constexpr, FAST_INT8: tl.constexpr):
    """Cached values in the dtype of the products. FAST_INT8: four bytes to float16 in six instructions.

    A byte u = value + 128 behind 0x64 is the float16 1024 + u; subtracting 1152 leaves the value, exactly.
    """
    if FAST_INT8:
        x = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 bytes, offset;
                mov.b32 offset, 0x64806480;
                xor.b32 bytes, $2, 0x80808080;
                prmt.b32 $0, bytes, 0x64646464, 0x4140;
                prmt.b32 $1, bytes, 0x64646464, 0x4342;
                sub.f16x2 $0, $0, offset;
                sub.f16x2 $1, $1, offset;
            }
            """,
            "=&r,=&r,r", [x], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    return x.to(COMPUTE)


@triton.jit
def _attend_tile(
    q, acc, top, total, start, low, high, query_low, query_high, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr,
    first_page, head, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    EIGHT_BIT: tl.constexpr, FAST_INT8: tl.constexpr, COMPUTE: tl.constexpr, ONE_PAGE: tl.constexpr,
    CONTIGUOUS: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over the keys start .. start + BLOCK_N.

    q [M, DIM_BLOCK], acc float32 [M, DIM_BLOCK]; top, total float32 [M]: running maximum and sum. MASKED: only keys
    in [low, high) are loaded. CAUSAL: row m sees keys in [query_low[m], query_high[m]).
    """
    key = start + tl.arange(0, BLOCK_N)
    column = tl.arange(0, DIM_BLOCK)
    inside = (key >= low) & (key < high)
    first_row, rows = _key_rows(table_ptr, first_page, key, inside, start, head, KV_HEADS, PAGE, ONE_PAGE, CONTIGUOUS)
    offsets = rows[:, None] * DIM + column[None, :]
    k_ptr += first_row * DIM
    v_ptr += first_row * DIM
    if EIGHT_BIT:
        k_scale_ptr += first_row
        v_scale_ptr += first_row
    if MASKED:
        mask = inside[:, None] & (column < DIM)[None, :]
        k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
    elif DIM == DIM_BLOCK:
        k = tl.load(k_ptr + offsets)
        v = tl.load(v_ptr + offsets)
    else:
        k = tl.load(k_ptr + offsets, mask=(column < DIM)[None, :], other=0.0)
        v = tl.load(v_ptr + offsets, mask=(column < DIM)[None, :], other=0.0)
    scores = tl.dot(q, tl.trans(_convert(k, COMPUTE, FAST_INT8)), input_precision="ieee")
    if EIGHT_BIT:
        if MASKED:
            scores *= tl.load(k_scale_ptr + rows, mask=inside, other=0.0)[None, :]
        else:
            scores *= tl.load(k_scale_ptr + rows)[None, :]
    if MASKED:
        if CAUSAL:
            seen = (key[None, :] >= query_low[:, None]) & (key[None, :] < query_high[:, None]) & inside[None, :]
        else:
            seen = inside[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    # The scale, which is positive, is applied in the multiply-add that subtracts the maximum.
    new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
    base = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
    p = tl.exp2(scores * scale - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(p, axis=1)
    if EIGHT_BIT:
        if MASKED:
            p *= tl.load(v_scale_ptr + rows, mask=inside, other=0.0)[None, :] * RAISE
        else:
            p *= tl.load(v_scale_ptr + rows)[None, :] * RAISE
    acc = tl.dot(p.to(COMPUTE), _convert(v, COMPUTE, FAST_INT8), acc * shrink[:, None], input_precision="ieee")
    return acc, new_top, total


@triton.jit
def _segment_counts(kv_len, PARTS: tl.constexpr, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, TILE: tl.constexpr,
                    WINDOW: tl.constexpr):  # fmt: skip
    """(first key of the first tile that is read, keys of a segment, segments) for kv_len tokens; no segment for none.

    A segment has SHORTEST keys, doubled up to LONGEST while more than PARTS would be needed.
    """
    first = tl.maximum(kv_len - WINDOW, 0) // TILE * TILE if WINDOW else kv_len * 0
    seen = kv_len - first
    keys = seen * 0 + SHORTEST
    for _ in tl.static_range(6):
        keys = tl.where((keys * PARTS < seen) & (keys < LONGEST), keys * 2, keys)
    return first, keys, (seen + keys - 1) // keys


@triton.jit
def _combine_group(partial_ptr, lse_ptr, out_ptr, sinks_ptr, first_row, first_head, segments, count,
                   GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
                   SINKS: tl.constexpr, BLOCK_S: tl.constexpr):  # fmt: skip
    """out of the GROUP heads from first_row on: their segments weighed by 2^lse, in order; a sink joins once."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, DIM_BLOCK)
    inside = row < GROUP
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        top = tl.load(sinks_ptr + first_head + row, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
        total += 1.0
    acc = tl.zeros([ROWS, DIM_BLOCK], tl.float32)
    rows = (first_row + row).to(tl.int64)
    for start in range(0, count, BLOCK_S):
        segment = start + tl.arange(0, BLOCK_S)
        place = rows[None, :] * segments + segment[:, None]
        mask = (segment < count)[:, None] & inside[None, :]
        lse = tl.load(lse_ptr + place, mask=mask, other=float("-inf"), cache_modifier=".cg")
        values = tl.load(
            partial_ptr + place[:, :, None] * DIM + column[None, None, :],
            mask=mask[:, :, None] & (column < DIM)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(lse, axis=0))
        new_top = tl.where(inside, new_top, 0.0)
        weight = tl.exp2(lse - new_top[None, :])
        shrink = tl.exp2(top - new_top)
        acc = acc * shrink[:, None] + tl.sum(values * weight[:, :, None], axis=0)
        total = total * shrink + tl.sum(weight, axis=0)
        top = new_top
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    mask = inside[:, None] & (column < DIM)[None, :]
    tl.store(out_ptr + rows[:, None] * DIM + column[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["table_stride", "requests", "segments"])
def decode_attention_kernel(
    q_ptr, out_ptr, partial_ptr, lse_ptr, arrived_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr, kv_len_ptr,
    table_ptr, table_stride, requests, segments, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, PARTS: tl.constexpr, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, REQUESTS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    EIGHT_BIT: tl.constexpr, FAST_INT8: tl.constexpr, COMPUTE: tl.constexpr, ONE_PAGE: tl.constexpr,
    CONTIGUOUS: tl.constexpr, COMBINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of one group of query heads over one segment, for every work item program_id, + programs, ...

    Items run key head fastest, then segment, then request; no item is empty. The only segment of a request is written
    to `out`; of several, partial float32 [requests, heads, segments, DIM] gets the normalised output, lse float32
    [requests, heads, segments] the base-2 logarithm of the sum. COMBINE: the last program of a request and key head
    to arrive combines them; arrived int32 [requests * KV_HEADS] is zero before and after. Requests of no token get 0.
    """
    lane = tl.arange(0, REQUESTS)
    lengths = tl.load(kv_len_ptr + lane, mask=lane < requests, other=0)
    _firsts, _keys, counts = _segment_counts(lengths, PARTS, SHORTEST, LONGEST, BLOCK_N, WINDOW)
    ends = tl.cumsum(counts, axis=0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, DIM_BLOCK)
    query_mask = (row < GROUP)[:, None] & (column < DIM)[None, :]
    for item in range(tl.program_id(0), tl.sum(counts, axis=0) * KV_HEADS, tl.num_programs(0)):
        unit = item // KV_HEADS
        head = item % KV_HEADS
        before = ends <= unit
        request = tl.sum(before.to(tl.int32), axis=0)
        kv_len = tl.load(kv_len_ptr + request)
        segment = unit - tl.sum(tl.where(before, counts, 0), axis=0)
        first, keys, count = _segment_counts(kv_len, PARTS, SHORTEST, LONGEST, BLOCK_N, WINDOW)
        begin = first + segment * keys
        low = tl.maximum(kv_len - WINDOW, begin) if WINDOW else begin
        high = tl.minimum(kv_len, begin + keys)
        heads_row = request * (KV_HEADS * GROUP) + head * GROUP + row
        q = tl.load(q_ptr + heads_row[:, None] * DIM + column[None, :], mask=query_mask, other=0.0).to(COMPUTE)
        acc = tl.zeros([BLOCK_M, DIM_BLOCK], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        row_table = table_ptr + request.to(tl.int64) * table_stride
        first_page = tl.load(row_table)
        for start in range(begin, high, BLOCK_N):
            acc, top, total = _attend_tile(
                q, acc, top, total, start, low, high, low, high, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, row_table,
                first_page, head, scale, KV_HEADS, DIM, DIM_BLOCK, PAGE, BLOCK_N, EIGHT_BIT, FAST_INT8, COMPUTE,
                ONE_PAGE, CONTIGUOUS, True, False,
            )  # fmt: skip
        divisor = total * RAISE if EIGHT_BIT else total
        values = acc / divisor[:, None]
        lse = top + tl.log2(total)
        if count == 1:
            if SINKS:
                sink = tl.load(sinks_ptr + head * GROUP + row, mask=row < GROUP, other=0.0).to(tl.float32)
                values = values / (1.0 + tl.exp2(sink * 1.4426950408889634 - lse))[:, None]
            at = heads_row.to(tl.int64)[:, None] * DIM + column[None, :]
            tl.store(out_ptr + at, values.to(out_ptr.dtype.element_ty), mask=query_mask)
        else:
            place = heads_row.to(tl.int64) * segments + segment
            tl.store(partial_ptr + place[:, None] * DIM + column[None, :], values, mask=query_mask)
            tl.store(lse_ptr + place, lse, mask=row < GROUP)
            if COMBINE:
                tl.debug_barrier()
                counter = arrived_ptr + request * KV_HEADS + head
                if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1:
                    tl.debug_barrier()
                    _combine_group(
                        partial_ptr, lse_ptr, out_ptr, sinks_ptr, request * (KV_HEADS * GROUP) + head * GROUP,
                        head * GROUP, segments, count, GROUP, ROWS, DIM, DIM_BLOCK, SINKS, 4,
                    )  # fmt: skip
                    tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
    for request in range(tl.program_id(0), requests, tl.num_programs(0)):
        if tl.load(kv_len_ptr + request) == 0:
            zeros = tl.zeros([BLOCK_M, DIM_BLOCK], out_ptr.dtype.element_ty)
            for head in range(KV_HEADS):
                padded = row.to(tl.int64) + request * (KV_HEADS * GROUP) + head * GROUP
                tl.store(out_ptr + padded[:, None] * DIM + column[None, :], zeros, mask=query_mask)


@triton.jit(do_not_specialize=["segments"])
def combine_segments_kernel(
    partial_ptr, lse_ptr, out_ptr, sinks_ptr, kv_len_ptr, segments,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, PARTS: tl.constexpr, SHORTEST: tl.constexpr, LONGEST: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combines the segments of one head of a request that has several. Grid (R, heads)."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kv_len = tl.load(kv_len_ptr + request)
    _first, _keys, count = _segment_counts(kv_len, PARTS, SHORTEST, LONGEST, BLOCK_N, WINDOW)
    if count > 1:
        _combine_group(
            partial_ptr, lse_ptr, out_ptr, sinks_ptr, request * tl.num_programs(1) + head, head, segments, count,
            1, 1, DIM, DIM_BLOCK, SINKS, BLOCK_S,
        )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride", "requests", "rows"])
def prefill_attention_kernel(
    q_ptr, out_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr, query_start_ptr, kv_len_ptr, table_ptr,
    table_stride, requests, rows, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, REQUESTS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    EIGHT_BIT: tl.constexpr, FAST_INT8: tl.constexpr, COMPUTE: tl.constexpr, ONE_PAGE: tl.constexpr,
    CONTIGUOUS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of BLOCK_M packed rows (position * GROUP + head) of one request and key head. Grid (tiles, kv heads).

    Tiles are taken from the last to the first: late tiles of a prompt read the most keys and start first. Programs
    behind the last tile write zeros to the rows that belong to no request.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    lane = tl.arange(0, REQUESTS)
    starts = tl.load(query_start_ptr + lane, mask=lane < requests, other=0)
    stops = tl.load(query_start_ptr + lane + 1, mask=lane < requests, other=0)
    counts = ((stops - starts) * GROUP + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(counts, axis=0)
    tiles = tl.sum(counts, axis=0)
    head = tl.program_id(1)
    column = tl.arange(0, DIM_BLOCK)
    program = tl.program_id(0)
    if program >= tiles:
        row = tl.load(query_start_ptr + requests) * GROUP + (program - tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
        place = (row // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + row % GROUP
        zeros = tl.zeros([BLOCK_M, DIM_BLOCK], out_ptr.dtype.element_ty)
        mask = (row < rows * GROUP)[:, None] & (column < DIM)[None, :]
        tl.store(out_ptr + place[:, None] * DIM + column[None, :], zeros, mask=mask)
    else:
        unit = tiles - 1 - program
        before = ends <= unit
        request = tl.sum(before.to(tl.int32), axis=0)
        tile = unit - tl.sum(tl.where(before, counts, 0), axis=0)
        query_start = tl.load(query_start_ptr + request)
        query_len = tl.load(query_start_ptr + request + 1) - query_start
        kv_len = tl.load(kv_len_ptr + request)
        flat = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        row_inside = flat < query_len * GROUP
        place = (query_start + flat // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + flat % GROUP
        offsets = place[:, None] * DIM + column[None, :]
        mask = row_inside[:, None] & (column < DIM)[None, :]
        q = tl.load(q_ptr + offsets, mask=mask, other=0.0).to(COMPUTE)

        past = kv_len - query_len
        query_high = past + flat // GROUP + 1
        query_low = query_high - WINDOW if WINDOW else query_high * 0
        high = tl.minimum(past + (tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1, kv_len)
        low = tl.maximum(past + tile * BLOCK_M // GROUP + 1 - WINDOW, 0) if WINDOW else 0
        begin = low // BLOCK_N * BLOCK_N if WINDOW else 0
        acc = tl.zeros([BLOCK_M, DIM_BLOCK], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        row_table = table_ptr + request.to(tl.int64) * table_stride
        first_page = tl.load(row_table)
        masked_from = begin
        if not WINDOW:
            masked_from = tl.maximum(past + tile * BLOCK_M // GROUP + 1, 0) // BLOCK_N * BLOCK_N
            for start in range(0, masked_from, BLOCK_N):
                acc, top, total = _attend_tile(
                    q, acc, top, total, start, low, high, query_low, query_high, k_ptr, v_ptr, k_scale_ptr,
                    v_scale_ptr, row_table, first_page, head, scale, KV_HEADS, DIM, DIM_BLOCK, PAGE, BLOCK_N,
                    EIGHT_BIT, FAST_INT8, COMPUTE, ONE_PAGE, CONTIGUOUS, False, True,
                )  # fmt: skip
        for start in range(masked_from, high, BLOCK_N):
            acc, top, total = _attend_tile(
                q, acc, top, total, start, low, high, query_low, query_high, k_ptr, v_ptr, k_scale_ptr,
                v_scale_ptr, row_table, first_page, head, scale, KV_HEADS, DIM, DIM_BLOCK, PAGE, BLOCK_N,
                EIGHT_BIT, FAST_INT8, COMPUTE, ONE_PAGE, CONTIGUOUS, True, True,
            )  # fmt: skip
        if SINKS:
            sink = tl.load(sinks_ptr + head * GROUP + flat % GROUP).to(tl.float32) * 1.4426950408889634
            new_top = tl.maximum(top, sink)
            shrink = tl.exp2(top - new_top)
            acc *= shrink[:, None]
            total = total * shrink + tl.exp2(sink - new_top)
        divisor = tl.where(total > 0, total, 1.0)
        if EIGHT_BIT:
            divisor *= RAISE
        out = acc / divisor[:, None]
        tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["length", "padded"])
def gather_pages_kernel(
    k_ptr, v_ptr, table_ptr, k_out_ptr, v_out_ptr, length, padded,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK keys and values of one head out of their pages: out [kv heads, padded, DIM], zeros from `length` on."""
    head = tl.program_id(1)
    key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, DIM_BLOCK)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    known = key < length
    page = tl.load(table_ptr + key // PAGE, mask=known, other=0).to(tl.int64)
    at = ((page * tl.num_programs(1) + head) * PAGE + key % PAGE)[:, None] * DIM + column
    to = (head.to(tl.int64) * padded + key)[:, None] * DIM + column
    read = known[:, None] & (column < DIM)
    written = (key < padded)[:, None] & (column < DIM)
    tl.store(k_out_ptr + to, tl.load(k_ptr + at, mask=read, other=0.0), mask=written)
    tl.store(v_out_ptr + to, tl.load(v_ptr + at, mask=read, other=0.0), mask=written)
