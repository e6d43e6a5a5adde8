"""The Triton kernels behind engine/kernels/moe.py, which alone imports this file.

Weights are the left operand of every product: a stored tile is loaded as 512 consecutive words, whose bytes become
the registers of the matrix instruction without any exchange between threads (the order is engine/quant.py's).
"""

import triton
import triton.language as tl

# One word holds rows r and r + 8 of two neighbouring inputs, low and high nibble: eight codes. Each pair of codes is
# put into the mantissa of 128.0 (bf16), from which 136.0 is taken: code - 8, exactly.
INT4_TO_BF16 = tl.constexpr(
    """{
    .reg .b32 a, b, c, d, one, minus;
    mov.b32 one, 0x3F803F80;
    mov.b32 minus, 0xC308C308;
    shr.b32 b, $8, 4;
    shr.b32 c, $8, 8;
    shr.b32 d, $8, 12;
    lop3.b32 a, $8, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 d, d, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 a, a, one, minus;
    fma.rn.bf16x2 b, b, one, minus;
    fma.rn.bf16x2 c, c, one, minus;
    fma.rn.bf16x2 d, d, one, minus;
    mov.b32 {$0, $1}, a;
    mov.b32 {$2, $3}, b;
    mov.b32 {$4, $5}, c;
    mov.b32 {$6, $7}, d;
    }"""
)

# e2m1 (sign, two exponent bits, one mantissa bit) goes to the sign, the low exponent bits and the high mantissa bit of
# a bf16; times 2^126 moves the exponent bias from 1 to 127, subnormals included.
E2M1_TO_BF16 = tl.constexpr(
    """{
    .reg .b32 a, b, c, d, s, big, none;
    mov.b32 big, 0x7E807E80;
    mov.b32 none, 0x80008000;
    shl.b32 a, $8, 6;
    and.b32 a, a, 0x01C001C0;
    shl.b32 s, $8, 12;
    lop3.b32 a, s, 0x80008000, a, 0xEA;
    shl.b32 b, $8, 2;
    and.b32 b, b, 0x01C001C0;
    shl.b32 s, $8, 8;
    lop3.b32 b, s, 0x80008000, b, 0xEA;
    shr.b32 c, $8, 2;
    and.b32 c, c, 0x01C001C0;
    shl.b32 s, $8, 4;
    lop3.b32 c, s, 0x80008000, c, 0xEA;
    shr.b32 d, $8, 6;
    and.b32 d, d, 0x01C001C0;
    lop3.b32 d, $8, 0x80008000, d, 0xEA;
    fma.rn.bf16x2 a, a, big, none;
    fma.rn.bf16x2 b, b, big, none;
    fma.rn.bf16x2 c, c, big, none;
    fma.rn.bf16x2 d, d, big, none;
    mov.b32 {$0, $1}, a;
    mov.b32 {$2, $3}, b;
    mov.b32 {$4, $5}, c;
    mov.b32 {$6, $7}, d;
    }"""
)


@triton.jit
def _code_value(code, CODES: tl.constexpr, DTYPE: tl.constexpr):
    """A 4-bit code as a number of DTYPE; exact."""
    if CODES == "int4":
        value = (code - 8).to(DTYPE)
    else:
        size = code & 7
        magnitude = tl.where(size < 4, size * 0.5, tl.where(size < 6, size - 2.0, size * 2.0 - 8.0))
        value = tl.where(code > 7, -magnitude, magnitude).to(DTYPE)
    return value


@triton.jit
def _words_to_tile(r0p0, r0p1, r1p0, r1p1):
    """Four [512] vectors (row half, pair) of one nibble -> the tile's values [64 rows, 32 inputs]."""
    values = tl.join(tl.join(r0p0, r0p1), tl.join(r1p0, r1p1))
    values = tl.reshape(values, (4, 8, 4, 2, 2, 2, 2))
    return tl.reshape(tl.permute(values, (0, 6, 1, 3, 4, 2, 5)), (64, 32))


