"""The 4-bit product for any number of rows: tiles of x and of packed weights pass through rings of shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from engine.kernels._gluon import barrier, copy_async, copy_tile
from engine.kernels.w4_gluon import finish, pdl_launch, pdl_wait, place, scaled_operand, span


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
    n_blocks,
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
    """out or parts [rows, n] = x (bf16, by its descriptor of blocks [M, 64]) times the packed weight transposed.

    Program (r, p, s) owns M rows from r * M on and, of slice s of K (slice_tiles tiles of 64 inputs, the last slice
    fewer), its `span` of units: a unit is one scale group of a block of BN outputs, block by block. Grid (row blocks,
    programs, splits), rows fastest: the programs that share weights run together. Requirements: blocks that cover whole
    row tiles (n_blocks * BN = 64 * row tiles), k_tiles a multiple of GROUP_TILES, no slice and no span empty; rows of x
    past its end arrive as 0.

    A unit takes GROUP_TILES x BN x 32 bytes of weights and BN scales by cp.async, [GROUP_TILES, M, 64] of x by TMA;
    STAGES of each are in flight, also over the ends of blocks. The weight is scaled while it is unpacked (one rounding
    to bf16), so the sum stays in the accumulator of wgmma.

    Bytes moved: the weight once a row block (all but one of them from L2), x once an output block, out once.
    """
    TILES: gl.constexpr = BN // 64
    UNIT: gl.constexpr = GROUP_TILES * 512
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, M, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    w_layout: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([4, 4], [32, 1], [WARPS, 1], [1, 0]))
    s_layout: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    a_rows: gl.constexpr = gl.SliceLayout(1, a_layout)

    row_block = gl.program_id(0)
    index = gl.program_id(1)
    split = gl.program_id(2)
    splits = gl.num_programs(2)
    k_first = split * slice_tiles
    full_groups = slice_tiles // GROUP_TILES
    last_groups = k_tiles // GROUP_TILES - (splits - 1) * full_groups
    groups = gl.minimum(slice_tiles, k_tiles - k_first) // GROUP_TILES
    first, last = span(index, gl.num_programs(1), n_blocks, groups, PARTS)
    total = last - first
    block = first // groups
    group = first % groups

    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUP_TILES, M, 64], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    w_ring = gl.allocate_shared_memory(gl.int32, [STAGES, TILES * UNIT], gl.SwizzledSharedLayout(4, 1, 1, [0]))
    s_ring = gl.allocate_shared_memory(scales_ptr.dtype.element_ty, [STAGES, BN], gl.SwizzledSharedLayout(2, 1, 1, [0]))

    word = gl.arange(0, TILES * UNIT, w_layout)
    tile_words = k_tiles * 512
    start_tile = block * TILES * k_tiles + k_first + group * GROUP_TILES
    # the words of a unit: the first k tile of every row tile, then the second
    w_off = (word // 512 % TILES) * tile_words + word // (512 * TILES) * 512 + word % 512
    w_ptr = packed_ptr + start_tile.to(gl.int64) * 512 + w_off
    row = gl.arange(0, BN, s_layout)
    tile_scales = k_tiles // GROUP_TILES * 64
    s_ptr = scales_ptr + (start_tile // GROUP_TILES) * 64 + row // 64 * tile_scales + row % 64
    w_jump = TILES * tile_words - groups * UNIT
    s_jump = TILES * tile_scales - groups * 64

    ahead = group
    for stage in gl.static_range(STAGES - 1):
        if stage < total:
            copy_async(w_ring.index(stage), w_ptr)
            copy_async(s_ring.index(stage), s_ptr)
        async_copy.commit_group()
        ahead += 1
        wrap = ahead == groups
        w_ptr += UNIT + gl.where(wrap, w_jump, 0)
        s_ptr += 64 + gl.where(wrap, s_jump, 0)
        ahead = gl.where(wrap, 0, ahead)
    if PDL:
        pdl_wait()
    x_ahead = group
    for stage in gl.static_range(STAGES - 1):
        if stage < total:
            _fetch_x(x_desc, x_ring, ready, stage, row_block * M, (k_first + x_ahead * GROUP_TILES) * 64, GROUP_TILES)
        x_ahead = gl.where(x_ahead + 1 == groups, 0, x_ahead + 1)

    unit = 0
    while unit < total:
        acc = gl.zeros([BN, M], gl.float32, mma)
        for _ in range(gl.minimum(groups - group, total - unit)):
            slot = unit % STAGES
            async_copy.wait_group(STAGES - 2)
            barrier()  # also: every warp is done with the stage that is filled below
            words = w_ring.index(slot).load(w_layout)
            scale = s_ring.index(slot).load(a_rows).to(gl.bfloat16)
            mbarrier.wait(ready.index(slot), unit // STAGES & 1)
            x_slot = slot * GROUP_TILES
            if GROUP_TILES == 1:
                a = scaled_operand(words, scale, BN, a_layout)
                flight = warpgroup_mma(a, x_ring.index(x_slot).permute([1, 0]), acc, is_async=True)
            else:
                first_half, second_half = gl.split(words.reshape([2, 512 * TILES]).permute([1, 0]))
                a = scaled_operand(first_half, scale, BN, a_layout)
                flight = warpgroup_mma(a, x_ring.index(x_slot).permute([1, 0]), acc, is_async=True)
                a2 = scaled_operand(second_half, scale, BN, a_layout)
                flight = warpgroup_mma(a2, x_ring.index(x_slot + 1).permute([1, 0]), flight, is_async=True)
            if unit + STAGES - 1 < total:
                fill = (unit + STAGES - 1) % STAGES
                copy_async(w_ring.index(fill), w_ptr)
                copy_async(s_ring.index(fill), s_ptr)
                _fetch_x(x_desc, x_ring, ready, fill, row_block * M, (k_first + ahead * GROUP_TILES) * 64, GROUP_TILES)
            async_copy.commit_group()
            ahead += 1
            wrap = ahead == groups
            w_ptr += UNIT + gl.where(wrap, w_jump, 0)
            s_ptr += 64 + gl.where(wrap, s_jump, 0)
            ahead = gl.where(wrap, 0, ahead)
            acc = warpgroup_mma_wait(0, deps=[flight])
            unit += 1
        if PDL and unit == total:
            pdl_launch()
        place_slot, slots = place(
            block, index, gl.num_programs(1), n_blocks, split, splits, full_groups, last_groups, PARTS
        )
        finish(acc, out_ptr, parts_ptr, arrived_ptr, rows, n, block, place_slot, slots, M, BN, mma, PARTS, row_block)
        group = 0
        block += 1
