"""The 4-bit product for up to 16 rows: x stays in shared memory while packed weights stream through a ring."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from engine.kernels._gluon import barrier, copy_async
from engine.kernels.w4_gluon import a_operand, finish, pdl_launch, pdl_wait, place, span


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
    """out or parts [rows, n] = x[rows, k] (bf16) times the packed weight transposed; see `finish` for which.

    Program p works on slice p % splits of K (slice_tiles tiles of 64 inputs, the last slice fewer), on its `span` of
    that slice's units: a unit is one scale group of a block of BN outputs, block by block. Requirements: M >= rows a
    multiple of 8, BN a multiple of 64 whose blocks cover whole row tiles (n_blocks * BN = 64 * row tiles), k and
    x_stride multiples of 16, x aligned to 16 bytes, k_tiles a multiple of GROUP_TILES, no slice and no span empty.

    Its slice of x, [slice, M, 64] swizzled for wgmma, is read once. The weights go by in units (GROUP_TILES x BN x 32
    bytes) through a ring of STAGES units filled by cp.async, each with its BN scales. A thread copies the very words it
    later reads. The ring runs on over the ends of blocks, so memory never idles between them. Each unit is multiplied
    unscaled into a float32 part, scaled there and added: nothing is rounded.

    Bytes moved: the weight once, x once a program, and the parts of `finish`. What is read before the wait of the
    programmatic dependent launch are weights alone; the next kernel may start with the last unit.
    """
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
    index = pid // splits
    programs = gl.num_programs(0) // splits
    k_first = split * slice_tiles
    full_groups = slice_tiles // GROUP_TILES
    last_groups = k_tiles // GROUP_TILES - (splits - 1) * full_groups
    groups = gl.minimum(slice_tiles, k_tiles - k_first) // GROUP_TILES
    first, last = span(index, programs, n_blocks, groups, PARTS)
    total = last - first
    block = first // groups
    group = first % groups

    start_tile = block * TILES * k_tiles + k_first + group * GROUP_TILES
    word = gl.arange(0, TILES * UNIT, w_layout)
    tile_words = k_tiles * 512
    # the words of a unit: the first k tile of every row tile, then the second
    w_off = (word // 512 % TILES) * tile_words + word // (512 * TILES) * 512 + word % 512
    w_ptr = packed_ptr + start_tile.to(gl.int64) * 512 + w_off
    row = gl.arange(0, BN, s_layout)
    tile_scales = k_tiles // GROUP_TILES * 64
    s_ptr = scales_ptr + (start_tile // GROUP_TILES) * 64 + row // 64 * tile_scales + row % 64
    w_jump = TILES * tile_words - groups * UNIT
    s_jump = TILES * tile_scales - groups * 64

    ring = gl.allocate_shared_memory(gl.int32, [STAGES, TILES * UNIT], gl.SwizzledSharedLayout(4, 1, 1, [0]))
    s_ring = gl.allocate_shared_memory(scales_ptr.dtype.element_ty, [STAGES, BN], gl.SwizzledSharedLayout(2, 1, 1, [0]))
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [SLICE, M, 64], gl.NVMMASharedLayout(128, 16, 2))
    ahead = group
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
        pdl_wait()

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

    unit = 0
    while unit < total:
        acc = gl.zeros([BN, M], gl.float32, mma)
        for k_group in range(group, gl.minimum(groups, group + total - unit)):
            async_copy.wait_group(STAGES - 2)
            slot = unit % STAGES
            words = ring.index(slot).load(w_layout)
            if PDL and unit == total - 1:
                pdl_launch()
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
            k_tile = k_group * GROUP_TILES
            if GROUP_TILES == 1:
                a = a_operand(words, BN, a_layout)
                part = warpgroup_mma(a, x_smem.index(k_tile).permute([1, 0]), part, use_acc=False, is_async=True)
            else:
                first_half, second_half = gl.split(words.reshape([2, 512 * TILES]).permute([1, 0]))
                a = a_operand(first_half, BN, a_layout)
                part = warpgroup_mma(a, x_smem.index(k_tile).permute([1, 0]), part, use_acc=False, is_async=True)
                a2 = a_operand(second_half, BN, a_layout)
                part = warpgroup_mma(a2, x_smem.index(k_tile + 1).permute([1, 0]), part, is_async=True)
            part = warpgroup_mma_wait(0, deps=[part])
            acc += part * scale[:, None]
            unit += 1
        slot, slots = place(block, index, programs, n_blocks, split, splits, full_groups, last_groups, PARTS)
        finish(acc, out_ptr, parts_ptr, arrived_ptr, rows, n, block, slot, slots, M, BN, mma, PARTS)
        group = 0
        block += 1