@triton.jit
def _unpack(words, CODES: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """int32 [512] of one stored tile -> its inputs 0..31 and 32..63, two [64, 32] of DTYPE, not yet scaled."""
    if ASM:
        asm: tl.constexpr = INT4_TO_BF16 if CODES == "int4" else E2M1_TO_BF16
        l00, l01, h00, h01, l10, l11, h10, h11 = tl.inline_asm_elementwise(
            asm,
            "=h,=h,=h,=h,=h,=h,=h,=h,r",
            [words],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=1,
        )
        low = _words_to_tile(l00, l01, l10, l11)
        high = _words_to_tile(h00, h01, h10, h11)
    else:
        low_codes = _words_to_tile(words & 15, (words >> 16) & 15, (words >> 8) & 15, (words >> 24) & 15)
        high_codes = _words_to_tile((words >> 4) & 15, (words >> 20) & 15, (words >> 12) & 15, (words >> 28) & 15)
        low = _code_value(low_codes, CODES, DTYPE)
        high = _code_value(high_codes, CODES, DTYPE)
    return low, high


@triton.jit
def _scale(scales, at, CODES: tl.constexpr):
    """Scales at `at` as float32."""
    if CODES == "mxfp4":
        scale = (tl.load(scales + at).to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.load(scales + at).to(tl.float32)
    return scale


@triton.jit
def _add_tile(
    acc, x_low, x_high, packed, scales, tile_row, kt, K, groups,
    K_TILES: tl.constexpr, GROUP: tl.constexpr, CODES: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc [64, M] += tile (tile_row, kt) times 64 inputs of M rows, given as two [32, M]."""
    rows = tl.arange(0, 64)
    if CODES == "dense":
        inputs = kt * 64 + tl.arange(0, 32)
        at = packed + (tile_row * 64 + rows)[:, None] * K + inputs[None, :]
        low = tl.load(at, mask=(inputs < K)[None, :], other=0.0).to(DTYPE)
        high = tl.load(at + 32, mask=(inputs + 32 < K)[None, :], other=0.0).to(DTYPE)
        acc = tl.dot(low, x_low, acc, input_precision="ieee")
        acc = tl.dot(high, x_high, acc, input_precision="ieee")
    else:
        words = tl.load(packed + (tile_row * K_TILES + kt) * 512 + tl.arange(0, 512))
        low, high = _unpack(words, CODES, DTYPE, ASM)
        first = scales + tile_row * groups * 64
        part = tl.dot(low, x_low, input_precision="ieee")
        if GROUP >= 64:
            part = tl.dot(high, x_high, part, input_precision="ieee")
            acc += part * _scale(first, (kt * 64 // GROUP) * 64 + rows, CODES)[:, None]
        else:
            acc += part * _scale(first, kt * 128 + rows, CODES)[:, None]
            part = tl.dot(high, x_high, input_precision="ieee")
            acc += part * _scale(first, kt * 128 + 64 + rows, CODES)[:, None]
    return acc


@triton.jit
def _activate(gate, up, CLAMPED: tl.constexpr, alpha, limit):
    """silu(gate) * up, or gpt-oss's clamped form; float32."""
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        value = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
    else:
        value = up * gate / (1.0 + tl.exp(-gate))
    return value


@triton.jit
def _block(ids, order, block_expert, block, M: tl.constexpr, DIRECT: tl.constexpr):
    """The expert of a block and its pairs [M] (-1: none)."""
    slots = tl.arange(0, M)
    if DIRECT:
        expert = tl.load(ids + block)
        pair = tl.where(slots == 0, block, -1)
    else:
        expert = tl.load(block_expert + block)
        pair = tl.load(order + block * M + slots)
    return expert, pair


@triton.jit
def gate_up_kernel(
    x, packed, scales, bias, ids, order, block_expert, out,
    pairs, K, groups, alpha, limit,
    TOP_K: tl.constexpr, K_TILES: tl.constexpr, HALF_TILES: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,
    SEGMENTS: tl.constexpr, SPLIT: tl.constexpr, DIRECT: tl.constexpr, HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr, CODES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """gate and up of one 64-row tile for one block of pairs.

    SPLIT: program z sums segment z of the inputs and stores it: out float32 [SEGMENTS, pairs, 2 * I].
    Otherwise the segments are summed here, in the same order, and activated: out [pairs, I] in the dtype of x.
    """
    block, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    expert, pair = _block(ids, order, block_expert, block, M, DIRECT)
    if expert >= 0:
        dtype: tl.constexpr = x.dtype.element_ty
        live = pair >= 0
        row = x + (pair // TOP_K).to(tl.int64) * K
        gate_row = expert.to(tl.int64) * (2 * HALF_TILES) + tile
        up_row = gate_row + HALF_TILES
        inputs = tl.arange(0, 32)
        gate = tl.zeros((64, M), tl.float32)
        up = tl.zeros((64, M), tl.float32)
        length: tl.constexpr = (K_TILES + SEGMENTS - 1) // SEGMENTS
        first = part if SPLIT else 0
        for segment in range(first, first + (1 if SPLIT else SEGMENTS)):
            gate_part = tl.zeros((64, M), tl.float32)
            up_part = tl.zeros((64, M), tl.float32)
            for kt in range(segment * length, min(segment * length + length, K_TILES)):
                k = kt * 64 + inputs
                at = row[None, :] + k[:, None]
                x_low = tl.load(at, mask=live[None, :] & (k < K)[:, None], other=0.0)
                x_high = tl.load(at + 32, mask=live[None, :] & (k + 32 < K)[:, None], other=0.0)
                gate_part = _add_tile(
                    gate_part, x_low, x_high, packed, scales, gate_row, kt, K, groups,
                    K_TILES, GROUP, CODES, dtype, ASM,
                )  # fmt: skip
                up_part = _add_tile(
                    up_part, x_low, x_high, packed, scales, up_row, kt, K, groups,
                    K_TILES, GROUP, CODES, dtype, ASM,
                )  # fmt: skip
            gate += gate_part
            up += up_part
        column = tile * 64 + tl.arange(0, 64)
        width: tl.constexpr = HALF_TILES * 64
        if SPLIT:
            to = out + (part.to(tl.int64) * pairs + pair)[None, :] * (2 * width) + column[:, None]
            tl.store(to, gate, mask=live[None, :])
            tl.store(to + width, up, mask=live[None, :])
        else:
            if HAS_BIAS:
                gate += tl.load(bias + expert * 2 * width + column).to(tl.float32)[:, None]
                up += tl.load(bias + expert * 2 * width + width + column).to(tl.float32)[:, None]
            value = _activate(gate, up, CLAMPED, alpha, limit)
            to = out + pair.to(tl.int64)[None, :] * width + column[:, None]
            tl.store(to, value.to(dtype), mask=live[None, :])


@triton.jit
def _activated(h, bias, expert, pair, pairs, k, live, alpha, limit, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr,
               HAS_BIAS: tl.constexpr, CLAMPED: tl.constexpr):  # fmt: skip
    """[32, M] activated values of inputs k from the float32 partial sums [SEGMENTS, pairs, 2 * WIDTH]."""
    mask = live[None, :] & (k < WIDTH)[:, None]
    gate = tl.zeros((k.shape[0], pair.shape[0]), tl.float32)
    up = tl.zeros((k.shape[0], pair.shape[0]), tl.float32)
    for segment in tl.static_range(SEGMENTS):
        at = h + (segment * pairs + pair)[None, :] * (2 * WIDTH) + k[:, None]
        gate += tl.load(at, mask=mask, other=0.0)
        up += tl.load(at + WIDTH, mask=mask, other=0.0)
    if HAS_BIAS:
        gate += tl.load(bias + expert * 2 * WIDTH + k).to(tl.float32)[:, None]
        up += tl.load(bias + expert * 2 * WIDTH + WIDTH + k).to(tl.float32)[:, None]
    return _activate(gate, up, CLAMPED, alpha, limit)


@triton.jit
def down_kernel(
    h, packed, scales, gate_bias, bias, ids, order, block_expert, weights, out,
    pairs, tokens, N, groups, alpha, limit,
    TOP_K: tl.constexpr, K_TILES: tl.constexpr, N_TILES: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,
    SEGMENTS: tl.constexpr, SPLIT: tl.constexpr, DIRECT: tl.constexpr, HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr, CODES: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One 64-row tile of `down` for one block of pairs, times each pair's routing weight: out [TOP_K, tokens, N].

    SPLIT: h are gate_up's partial sums, which are summed and activated here.
    """
    block, tile = tl.program_id(0), tl.program_id(1)
    expert, pair = _block(ids, order, block_expert, block, M, DIRECT)
    if expert >= 0:
        live = pair >= 0
        width: tl.constexpr = K_TILES * 64
        tile_row = expert.to(tl.int64) * N_TILES + tile
        acc = tl.zeros((64, M), tl.float32)
        for kt in range(0, K_TILES):
            k = kt * 64 + tl.arange(0, 32)
            if SPLIT:
                x_low = _activated(h, gate_bias, expert, pair, pairs, k, live, alpha, limit, width, SEGMENTS,
                                   HAS_BIAS, CLAMPED).to(DTYPE)  # fmt: skip
                x_high = _activated(h, gate_bias, expert, pair, pairs, k + 32, live, alpha, limit, width, SEGMENTS,
                                    HAS_BIAS, CLAMPED).to(DTYPE)  # fmt: skip
            else:
                at = h + pair.to(tl.int64)[None, :] * width + k[:, None]
                x_low = tl.load(at, mask=live[None, :], other=0.0)
                x_high = tl.load(at + 32, mask=live[None, :], other=0.0)
            acc = _add_tile(acc, x_low, x_high, packed, scales, tile_row, kt, width, groups,
                            K_TILES, GROUP, CODES, DTYPE, ASM)  # fmt: skip
        column = tile * 64 + tl.arange(0, 64)
        if HAS_BIAS:
            acc += tl.load(bias + expert * N + column, mask=column < N, other=0.0).to(tl.float32)[:, None]
        acc *= tl.load(weights + pair, mask=live, other=0.0)[None, :]
        line = (pair % TOP_K).to(tl.int64) * tokens + pair // TOP_K
        to = out + line[None, :] * N + column[:, None]
        tl.store(to, acc.to(out.dtype.element_ty), mask=live[None, :] & (column < N)[:, None])


@triton.jit
def router_logits_kernel(x, weight, out, tokens, outputs, K, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr):
    """out [tokens, outputs] float32 = x [tokens, K] times weight [outputs, K]."""
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    acc = tl.zeros((M, N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        at = rows.to(tl.int64)[:, None] * K + k[None, :]
        a = tl.load(x + at, mask=(rows < tokens)[:, None] & (k < K)[None, :], other=0.0)
        at = columns[None, :] * K + k[:, None]
        b = tl.load(weight + at, mask=(columns < outputs)[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(a, b.to(a.dtype), acc, input_precision="ieee")
    at = rows.to(tl.int64)[:, None] * outputs + columns[None, :]
    tl.store(out + at, acc, mask=(rows < tokens)[:, None] & (columns < outputs)[None, :])


@triton.jit
def route_kernel(
    logits, bias, selection_bias, ids, weights,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, OUTPUTS: tl.constexpr,
    RULE: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SELECTION: tl.constexpr, SHARED: tl.constexpr, SHARED_GATE: tl.constexpr,
):  # fmt: skip
    """The experts of one token and their weights; equal scores go to the lower expert. SLOTS = TOP_K (+ 1 shared)."""
    token = tl.program_id(0)
    expert = tl.arange(0, BINS)
    known = expert < EXPERTS
    score = tl.load(logits + token * OUTPUTS + expert, mask=known, other=float("-inf"))
    if HAS_BIAS:
        score += tl.load(bias + expert, mask=known, other=0.0).to(tl.float32)
    if RULE == "softmax":
        score = tl.exp(score - tl.max(score, axis=0))
        score = score / tl.sum(score, axis=0)
    elif RULE == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-score))
    choice = score
    if HAS_SELECTION:
        choice += tl.load(selection_bias + expert, mask=known, other=0.0).to(tl.float32)
    choice = tl.where(known, choice, float("-inf"))
    slot = tl.arange(0, 16)
    chosen = tl.zeros((16,), tl.int32)
    value = tl.full((16,), float("-inf"), tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.argmax(choice, axis=0)
        chosen = tl.where(slot == i, best, chosen)
        value = tl.where(slot == i, tl.sum(tl.where(expert == best, score, 0.0), axis=0), value)
        choice = tl.where(expert == best, float("-inf"), choice)
    routed = slot < TOP_K
    if RULE == "topk_softmax":
        value = tl.exp(value - tl.max(value, axis=0))
    value = tl.where(routed, value, 0.0)
    if RENORMALIZE or RULE == "topk_softmax":
        value = value / tl.sum(value, axis=0)
    value *= SCALE
    if SHARED:
        gate = 1.0
        if SHARED_GATE:
            gate = 1.0 / (1.0 + tl.exp(-tl.load(logits + token * OUTPUTS + EXPERTS)))
        chosen = tl.where(slot == TOP_K, EXPERTS, chosen)
        value = tl.where(slot == TOP_K, gate, value)
    tl.store(ids + token * SLOTS + slot, chosen, mask=slot < SLOTS)
    tl.store(weights + token * SLOTS + slot, value, mask=slot < SLOTS)


@triton.jit
def group_kernel(
    ids, order, block_expert, pairs, blocks,
    PAIRS: tl.constexpr, EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCKS: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Sorts up to PAIRS pairs by expert into blocks of M that have one expert each; one program, stable."""
    index = tl.arange(0, PAIRS)
    valid = index < pairs
    expert = tl.load(ids + index, mask=valid, other=EXPERTS)
    counts = tl.histogram(expert, BINS)
    sorted_keys = tl.sort(expert * PAIRS + index)
    expert = sorted_keys // PAIRS
    pair = sorted_keys % PAIRS
    first = tl.cumsum(counts, 0) - counts
    needed = (counts + M - 1) // M
    first_block = tl.cumsum(needed, 0) - needed
    rank = index - tl.gather(first, expert, 0)
    block = tl.gather(first_block, expert, 0) + rank // M
    tl.store(block_expert + tl.arange(0, BLOCKS), -1, mask=tl.arange(0, BLOCKS) < blocks)
    for start in range(0, M):
        at = tl.arange(0, BLOCKS) * M + start
        tl.store(order + at, -1, mask=tl.arange(0, BLOCKS) < blocks)
    tl.debug_barrier()
    tl.store(order + block * M + rank % M, pair, mask=valid)
    tl.store(block_expert + block, expert, mask=valid & (rank % M == 0))
