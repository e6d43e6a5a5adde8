"""Decode attention in Gluon for 16-bit and 8-bit pages: one launch, no value changes threads between load and product.

A tile is 64 keys; each of four warps owns 16 of them and keeps its own online softmax, so that the loop has no
exchange between warps. A thread copies 16 bytes at a time into its own part of a ring in shared memory and reads back
what it copied. The bytes arrive in the threads that the tensor core wants them in because the order of head dimensions
is free: in q.k it is permuted on both sides, in p.v it permutes the columns of the result.

The copies run ahead over the borders of work items. The last program of a request and key head to finish combines the
segments in order; repeated runs are bit-equal.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from engine.kernels._gluon import barrier, copy_async
from engine.kernels.w4_gluon import pdl_launch, pdl_wait

TILE = gl.constexpr(64)
# The scales of 8-bit values are small (max / 448): raised by this, probability times scale stays normal in float16.
RAISE = gl.constexpr(256.0)


@gluon.jit
def _pair_halves(words, T: gl.constexpr):
    """int32 words of two 16-bit values -> (low values, high values)."""
    low, high = gl.inline_asm_elementwise(
        """
        prmt.b32 $0, $2, $3, 0x5410;
        prmt.b32 $1, $2, $3, 0x7632;
        """,
        "=&r,=&r,r,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=2,
    )  # fmt: skip
    return low.to(T, bitcast=True), high.to(T, bitcast=True)


@gluon.jit
def _int8_values(words):
    """int32 words of four int8 -> four float16, in the order of bytes: 0x6400 | (value + 128) is 1152 + value."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, t, u, offset;
        mov.b32 offset, 0x64806480;
        xor.b32 a, $4, 0x80808080;
        xor.b32 b, $5, 0x80808080;
        prmt.b32 t, a, b, 0x5140;
        prmt.b32 u, a, b, 0x7362;
        prmt.b32 $0, t, 0x64646464, 0x4140;
        prmt.b32 $1, t, 0x64646464, 0x4342;
        prmt.b32 $2, u, 0x64646464, 0x4140;
        prmt.b32 $3, u, 0x64646464, 0x4342;
        sub.f16x2 $0, $0, offset;
        sub.f16x2 $1, $1, offset;
        sub.f16x2 $2, $2, offset;
        sub.f16x2 $3, $3, offset;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r", [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _fp8_values(words):
    """int32 words of four e4m3 values -> four float16, in the order of bytes."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, u;
        .reg .b16 t0, t1, u0, u1;
        prmt.b32 t, $4, $5, 0x5140;
        prmt.b32 u, $4, $5, 0x7362;
        mov.b32 {t0, t1}, t;
        mov.b32 {u0, u1}, u;
        cvt.rn.f16x2.e4m3x2 $0, t0;
        cvt.rn.f16x2.e4m3x2 $1, t1;
        cvt.rn.f16x2.e4m3x2 $2, u0;
        cvt.rn.f16x2.e4m3x2 $3, u1;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r", [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _unpack(words, E: gl.constexpr, FP8: gl.constexpr, T: gl.constexpr):
    """int32 [64, C] -> T [64, E, C] of the E values in each word."""
    if E == 2:
        low, high = _pair_halves(words, T)
        values = gl.join(low, high)
    else:
        if FP8:
            a, b, c, d = _fp8_values(words)
        else:
            a, b, c, d = _int8_values(words)
        quad = gl.join(gl.join(a, b), gl.join(c, d))
        values = quad.permute([0, 1, 3, 2]).reshape([words.shape[0], words.shape[1], 4])
    return values.permute([0, 2, 1])


@gluon.jit
def _first_tile(length, WINDOW: gl.constexpr):
    """The first key of the first tile that a request of `length` tokens reads: segments are counted from it."""
    return gl.maximum(length - WINDOW, 0) // TILE * TILE if WINDOW else length * 0


@gluon.jit
def _segment_keys(seen, PARTS: gl.constexpr, SHORTEST: gl.constexpr, LONGEST: gl.constexpr):
    """Keys of a segment for a request that reads `seen`: SHORTEST, doubled up to LONGEST while PARTS do not suffice."""
    keys = seen * 0 + SHORTEST
    for _ in gl.static_range(6):
        keys = gl.where((keys * PARTS < seen) & (keys < LONGEST), keys * 2, keys)
    return keys


@gluon.jit
def _locate(item, lane, lengths, counts, ends, KV_HEADS: gl.constexpr, WINDOW: gl.constexpr, PARTS: gl.constexpr,
            SHORTEST: gl.constexpr, LONGEST: gl.constexpr):  # fmt: skip
    """(request, head, segment, segments, first key, end, kv_len) of a work item."""
    unit = item // KV_HEADS
    before = ends <= unit
    request = gl.sum(before.to(gl.int32), 0)
    segment = unit - gl.sum(gl.where(before, counts, 0), 0)
    kv_len = gl.sum(gl.where(lane == request, lengths, 0), 0)
    first = _first_tile(kv_len, WINDOW)
    keys = _segment_keys(kv_len - first, PARTS, SHORTEST, LONGEST)
    count = (kv_len - first + keys - 1) // keys
    low = first + segment * keys
    high = gl.minimum(low + keys, kv_len)
    low = gl.maximum(low, kv_len - WINDOW) if WINDOW else low
    return request, item % KV_HEADS, segment, count, low, high, kv_len


@gluon.jit
def _fetch(k_ring, v_ring, k_scales, v_scales, slot, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, page, start, low, high,
           head, KV_HEADS: gl.constexpr, PAGE: gl.constexpr, E: gl.constexpr, C: gl.constexpr,
           k_layout: gl.constexpr, v_layout: gl.constexpr):  # fmt: skip
    """Starts the copies of one tile; keys outside [low, high) arrive as zeros."""
    first_row = (page.to(gl.int64) * KV_HEADS + head) * PAGE + start % PAGE
    k_row = gl.arange(0, TILE, gl.SliceLayout(1, k_layout))
    k_column = gl.arange(0, C, gl.SliceLayout(0, k_layout))
    inside = (start + k_row >= low) & (start + k_row < high)
    copy_async(
        k_ring.index(slot), k_ptr + first_row * C + (k_row[:, None] * C + k_column[None, :]), mask=inside[:, None]
    )
    v_row = gl.arange(0, TILE, gl.SliceLayout(1, v_layout))
    v_column = gl.arange(0, C, gl.SliceLayout(0, v_layout))
    inside = (start + v_row >= low) & (start + v_row < high)
    copy_async(
        v_ring.index(slot), v_ptr + first_row * C + (v_row[:, None] * C + v_column[None, :]), mask=inside[:, None]
    )
    if E == 4:
        scale_layout: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
        warp = gl.arange(0, 4, gl.SliceLayout(1, scale_layout))
        key = gl.arange(0, 16, gl.SliceLayout(0, scale_layout))
        place = warp[:, None] * 16 + key[None, :]
        inside = (start + place >= low) & (start + place < high)
        copy_async(k_scales.index(slot), k_scale_ptr + first_row + place, mask=inside)
        copy_async(v_scales.index(slot), v_scale_ptr + first_row + place, mask=inside)


@gluon.jit
def _load_query(q_ptr, request, head, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, E: gl.constexpr, C: gl.constexpr,
                Q: gl.constexpr, T: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """The query heads of a key head as the A operand [4, 16, E * C], dimensions ordered as _unpack orders a key's."""
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    column = gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    heads = (request * (KV_HEADS * GROUP) + head * GROUP + row)[None, :, None]
    same = warp[:, None, None] * 0
    mask = (row < GROUP)[None, :, None] & (same == 0) & (column >= 0)[None, None, :]
    words = heads * (E * C // 2) + column[None, None, :] * (E // 2) + same
    low, high = _pair_halves(gl.load(q_ptr + words, mask=mask, other=0), Q)
    both = gl.join(low.to(T), high.to(T))
    if E == 4:
        low, high = _pair_halves(gl.load(q_ptr + words + 1, mask=mask, other=0), Q)
        quad = gl.join(both, gl.join(low.to(T), high.to(T)))
        both = quad.permute([0, 1, 2, 4, 3]).reshape([4, 16, C, 4])
    return gl.convert_layout(both.permute([0, 1, 3, 2]).reshape([4, 16, E * C]), layout, assert_trivial=True)


@gluon.jit
def _combine(out_ptr, partial_ptr, lse_ptr, sinks_ptr, heads_row, first_head, segments, count,
             GROUP: gl.constexpr, DIM: gl.constexpr, SINKS: gl.constexpr):  # fmt: skip
    """out of the GROUP heads from heads_row on: their segments weighed by 2^lse, in order."""
    rows: gl.constexpr = 4 if GROUP <= 4 else (8 if GROUP <= 8 else 16)
    lanes: gl.constexpr = 32 if DIM >= 128 else 16
    block: gl.constexpr = 16 if rows * DIM <= 512 else (8 if rows * DIM <= 1024 else 4)
    layout: gl.constexpr = gl.BlockedLayout([block, 1, 4], [1, 32 // lanes, lanes], [1, 4, 1], [2, 1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, layout))
    head = gl.arange(0, rows, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    column = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    lane = gl.arange(0, block, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    if SINKS:
        top = gl.load(sinks_ptr + first_head + head, mask=head < GROUP, other=0.0).to(gl.float32) * 1.4426950408889634
        total = gl.full([rows], 1.0, gl.float32, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    else:
        top = gl.full([rows], float("-inf"), gl.float32, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
        total = gl.zeros([rows], gl.float32, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    acc = gl.zeros([rows, DIM], gl.float32, gl.SliceLayout(0, layout))
    head_place = (heads_row + head).to(gl.int64) * segments
    for start in range(0, count, block):
        segment = start + lane
        place = gl.expand_dims(head_place, 0) + gl.expand_dims(segment, 1)
        inside = gl.expand_dims(head < GROUP, 0) & gl.expand_dims(segment < count, 1)
        lse = gl.load(lse_ptr + place, mask=inside, other=float("-inf"), cache_modifier=".cg")
        pointers = partial_ptr + gl.expand_dims(place, 2) * DIM + column[None, None, :]
        values = gl.load(
            pointers, mask=gl.expand_dims(inside, 2) & (column >= 0)[None, None, :], other=0.0, cache_modifier=".cg"
        )
        new_top = gl.maximum(top, gl.max(lse, axis=0))
        new_top = gl.where(new_top == float("-inf"), 0.0, new_top)
        weight = gl.exp2(lse - gl.expand_dims(new_top, 0))
        shrink = gl.exp2(top - new_top)
        acc = acc * gl.convert_layout(shrink, by_row)[:, None] + gl.sum(values * gl.expand_dims(weight, 2), axis=0)
        total = total * shrink + gl.sum(weight, axis=0)
        top = new_top
    acc = acc / gl.convert_layout(gl.where(total > 0, total, 1.0), by_row)[:, None]
    head = gl.convert_layout(head, by_row)
    column = gl.convert_layout(column, gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    place = (heads_row + head).to(gl.int64)[:, None] * DIM + column[None, :]
    gl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=(head < GROUP)[:, None] & (column >= 0)[None, :])


@gluon.jit(do_not_specialize=["table_stride", "requests", "segments"])
def decode_attention_kernel(
    q_ptr, out_ptr, partial_ptr, lse_ptr, arrived_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr, kv_len_ptr,
    table_ptr, table_stride, requests, segments, scale,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, REQUESTS: gl.constexpr,
    E: gl.constexpr, FP8: gl.constexpr, T: gl.constexpr, Q: gl.constexpr, WINDOW: gl.constexpr, SINKS: gl.constexpr,
    PARTS: gl.constexpr, SHORTEST: gl.constexpr, LONGEST: gl.constexpr, CONTIGUOUS: gl.constexpr,
    STAGES: gl.constexpr, k_layout: gl.constexpr, v_layout: gl.constexpr, v_pairs: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Work items (request, segment, key head), head fastest, for program_id, + programs, ...

    q, k and v come as int32 words; E values of the cache are a word. partial float32 [requests, heads, segments, DIM]
    gets a segment's normalised output, lse float32 [requests, heads, segments] the base-2 logarithm of its sum.
    arrived int32 [requests * KV_HEADS] is zero before and after. What is read before the wait is nothing that the
    kernel before can have written: lengths, page tables, and keys older than the newest.
    """
    C: gl.constexpr = DIM // E
    VEC: gl.constexpr = 4 if C >= 32 else C // 8
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8])
    q_operand: gl.constexpr = gl.DotOperandLayout(0, mma, VEC)
    k_operand: gl.constexpr = gl.DotOperandLayout(1, mma, VEC)
    p_operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    v_operand: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    row_layout: gl.constexpr = gl.SliceLayout(2, mma)
    # every warp holds all requests, so that looking up a work item needs no exchange between warps
    lane_layout: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([REQUESTS // 32, 1], [32, 1], [1, 4], [0, 1]))
    spread: gl.constexpr = gl.BlockedLayout([REQUESTS // 32], [32], [4], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(VEC, 1, 8 if C >= 32 else 4, [1, 0])

    k_ring = gl.allocate_shared_memory(gl.int32, [STAGES, TILE, C], shared)
    v_ring = gl.allocate_shared_memory(gl.int32, [STAGES, TILE, C], shared)
    scales_shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # copied by other threads than read them, hence the barrier below; not used where values need no scale
    k_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 4, 16], scales_shared)
    v_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 4, 16], scales_shared)
    lane = gl.arange(0, REQUESTS, lane_layout)
    lengths = gl.load(kv_len_ptr + lane, mask=lane < requests, other=0)
    seen = lengths - _first_tile(lengths, WINDOW)
    keys = _segment_keys(seen, PARTS, SHORTEST, LONGEST)
    counts = (seen + keys - 1) // keys
    ends = gl.convert_layout(gl.associative_scan(gl.convert_layout(counts, spread), 0, _add), lane_layout)
    items = gl.sum(counts, 0) * KV_HEADS
    programs = gl.num_programs(0)

    # the copies' place: item, its bounds, and the next tile's first key and page
    c_item = gl.program_id(0)
    c_request, c_head, _c_segment, _c_count, c_low, c_high, c_len = _locate(
        c_item, lane, lengths, counts, ends, KV_HEADS, WINDOW, PARTS, SHORTEST, LONGEST
    )
    c_start = c_low // TILE * TILE
    issued = 0
    for stage in range(STAGES - 1):
        if (issued == stage) & (c_item < items) & (c_start + TILE < c_len):
            page = _page(table_ptr, c_request, table_stride, c_start, PAGE, CONTIGUOUS)
            _fetch(k_ring, v_ring, k_scales, v_scales, stage, k_ptr, v_ptr, k_scale_ptr,
                   v_scale_ptr, page, c_start, c_low, c_high, c_head, KV_HEADS, PAGE, E, C, k_layout,
                   v_layout)  # fmt: skip
            async_copy.commit_group()
            issued += 1
            c_start += TILE
            if c_start >= c_high:
                c_item += programs
                c_request, c_head, _c_segment, _c_count, c_low, c_high, c_len = _locate(
                    c_item, lane, lengths, counts, ends, KV_HEADS, WINDOW, PARTS, SHORTEST, LONGEST
                )
                c_start = c_low // TILE * TILE
    if PDL:
        pdl_wait()
        pdl_launch()
    for stage in range(STAGES - 1):
        if issued <= stage:
            if c_item < items:
                page = _page(table_ptr, c_request, table_stride, c_start, PAGE, CONTIGUOUS)
                _fetch(k_ring, v_ring, k_scales, v_scales, stage, k_ptr, v_ptr, k_scale_ptr,
                       v_scale_ptr, page, c_start, c_low, c_high, c_head, KV_HEADS, PAGE, E, C, k_layout,
                       v_layout)  # fmt: skip
                c_start += TILE
                if c_start >= c_high:
                    c_item += programs
                    c_request, c_head, _c_segment, _c_count, c_low, c_high, c_len = _locate(
                        c_item, lane, lengths, counts, ends, KV_HEADS, WINDOW, PARTS, SHORTEST, LONGEST
                    )
                    c_start = c_low // TILE * TILE
            async_copy.commit_group()
    c_page = 0
    if c_item < items:
        c_page = _page(table_ptr, c_request, table_stride, c_start, PAGE, CONTIGUOUS)

    tile = 0
    for item in range(gl.program_id(0), items, programs):
        request, head, segment, count, low, high, _length = _locate(
            item, lane, lengths, counts, ends, KV_HEADS, WINDOW, PARTS, SHORTEST, LONGEST
        )
        q = _load_query(q_ptr, request, head, KV_HEADS, GROUP, E, C, Q, T, q_operand)
        acc = gl.zeros([4, 16, DIM], gl.float32, mma)
        top = gl.full([4, 16], float("-inf"), gl.float32, row_layout)
        total = gl.zeros([4, 16], gl.float32, row_layout)
        warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(1, mma)))
        key = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, mma)))
        place = warp[:, None] * 16 + key[None, :]
        for start in range(low // TILE * TILE, high, TILE):
            inside = (start + place >= low) & (start + place < high)
            async_copy.wait_group(STAGES - 2)
            slot = tile % STAGES
            if E == 4:
                barrier()
                k_scale = k_scales.index(slot).load(gl.SliceLayout(1, mma))
                v_scale = v_scales.index(slot).load(gl.SliceLayout(1, mma))
            k_words = k_ring.index(slot).load(k_layout)
            v_words = v_ring.index(slot).load(v_layout)
            if c_item < items:
                _fetch(k_ring, v_ring, k_scales, v_scales, (tile + STAGES - 1) % STAGES, k_ptr, v_ptr, k_scale_ptr,
                       v_scale_ptr, c_page, c_start, c_low, c_high, c_head, KV_HEADS, PAGE, E, C, k_layout,
                       v_layout)  # fmt: skip
                c_start += TILE
                if c_start >= c_high:
                    c_item += programs
                    c_request, c_head, _c_segment, _c_count, c_low, c_high, c_len = _locate(
                        c_item, lane, lengths, counts, ends, KV_HEADS, WINDOW, PARTS, SHORTEST, LONGEST
                    )
                    c_start = c_low // TILE * TILE
                if c_item < items:
                    c_page = _page(table_ptr, c_request, table_stride, c_start, PAGE, CONTIGUOUS)
            async_copy.commit_group()
            tile += 1

            k = _unpack(k_words, E, FP8, T).reshape([4, 16, DIM]).permute([0, 2, 1])
            k = gl.convert_layout(k, k_operand, assert_trivial=True)
            scores = mma_v2(q, k, gl.zeros([4, 16, 16], gl.float32, mma)) * scale
            if E == 4:
                scores *= gl.expand_dims(k_scale, 1)
            scores = gl.where(gl.expand_dims(inside, 1), scores, float("-inf"))
            new_top = gl.maximum(top, gl.max(scores, axis=2))
            base = gl.where(new_top == float("-inf"), 0.0, new_top)
            p = gl.exp2(scores - gl.expand_dims(base, 2))
            shrink = gl.exp2(top - base)
            total = total * shrink + gl.sum(p, axis=2)
            top = new_top
            if E == 4:
                p *= gl.expand_dims(v_scale * RAISE, 1)
            p = gl.convert_layout(p.to(T), p_operand, assert_trivial=True)
            v_words = gl.convert_layout(v_words, v_pairs, assert_trivial=True)
            v = _unpack(v_words, E, FP8, T).reshape([4, 16, E, C // (8 * VEC), 8, VEC])
            v = v.permute([0, 1, 2, 3, 5, 4]).reshape([4, 16, DIM])
            v = gl.convert_layout(v, v_operand, assert_trivial=True)
            acc = mma_v2(p, v, acc * gl.expand_dims(shrink, 2))

        _finish(acc, top, total, out_ptr, partial_ptr, lse_ptr, arrived_ptr, sinks_ptr, request, head, segment, count,
                segments, KV_HEADS, GROUP, DIM, E, C, VEC, SINKS)  # fmt: skip
    async_copy.wait_group(0)
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    column = gl.arange(0, 512, flat)
    for request in range(gl.program_id(0), requests, programs):
        if gl.load(kv_len_ptr + request) == 0:
            row = request.to(gl.int64) * (KV_HEADS * GROUP * DIM)
            for start in range(0, KV_HEADS * GROUP * DIM, 512):
                at = start + column
                zeros = gl.zeros([512], out_ptr.dtype.element_ty, flat)
                gl.store(out_ptr + row + at, zeros, mask=at < KV_HEADS * GROUP * DIM)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _page(table_ptr, request, table_stride, start, PAGE: gl.constexpr, CONTIGUOUS: gl.constexpr):
    row = table_ptr + request.to(gl.int64) * table_stride
    if CONTIGUOUS:
        return gl.load(row) + start // PAGE
    return gl.load(row + start // PAGE)


@gluon.jit
def _finish(acc, top, total, out_ptr, partial_ptr, lse_ptr, arrived_ptr, sinks_ptr, request, head, segment, count,
            segments, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, E: gl.constexpr,
            C: gl.constexpr, VEC: gl.constexpr, SINKS: gl.constexpr):  # fmt: skip
    """Joins the warps of a finished segment and writes it; the last one of a request and key head combines all."""
    top_all = gl.max(top, axis=0)
    weight = gl.exp2(top - gl.expand_dims(top_all, 0))
    total = gl.sum(total * weight, axis=0)
    even, odd = gl.split((acc * gl.expand_dims(weight, 2)).reshape([4, 16, DIM // 2, 2]))
    acc = gl.join(gl.sum(even, axis=0), gl.sum(odd, axis=0))
    lse = top_all + gl.log2(total)
    divisor = total * RAISE if E == 4 else total
    lanes: gl.constexpr = 32 if DIM >= 128 else 16
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [32 // lanes, lanes], [4, 1], [1, 0])
    natural = acc.reshape([16, E, C // (8 * VEC), VEC, 8]).permute([0, 2, 4, 3, 1]).reshape([16, DIM])
    natural = gl.convert_layout(natural, flat)
    divisor = gl.convert_layout(divisor, gl.SliceLayout(1, flat))
    lse = gl.convert_layout(lse, gl.SliceLayout(1, flat))
    natural = natural / divisor[:, None]
    row = gl.arange(0, 16, gl.SliceLayout(1, flat))
    column = gl.arange(0, DIM, gl.SliceLayout(0, flat))
    mask = (row < GROUP)[:, None] & (column >= 0)[None, :]
    heads_row = request * (KV_HEADS * GROUP) + head * GROUP
    if count == 1:
        if SINKS:
            sink = gl.load(sinks_ptr + head * GROUP + row, mask=row < GROUP, other=0.0).to(gl.float32)
            natural = natural / (1.0 + gl.exp2(sink * 1.4426950408889634 - lse))[:, None]
        at = (heads_row + row).to(gl.int64)[:, None] * DIM + column[None, :]
        gl.store(out_ptr + at, natural.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        place = (heads_row + row).to(gl.int64) * segments + segment
        gl.store(partial_ptr + (place[:, None] * DIM + column[None, :]), natural, mask=mask, cache_modifier=".cg")
        gl.store(lse_ptr + place, lse, mask=row < GROUP, cache_modifier=".cg")
        barrier()
        counter = arrived_ptr + request * KV_HEADS + head
        if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1:
            barrier()
            _combine(out_ptr, partial_ptr, lse_ptr, sinks_ptr, heads_row, head * GROUP, segments, count, GROUP, DIM,
                     SINKS)  # fmt: skip
            gl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
