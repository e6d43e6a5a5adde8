"""Device functions that the expert kernels share: 4-bit codes to numbers, scales, and the activation.

Weights are the left operand of every product: the words of a stored tile become the registers of the matrix
instruction without any exchange between threads (the order is engine/quant.py's).
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
def code_value(code, CODES: tl.constexpr, DTYPE: tl.constexpr):
    """A 4-bit code as a number of DTYPE; exact."""
    if CODES == "int4":
        value = (code - 8).to(DTYPE)
    else:
        size = code & 7
        magnitude = tl.where(size < 4, size * 0.5, tl.where(size < 6, size - 2.0, size * 2.0 - 8.0))
        value = tl.where(code > 7, -magnitude, magnitude).to(DTYPE)
    return value


@triton.jit
def unpack_words(words, CODES: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Words of any shape -> eight of DTYPE: rows r (low pair, high pair) and r + 8 (low pair, high pair).

    A pair is two neighbouring inputs; high ones are 32 inputs further on. Not scaled.
    """
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
    else:
        l00, l01 = code_value(words & 15, CODES, DTYPE), code_value((words >> 16) & 15, CODES, DTYPE)
        l10, l11 = code_value((words >> 8) & 15, CODES, DTYPE), code_value((words >> 24) & 15, CODES, DTYPE)
        h00, h01 = code_value((words >> 4) & 15, CODES, DTYPE), code_value((words >> 20) & 15, CODES, DTYPE)
        h10, h11 = code_value((words >> 12) & 15, CODES, DTYPE), code_value((words >> 28) & 15, CODES, DTYPE)
    return l00, l01, h00, h01, l10, l11, h10, h11


@triton.jit
def load_scale(pointers, mask, CODES: tl.constexpr):
    """Scales as float32, 0 where masked (an e8m0 code is the exponent of a float32)."""
    if CODES == "mxfp4":
        scale = (tl.load(pointers, mask=mask, other=0).to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    return scale


@triton.jit
def activate(gate, up, CLAMPED: tl.constexpr, alpha, limit):
    """silu(gate) * up, or gpt-oss's clamped form; float32."""
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        value = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
    else:
        value = up * gate / (1.0 + tl.exp(-gate))
    return value


@triton.jit
def block_of_pairs(ids, order, block_expert, block, M: tl.constexpr, DIRECT: tl.constexpr):
    """The expert of a block (-1: none) and its pairs [M] (-1: none); read past L1."""
    slots = tl.arange(0, M)
    if DIRECT:
        expert = tl.load(ids + block, cache_modifier=".cg")
        pair = tl.where(slots == 0, block, -1)
    else:
        expert = tl.load(block_expert + block, cache_modifier=".cg")
        pair = tl.load(order + block * M + slots, cache_modifier=".cg")
    return expert, pair
