"""The fused 4-bit product in Gluon: x[T, K] times a packed weight [N, K], without an unpacked copy of the weight."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from engine.kernels._gluon import barrier, copy_async, copy_tile


@gluon.jit
def _unpack(words):
    """int32 [R, 32], every aligned four registers holding the same word -> (low, high) bf16 [R, 32] of code - 8.

    0x4300 | code is the bf16 number 128 + code, so the subtraction of 136 is exact.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, base;
        mov.b32 base, 0x43084308;
        lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
        shr.u32 t, $4, 4;
        lop3.b32 $2, t, 0x000F000F, 0x43004300, 0xEA;
        shr.u32 t, $4, 8;
        lop3.b32 $1, t, 0x000F000F, 0x43004300, 0xEA;
        shr.u32 t, $4, 12;
        lop3.b32 $3, t, 0x000F000F, 0x43004300, 0xEA;
        sub.rn.bf16x2 $0, $0, base;
        sub.rn.bf16x2 $1, $1, base;
        sub.rn.bf16x2 $2, $2, base;
        sub.rn.bf16x2 $3, $3, base;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r,r",
        [words],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _unpack_scaled(words, scale):
    """As _unpack, times a scale [R, 32] bf16 of the row: rounded once, to bf16."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, base;
        mov.b32 base, 0x43084308;
        lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
        shr.u32 t, $4, 4;
        lop3.b32 $2, t, 0x000F000F, 0x43004300, 0xEA;
        shr.u32 t, $4, 8;
        lop3.b32 $1, t, 0x000F000F, 0x43004300, 0xEA;
        shr.u32 t, $4, 12;
        lop3.b32 $3, t, 0x000F000F, 0x43004300, 0xEA;
        sub.rn.bf16x2 $0, $0, base;
        sub.rn.bf16x2 $1, $1, base;
        sub.rn.bf16x2 $2, $2, base;
        sub.rn.bf16x2 $3, $3, base;
        mul.rn.bf16x2 $0, $0, $8;
        mul.rn.bf16x2 $1, $1, $9;
        mul.rn.bf16x2 $2, $2, $8;
        mul.rn.bf16x2 $3, $3, $9;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r",
        [words, scale],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _spread(words, rows: gl.constexpr, a_layout: gl.constexpr):
    """The 512 words of each tile of 64 rows, 4 a thread -> [rows, 32], each word in the registers of its bytes."""
    spread = gl.expand_dims(words, 1).broadcast_to([words.shape[0], 4]).reshape([rows // 16, 8, 4, 2, 2, 2, 2])
    tile = spread.permute([0, 5, 1, 3, 4, 2, 6]).reshape([rows, 32])
    return gl.convert_layout(tile, a_layout, assert_trivial=True)


@gluon.jit
def _beside(low, high, rows: gl.constexpr, a_layout: gl.constexpr):
    """Two [rows, 32] halves -> the A operand [rows, 64]; registers are renamed, nothing moves."""
    both = gl.join(low, high).permute([0, 2, 1]).reshape([rows, 64])
    return gl.convert_layout(both, a_layout, assert_trivial=True)


@gluon.jit
def _a_operand(words, rows: gl.constexpr, a_layout: gl.constexpr):
    """Packed words -> bf16 [rows, 64] of code - 8 in the A-operand layout."""
    low, high = _unpack(_spread(words, rows, a_layout))
    return _beside(low, high, rows, a_layout)


@gluon.jit
def _scaled_operand(words, scale, rows: gl.constexpr, a_layout: gl.constexpr):
    """Packed words and a scale a row -> bf16 [rows, 64] of (code - 8) * scale in the A-operand layout."""
    spread = _spread(words, rows, a_layout)
    low, high = _unpack_scaled(spread, gl.expand_dims(scale, 1).broadcast_to([rows, 32]))
    return _beside(low, high, rows, a_layout)


@gluon.jit
def _pdl_wait():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _pdl_launch():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _finish(
    acc,
    out_ptr,
    parts_ptr,
    arrived_ptr,
    rows,
    n,
    block,
    split,
    splits,
    M: gl.constexpr,
    BN: gl.constexpr,
    mma: gl.constexpr,
    PARTS: gl.constexpr,
    row_block=0,
):
    """Writes a finished tile, or its part where another kernel adds the parts (PARTS).

    Otherwise, with several splits, the last program to arrive adds all parts, in the order of splits.

    The order makes repeated runs bit-equal. The counter goes back to zero, so a captured graph can be replayed.
    """
    lanes: gl.constexpr = 16 if BN == 64 else 32
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [32 // lanes, lanes], [gl.num_warps(), 1], [1, 0])
    columns = block * BN + gl.arange(0, BN, gl.SliceLayout(0, flat))
    out_rows = row_block * M + gl.arange(0, M, gl.SliceLayout(1, flat))
    inside = (out_rows < rows)[:, None] & (columns < n)[None, :]
    offsets = out_rows[:, None] * n + columns[None, :]
    if PARTS:
        columns = block * BN + gl.arange(0, BN, gl.SliceLayout(1, mma))
        out_rows = row_block * M + gl.arange(0, M, gl.SliceLayout(0, mma))
        inside = (out_rows < rows)[None, :] & (columns < n)[:, None]
        part_ptr = parts_ptr + n.to(gl.int64) * rows * split
        gl.store(part_ptr + out_rows[None, :] * n + columns[:, None], acc, mask=inside)
    elif splits > 1:
        size = n.to(gl.int64) * rows
        part = gl.convert_layout(acc.permute([1, 0]), flat)
        gl.store(parts_ptr + split * size + offsets, part, mask=inside, cache_modifier=".cg")
        barrier()
        counter = arrived_ptr + row_block * gl.cdiv(n, BN) + block
        if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1:
            barrier()
            total = gl.zeros([M, BN], gl.float32, flat)
            for other in range(splits):
                total += gl.load(parts_ptr + other * size + offsets, mask=inside, other=0.0, cache_modifier=".cg")
            gl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=inside)
            gl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
    else:
        result = gl.convert_layout(acc.to(out_ptr.dtype.element_ty).permute([1, 0]), flat)
        gl.store(out_ptr + offsets, result, mask=inside)


@gluon.jit
def w4_stream_kernel(
    x_ptr,
    packed_ptr,
    scales_ptr,
    out_ptr,
    parts_ptr,
    arrived_ptr,
    rows,
    n,
    k,
    x_stride,
    n_blocks,
    k_tiles,
    slice_tiles,
    splits,
    M: gl.constexpr,
    BN: gl.constexpr,
    SLICE: gl.constexpr,
    GROUP_TILES: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    PDL: gl.constexpr,
):
    TILES: gl.constexpr = BN // 64
    UNIT: gl.constexpr = GROUP_TILES * 512  # words of a scale group of one tile of 64 rows
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, M, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    x_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    w_layout: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([4, 4], [32, 1], [4, 1], [1, 0]))
    s_layout: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    row_layout: gl.constexpr = gl.SliceLayout(1, mma)

    pid = gl.program_id(0)
    split = pid % splits
    first_block = pid // splits
    block_step = gl.num_programs(0) // splits
    k_first = split * slice_tiles
    groups = gl.minimum(slice_tiles, k_tiles - k_first) // GROUP_TILES
    my_blocks = gl.cdiv(n_blocks - first_block, block_step)
    total = my_blocks * groups

    start_tile = first_block * TILES * k_tiles + k_first
    word = gl.arange(0, TILES * UNIT, w_layout)
    tile_words = k_tiles * 512
    # the words of a unit: the first k tile of every row tile, then the second
    w_off = (word // 512 % TILES) * tile_words + word // (512 * TILES) * 512 + word % 512
    w_ptr = packed_ptr + start_tile.to(gl.int64) * 512 + w_off
    row = gl.arange(0, BN, s_layout)
    tile_scales = k_tiles // GROUP_TILES * 64
    s_ptr = scales_ptr + (start_tile // GROUP_TILES) * 64 + row // 64 * tile_scales + row % 64
    w_jump = block_step.to(gl.int64) * TILES * tile_words - groups * UNIT
    s_jump = block_step * TILES * tile_scales - groups * 64

    ring = gl.allocate_shared_memory(gl.int32, [STAGES, TILES * UNIT], gl.SwizzledSharedLayout(4, 1, 1, [0]))
    s_ring = gl.allocate_shared_memory(scales_ptr.dtype.element_ty, [STAGES, BN], gl.SwizzledSharedLayout(2, 1, 1, [0]))
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [SLICE, M, 64], gl.NVMMASharedLayout(128, 16, 2))
    ahead = 0
    for stage in gl.static_range(STAGES - 1):
        if stage < total:
            copy_async(ring.index(stage), w_ptr)
            copy_async(s_ring.index(stage), s_ptr)
        async_copy.commit_group()
        ahead += 1
        wrap = ahead == groups
        w_ptr += UNIT + gl.where(wrap, w_jump, 0)
        s_ptr += 64 + gl.where(wrap, s_jump, 0)
        ahead = gl.where(wrap, 0, ahead)
    if PDL:
        _pdl_wait()

    x_rows = gl.minimum(gl.arange(0, M, gl.SliceLayout(1, x_layout)), rows - 1)
    x_cols = gl.arange(0, 64, gl.SliceLayout(0, x_layout))
    for tile in range(groups * GROUP_TILES):
        cols = (k_first + tile) * 64 + x_cols
        pointers = x_ptr + x_rows[:, None] * x_stride + cols[None, :]
        copy_async(x_smem.index(tile), pointers, mask=(cols < k)[None, :])
    async_copy.commit_group()
    async_copy.wait_group(0)
    barrier()
    fence_async_shared()

    acc = gl.zeros([BN, M], gl.float32, mma)
    group = 0
    block = first_block
    for unit in range(total):
        async_copy.wait_group(STAGES - 2)
        slot = unit % STAGES
        words = ring.index(slot).load(w_layout)
        if PDL and unit == total - 1:
            _pdl_launch()
        scale = s_ring.index(slot).load(row_layout).to(gl.float32)
        if unit + STAGES - 1 < total:
            fill = (unit + STAGES - 1) % STAGES
            copy_async(ring.index(fill), w_ptr)
            copy_async(s_ring.index(fill), s_ptr)
        async_copy.commit_group()
        ahead += 1
        wrap = ahead == groups
        w_ptr += UNIT + gl.where(wrap, w_jump, 0)
        s_ptr += 64 + gl.where(wrap, s_jump, 0)
        ahead = gl.where(wrap, 0, ahead)
        part = gl.zeros([BN, M], gl.float32, mma)
        k_tile = group * GROUP_TILES
        if GROUP_TILES == 1:
            a = _a_operand(words, BN, a_layout)
            part = warpgroup_mma(a, x_smem.index(k_tile).permute([1, 0]), part, use_acc=False, is_async=True)
        else:
            first, second = gl.split(words.reshape([2, 512 * TILES]).permute([1, 0]))
            a = _a_operand(first, BN, a_layout)
            part = warpgroup_mma(a, x_smem.index(k_tile).permute([1, 0]), part, use_acc=False, is_async=True)
            a2 = _a_operand(second, BN, a_layout)
            part = warpgroup_mma(a2, x_smem.index(k_tile + 1).permute([1, 0]), part, is_async=True)
        part = warpgroup_mma_wait(0, deps=[part])
        acc += part * scale[:, None]
        group += 1
        if group == groups:
            _finish(acc, out_ptr, parts_ptr, arrived_ptr, rows, n, block, split, splits, M, BN, mma, PARTS)
            acc = gl.zeros([BN, M], gl.float32, mma)
            group = 0
            block += block_step


@gluon.jit
def _fetch_x(x_desc, x_ring, ready, stage, row, col, GROUP_TILES: gl.constexpr):
    """Starts the copy of one stage's inputs; what lies outside of x arrives as zero."""
    bar = ready.index(stage)
    mbarrier.expect(bar, GROUP_TILES * x_desc.block_type.nbytes)
    for half in gl.static_range(GROUP_TILES):
        copy_tile(x_desc, [row, col + half * 64], bar, x_ring.index(stage * GROUP_TILES + half))


