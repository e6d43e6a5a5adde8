"""The experts' products of a decode step, for 4-bit weights: few rows an expert, so memory decides.

A program owns R rows of one 64-row tile of the weight (16, 32 or 64: a strip of consecutive bytes in every tile) and
all of K, which it takes in chunks of T tiles, R * T = 64 a warp: 2 KB of every matrix. The product is batched over
tiles, dealt to the warps, which therefore meet only where a chunk's inputs and scales arrive and in the sum over tiles
at the end. The next chunk is read before the present one is multiplied. How a sum is ordered depends on the weight's
shape, R and the warps alone.

The compiler spreads K over the lanes in its own order; the inputs of a tile are put into the order (`_load_x`) in which
the words of a lane then are exactly its operand, and no weight is exchanged between lanes.
"""

import triton
import triton.language as tl

from engine.kernels.moe_unpack import activate, block_of_pairs, load_scale, unpack_words


@triton.jit
def _as_operand(low, low_next, high, high_next, T: tl.constexpr, R: tl.constexpr):
    """Four [T, R // 16, 128] (rows r, then r + 8; first and second of a pair of inputs) -> [T, R, 32], places of K."""
    values = tl.join(tl.join(low, low_next), tl.join(high, high_next))
    values = tl.reshape(values, (T, R // 16, 8, 4, 2, 2, 2, 2))
    return tl.reshape(tl.permute(values, (0, 1, 7, 2, 4, 3, 5, 6)), (T, R, 32))


@triton.jit
def _load_x(row, live, kt, K, T: tl.constexpr, M: tl.constexpr):
    """The inputs of T tiles for M rows (pointers): low and high halves, two [T, 32, M] in places of K.

    Input 16 a + 8 b + 2 c + d of a half stands at place 16 a + 4 c + 2 b + d.
    """
    k = kt[:, None] * 64 + tl.arange(0, 64)[None, :]
    inside = live[None, None, :] & (k < K)[:, :, None]
    x = tl.load(row[None, None, :] + k[:, :, None], mask=inside, other=0.0)
    x = tl.permute(tl.reshape(x, (T, 2, 2, 2, 4, 2, M)), (0, 2, 4, 3, 5, 6, 1))
    return tl.split(tl.reshape(x, (T, 32, M, 2)))


@triton.jit
def _load_weights(
    packed, scales, tile_row, strip, kt, groups, K_TILES: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr,
    CODES: tl.constexpr,
):  # fmt: skip
    """R rows of T tiles: words [T, R // 16, 128] and the scales [T, R] of the low and of the high half (the same one
    where a group holds both). A warp reads the words of a strip in pieces of 512 bytes.
    """
    inside = kt < K_TILES
    place = tl.arange(0, R // 16)[:, None] * 128 + tl.arange(0, 128)[None, :]
    at = packed + tile_row * (K_TILES * 512) + strip * (R * 8) + (kt * 512)[:, None, None] + place[None, :, :]
    words = tl.load(at, mask=inside[:, None, None], other=0)
    first = scales + tile_row * groups * 64 + strip * R
    rows = tl.arange(0, R)[None, :]
    low = load_scale(first + (kt * 64 // GROUP * 64)[:, None] + rows, inside[:, None], CODES)
    high = low
    if GROUP < 64:
        high = load_scale(first + ((kt * 64 + 32) // GROUP * 64)[:, None] + rows, inside[:, None], CODES)
    return words, low, high


@triton.jit
def _add_chunk(
    acc, words, scale_low, scale_high, x_low, x_high, T: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr,
    CODES: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc [T, R, M] += T tiles times their inputs; sums are scaled, not weights, so nothing is rounded."""
    l00, l01, h00, h01, l10, l11, h10, h11 = unpack_words(words, CODES, DTYPE, ASM)
    part = tl.dot(_as_operand(l00, l01, l10, l11, T, R), x_low, input_precision="ieee")
    if GROUP < 64:
        acc += part * scale_low[:, :, None]
        part = tl.dot(_as_operand(h00, h01, h10, h11, T, R), x_high, input_precision="ieee")
    else:
        part = tl.dot(_as_operand(h00, h01, h10, h11, T, R), x_high, part, input_precision="ieee")
    return acc + part * scale_high[:, :, None]


@triton.jit
def few_gate_up_kernel(
    x, packed, scales, bias, ids, order, block_expert, out, K, groups, alpha, limit,
    TOP_K: tl.constexpr, K_TILES: tl.constexpr, HALF_TILES: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,
    R: tl.constexpr, T: tl.constexpr, DIRECT: tl.constexpr, HAS_BIAS: tl.constexpr, CLAMPED: tl.constexpr,
    CODES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [pairs, I] = act(gate, up) of R outputs for one block of up to M pairs; grid (blocks, I / R).

    Bytes moved: R rows of gate and of up once, and of x one row a pair (from L2).
    """
    block, part = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        # the kernel after this one may start, but not before every program of this one runs; see few_down_kernel
        tl.extra.cuda.gdc_launch_dependents()
    expert, pair = block_of_pairs(ids, order, block_expert, block, M, DIRECT)
    if expert >= 0:
        dtype: tl.constexpr = x.dtype.element_ty
        width: tl.constexpr = HALF_TILES * 64
        live = pair >= 0
        row = x + (pair // TOP_K).to(tl.int64) * K
        gate_row = expert.to(tl.int64) * (2 * HALF_TILES) + part // (64 // R)
        up_row = gate_row + HALF_TILES
        strip = part % (64 // R)
        column = part * R + tl.arange(0, R)
        if HAS_BIAS:
            gate_bias = tl.load(bias + expert * 2 * width + column)
            up_bias = tl.load(bias + expert * 2 * width + width + column)
        gate = tl.zeros((T, R, M), tl.float32)
        up = tl.zeros((T, R, M), tl.float32)
        kt = tl.arange(0, T)
        g, g_low, g_high = _load_weights(packed, scales, gate_row, strip, kt, groups, K_TILES, GROUP, R, CODES)
        u, u_low, u_high = _load_weights(packed, scales, up_row, strip, kt, groups, K_TILES, GROUP, R, CODES)
        for first in range(0, K_TILES, T):
            kt = first + tl.arange(0, T)
            ahead = kt + T
            next_g, next_g_low, next_g_high = _load_weights(
                packed, scales, gate_row, strip, ahead, groups, K_TILES, GROUP, R, CODES
            )  # fmt: skip
            next_u, next_u_low, next_u_high = _load_weights(
                packed, scales, up_row, strip, ahead, groups, K_TILES, GROUP, R, CODES
            )  # fmt: skip
            x_low, x_high = _load_x(row, live, kt, K, T, M)
            gate = _add_chunk(gate, g, g_low, g_high, x_low, x_high, T, R, GROUP, CODES, dtype, ASM)
            up = _add_chunk(up, u, u_low, u_high, x_low, x_high, T, R, GROUP, CODES, dtype, ASM)
            g, g_low, g_high = next_g, next_g_low, next_g_high
            u, u_low, u_high = next_u, next_u_low, next_u_high
        gate_sum, up_sum = tl.sum(gate, axis=0), tl.sum(up, axis=0)
        if HAS_BIAS:
            gate_sum += gate_bias.to(tl.float32)[:, None]
            up_sum += up_bias.to(tl.float32)[:, None]
        value = activate(gate_sum, up_sum, CLAMPED, alpha, limit)
        to = out + pair.to(tl.int64)[None, :] * width + column[:, None]
        tl.store(to, value.to(dtype), mask=live[None, :])


@triton.jit(do_not_specialize=["tokens"])
def few_down_kernel(
    h, packed, scales, bias, ids, order, block_expert, weights, out, tokens, N, groups,
    TOP_K: tl.constexpr, K_TILES: tl.constexpr, N_TILES: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,
    R: tl.constexpr, T: tl.constexpr, DIRECT: tl.constexpr, HAS_BIAS: tl.constexpr, CODES: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out float32 [TOP_K, tokens, N]: R outputs of `down` times each pair's routing weight.

    Grid (blocks, N_TILES * 64 / R). Bytes moved: R rows of the weight once, h one row a pair (from L2), out.
    The launch before is few_gate_up_kernel's, whose programs let this one start only after they have waited for the
    router and the grouping: those results (read past L1, which may hold what stood there before) and the weights are
    read before the wait, and only h after it.
    """
    block, part = tl.program_id(0), tl.program_id(1)
    dtype: tl.constexpr = h.dtype.element_ty
    width: tl.constexpr = K_TILES * 64
    expert, pair = block_of_pairs(ids, order, block_expert, block, M, DIRECT)
    if expert >= 0:
        live = pair >= 0
        tile_row = expert.to(tl.int64) * N_TILES + part // (64 // R)
        strip = part % (64 // R)
        kt = tl.arange(0, T)
        words, low, high = _load_weights(packed, scales, tile_row, strip, kt, groups, K_TILES, GROUP, R, CODES)
        column = part * R + tl.arange(0, R)
        share = tl.load(weights + pair, mask=live, other=0.0, cache_modifier=".cg")
        if HAS_BIAS:
            own_bias = tl.load(bias + expert * N + column, mask=column < N, other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        row = h + pair.to(tl.int64) * width
        acc = tl.zeros((T, R, M), tl.float32)
        for first in range(0, K_TILES, T):
            kt = first + tl.arange(0, T)
            next_words, next_low, next_high = _load_weights(
                packed, scales, tile_row, strip, kt + T, groups, K_TILES, GROUP, R, CODES
            )  # fmt: skip
            x_low, x_high = _load_x(row, live, kt, width, T, M)
            acc = _add_chunk(acc, words, low, high, x_low, x_high, T, R, GROUP, CODES, dtype, ASM)
            words, low, high = next_words, next_low, next_high
        y = tl.sum(acc, axis=0)
        if HAS_BIAS:
            y += own_bias.to(tl.float32)[:, None]
        y *= share[None, :]
        line = (pair % TOP_K).to(tl.int64) * tokens + pair // TOP_K
        to = out + line[None, :] * N + column[:, None]
        tl.store(to, y, mask=live[None, :] & (column < N)[:, None])
