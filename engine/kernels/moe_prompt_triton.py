"""The experts' products over blocks of many rows (prompts), and those of dense weights of any number of rows.

A program multiplies R outputs (64: a tile; fewer only of dense weights) with M rows that share an expert. Scales are
read a step ahead and multiplied into the unpacked weights (rounded once to the dtype of x; exact for mxfp4), so the
sums stay in the accumulators of the matrix instructions. Bytes moved: R rows of the weight once a block (blocks of an
expert run side by side and share it in L2), the rows of x once for every R outputs.
"""

import triton
import triton.language as tl

from engine.kernels.moe_unpack import activate, block_of_pairs, load_scale, unpack_words


@triton.jit
def _as_operand(low, low_next, high, high_next):
    """Four [512] (rows r, then r + 8; first and second of a pair of inputs) -> [64, 32]."""
    values = tl.join(tl.join(low, low_next), tl.join(high, high_next))
    values = tl.reshape(values, (4, 8, 4, 2, 2, 2, 2))
    return tl.reshape(tl.permute(values, (0, 6, 1, 3, 4, 2, 5)), (64, 32))


@triton.jit
def _scales_of(scales, tile_row, kt, groups, K_TILES: tl.constexpr, GROUP: tl.constexpr, CODES: tl.constexpr):
    """The scales [64] of the low and of the high half of tile kt; 0 past the last tile and for dense weights."""
    if CODES == "dense":
        low = tl.zeros((64,), tl.float32)
        high = low
    else:
        at = scales + tile_row * groups * 64 + tl.arange(0, 64)
        low = load_scale(at + kt * 64 // GROUP * 64, kt < K_TILES, CODES)
        high = low
        if GROUP < 64:
            high = load_scale(at + (kt * 64 + 32) // GROUP * 64, kt < K_TILES, CODES)
    return low, high


@triton.jit
def _tile(
    packed, tile_row, kt, K, scale_low, scale_high,
    R: tl.constexpr, K_TILES: tl.constexpr, CODES: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Tile (tile_row, kt) of the weight: inputs 0..31 and 32..63, two [R, 32] of DTYPE."""
    if CODES == "dense":
        inputs = kt * 64 + tl.arange(0, 32)
        at = packed + (tile_row * R + tl.arange(0, R))[:, None] * K + inputs[None, :]
        low = tl.load(at, mask=(inputs < K)[None, :], other=0.0).to(DTYPE)
        high = tl.load(at + 32, mask=(inputs + 32 < K)[None, :], other=0.0).to(DTYPE)
    else:
        words = tl.load(packed + (tile_row * K_TILES + kt) * 512 + tl.arange(0, 512))
        l00, l01, h00, h01, l10, l11, h10, h11 = unpack_words(words, CODES, DTYPE, ASM)
        low = _as_operand(l00, l01, l10, l11) * scale_low.to(DTYPE)[:, None]
        high = _as_operand(h00, h01, h10, h11) * scale_high.to(DTYPE)[:, None]
    return low, high


@triton.jit
def gate_up_kernel(
    x, packed, scales, bias, ids, order, block_expert, out, K, groups, alpha, limit,
    TOP_K: tl.constexpr, K_TILES: tl.constexpr, HALF_TILES: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,
    R: tl.constexpr, DIRECT: tl.constexpr, HAS_BIAS: tl.constexpr, CLAMPED: tl.constexpr, CODES: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [pairs, I] = act(gate, up) of one tile of R for one block of pairs; grid (blocks, tiles of I)."""
    block, tile = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, pair = block_of_pairs(ids, order, block_expert, block, M, DIRECT)
    if expert >= 0:
        dtype: tl.constexpr = x.dtype.element_ty
        width: tl.constexpr = HALF_TILES * R
        live = pair >= 0
        row = x + (pair // TOP_K).to(tl.int64) * K
        gate_row = expert.to(tl.int64) * (2 * HALF_TILES) + tile
        up_row = gate_row + HALF_TILES
        gate = tl.zeros((R, M), tl.float32)
        up = tl.zeros((R, M), tl.float32)
        gate_low, gate_high = _scales_of(scales, gate_row, 0, groups, K_TILES, GROUP, CODES)
        up_low, up_high = _scales_of(scales, up_row, 0, groups, K_TILES, GROUP, CODES)
        for kt in range(0, K_TILES):
            next_gate_low, next_gate_high = _scales_of(scales, gate_row, kt + 1, groups, K_TILES, GROUP, CODES)
            next_up_low, next_up_high = _scales_of(scales, up_row, kt + 1, groups, K_TILES, GROUP, CODES)
            k = kt * 64 + tl.arange(0, 32)
            at = row[None, :] + k[:, None]
            x_low = tl.load(at, mask=live[None, :] & (k < K)[:, None], other=0.0)
            x_high = tl.load(at + 32, mask=live[None, :] & (k + 32 < K)[:, None], other=0.0)
            low, high = _tile(packed, gate_row, kt, K, gate_low, gate_high, R, K_TILES, CODES, dtype, ASM)
            gate = tl.dot(low, x_low, gate, input_precision="ieee")
            gate = tl.dot(high, x_high, gate, input_precision="ieee")
            low, high = _tile(packed, up_row, kt, K, up_low, up_high, R, K_TILES, CODES, dtype, ASM)
            up = tl.dot(low, x_low, up, input_precision="ieee")
            up = tl.dot(high, x_high, up, input_precision="ieee")
            gate_low, gate_high, up_low, up_high = next_gate_low, next_gate_high, next_up_low, next_up_high
        column = tile * R + tl.arange(0, R)
        if HAS_BIAS:
            gate += tl.load(bias + expert * 2 * width + column).to(tl.float32)[:, None]
            up += tl.load(bias + expert * 2 * width + width + column).to(tl.float32)[:, None]
        value = activate(gate, up, CLAMPED, alpha, limit)
        to = out + pair.to(tl.int64)[None, :] * width + column[:, None]
        tl.store(to, value.to(dtype), mask=live[None, :])


@triton.jit(do_not_specialize=["tokens"])
def down_kernel(
    h, packed, scales, bias, ids, order, block_expert, weights, out, tokens, N, groups,
    TOP_K: tl.constexpr, K_TILES: tl.constexpr, N_TILES: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,
    R: tl.constexpr, DIRECT: tl.constexpr, HAS_BIAS: tl.constexpr, CODES: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [TOP_K, tokens, N]: a tile of R of `down` times each pair's routing weight; grid (blocks, tiles of N)."""
    block, tile = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, pair = block_of_pairs(ids, order, block_expert, block, M, DIRECT)
    if expert >= 0:
        dtype: tl.constexpr = h.dtype.element_ty
        width: tl.constexpr = K_TILES * 64
        live = pair >= 0
        row = h + pair.to(tl.int64) * width
        tile_row = expert.to(tl.int64) * N_TILES + tile
        acc = tl.zeros((R, M), tl.float32)
        scale_low, scale_high = _scales_of(scales, tile_row, 0, groups, K_TILES, GROUP, CODES)
        for kt in range(0, K_TILES):
            next_low, next_high = _scales_of(scales, tile_row, kt + 1, groups, K_TILES, GROUP, CODES)
            at = row[None, :] + (kt * 64 + tl.arange(0, 32))[:, None]
            x_low = tl.load(at, mask=live[None, :], other=0.0)
            x_high = tl.load(at + 32, mask=live[None, :], other=0.0)
            low, high = _tile(packed, tile_row, kt, width, scale_low, scale_high, R, K_TILES, CODES, dtype, ASM)
            acc = tl.dot(low, x_low, acc, input_precision="ieee")
            acc = tl.dot(high, x_high, acc, input_precision="ieee")
            scale_low, scale_high = next_low, next_high
        column = tile * R + tl.arange(0, R)
        if HAS_BIAS:
            acc += tl.load(bias + expert * N + column, mask=column < N, other=0.0).to(tl.float32)[:, None]
        acc *= tl.load(weights + pair, mask=live, other=0.0)[None, :]
        line = (pair % TOP_K).to(tl.int64) * tokens + pair // TOP_K
        to = out + line[None, :] * N + column[:, None]
        tl.store(to, acc.to(out.dtype.element_ty), mask=live[None, :] & (column < N)[:, None])


@triton.jit
def sum_slots_kernel(y, out, count, SLOTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[i] = the sum over slots of y[slot, i], in order, in float32; a program owns BLOCK elements."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in tl.static_range(SLOTS):
        total += tl.load(y + index, mask=index < count, other=0.0).to(tl.float32)
        y += count
    tl.store(out + index, total.to(out.dtype.element_ty), mask=index < count)