@gluon.jit
def w4_tile_kernel(
    x_desc,
    packed_ptr,
    scales_ptr,
    out_ptr,
    parts_ptr,
    arrived_ptr,
    rows,
    n,
    n_tiles,
    k_tiles,
    slice_tiles,
    M: gl.constexpr,
    BN: gl.constexpr,
    WARPS: gl.constexpr,
    GROUP_TILES: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    PDL: gl.constexpr,
):
    TILES: gl.constexpr = BN // 64
    UNIT: gl.constexpr = GROUP_TILES * 512
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, M, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    w_layout: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([4, 4], [32, 1], [WARPS, 1], [1, 0]))
    s_layout: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    a_rows: gl.constexpr = gl.SliceLayout(1, a_layout)

    row_block = gl.program_id(0)
    block = gl.program_id(1)
    split = gl.program_id(2)
    splits = gl.num_programs(2)
    k_first = split * slice_tiles
    steps = gl.minimum(k_tiles - k_first, slice_tiles) // GROUP_TILES

    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUP_TILES, M, 64], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    w_ring = gl.allocate_shared_memory(gl.int32, [STAGES, TILES * UNIT], gl.SwizzledSharedLayout(4, 1, 1, [0]))
    s_ring = gl.allocate_shared_memory(scales_ptr.dtype.element_ty, [STAGES, BN], gl.SwizzledSharedLayout(2, 1, 1, [0]))

    word = gl.arange(0, TILES * UNIT, w_layout)
    # the words of a step: the first k tile of every row tile, then the second
    n_tile = gl.minimum(block * TILES + word // 512 % TILES, n_tiles - 1)
    k_word = k_first * 512 + word // (512 * TILES) * 512 + word % 512
    w_base = packed_ptr + n_tile.to(gl.int64) * (k_tiles * 512) + k_word
    row = gl.arange(0, BN, s_layout)
    groups = k_tiles // GROUP_TILES
    s_tile = gl.minimum(block * TILES + row // 64, n_tiles - 1)
    s_base = scales_ptr + s_tile * (groups * 64) + row % 64 + k_first // GROUP_TILES * 64

    for stage in gl.static_range(STAGES - 1):
        if stage < steps:
            copy_async(w_ring.index(stage), w_base + stage * UNIT)
            copy_async(s_ring.index(stage), s_base + stage * 64)
        async_copy.commit_group()
    if PDL:
        _pdl_wait()
    for stage in gl.static_range(STAGES - 1):
        if stage < steps:
            _fetch_x(x_desc, x_ring, ready, stage, row_block * M, (k_first + stage * GROUP_TILES) * 64, GROUP_TILES)

    acc = gl.zeros([BN, M], gl.float32, mma)
    for step in range(steps):
        slot = step % STAGES
        async_copy.wait_group(STAGES - 2)
        barrier()  # also: every warp is done with the stage that is filled below
        words = w_ring.index(slot).load(w_layout)
        scale = s_ring.index(slot).load(a_rows).to(gl.bfloat16)
        mbarrier.wait(ready.index(slot), step // STAGES & 1)
        x_slot = slot * GROUP_TILES
        if GROUP_TILES == 1:
            a = _scaled_operand(words, scale, BN, a_layout)
            flight = warpgroup_mma(a, x_ring.index(x_slot).permute([1, 0]), acc, is_async=True)
        else:
            first, second = gl.split(words.reshape([2, 512 * TILES]).permute([1, 0]))
            a = _scaled_operand(first, scale, BN, a_layout)
            flight = warpgroup_mma(a, x_ring.index(x_slot).permute([1, 0]), acc, is_async=True)
            a2 = _scaled_operand(second, scale, BN, a_layout)
            flight = warpgroup_mma(a2, x_ring.index(x_slot + 1).permute([1, 0]), flight, is_async=True)
        ahead = step + STAGES - 1
        if ahead < steps:
            fill = ahead % STAGES
            copy_async(w_ring.index(fill), w_base + ahead * UNIT)
            copy_async(s_ring.index(fill), s_base + ahead * 64)
            _fetch_x(x_desc, x_ring, ready, fill, row_block * M, (k_first + ahead * GROUP_TILES) * 64, GROUP_TILES)
        async_copy.commit_group()
        acc = warpgroup_mma_wait(0, deps=[flight])
    async_copy.wait_group(0)
    if PDL:
        _pdl_launch()
    _finish(acc, out_ptr, parts_ptr, arrived_ptr, rows, n, block, split, splits, M, BN, mma, PARTS, row_block)
