"""Device functions that the two Hopper kernels of the 4-bit product share: unpacking into registers, and the output.

The stored order of engine/quant.py is that of the A operand of wgmma in registers. A thread reads 16 consecutive bytes
of a tile (four words); the functions here rename registers until those are its part of a [rows, 64] bf16 operand. No
byte crosses a thread: every layout conversion is checked to be trivial when the kernel is compiled.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from engine.kernels._gluon import barrier


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
def a_operand(words, rows: gl.constexpr, a_layout: gl.constexpr):
    """Packed words -> bf16 [rows, 64] of code - 8 in the A-operand layout."""
    low, high = _unpack(_spread(words, rows, a_layout))
    return _beside(low, high, rows, a_layout)


@gluon.jit
def scaled_operand(words, scale, rows: gl.constexpr, a_layout: gl.constexpr):
    """Packed words and a scale a row -> bf16 [rows, 64] of (code - 8) * scale in the A-operand layout."""
    spread = _spread(words, rows, a_layout)
    low, high = _unpack_scaled(spread, gl.expand_dims(scale, 1).broadcast_to([rows, 32]))
    return _beside(low, high, rows, a_layout)


@gluon.jit
def pdl_wait():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pdl_launch():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def span(index, programs, blocks, groups, PARTS: gl.constexpr):
    """(first unit, unit after the last) of program `index` of `programs`; a unit is one scale group of one block.

    Whole blocks where another kernel adds the parts; else equal shares, which may begin and end inside a block.
    """
    if PARTS:
        return index * blocks // programs * groups, (index + 1) * blocks // programs * groups
    units = blocks * groups
    return index * units // programs, (index + 1) * units // programs


@gluon.jit
def _sharers(block, programs, blocks, groups):
    """(the first program with a unit of `block`, how many programs have one), for equal shares."""
    units = blocks * groups
    first = ((block * groups + 1) * programs - 1) // units
    last = ((block + 1) * groups * programs - 1) // units
    return first, last - first + 1


@gluon.jit
def place(block, index, programs, blocks, split, splits, groups, last_groups, PARTS: gl.constexpr):
    """(slot, slots) of what program `index` of slice `split` adds to `block`: slots follow the order of K.

    groups: of every slice but the last, which has last_groups.
    """
    if PARTS:
        return split, splits
    first, each = _sharers(block, programs, blocks, groups)
    last_first, last_each = _sharers(block, programs, blocks, last_groups)
    first = gl.where(split == splits - 1, last_first, first)
    return split * each + index - first, (splits - 1) * each + last_each


@gluon.jit
def _store_part(acc, pointer, first_row, rows, n, block, M: gl.constexpr, BN: gl.constexpr, mma: gl.constexpr):
    """acc [BN, M] (outputs by rows of x) into float32 [rows, n] at `pointer`, from the registers it is in."""
    columns = block * BN + gl.arange(0, BN, gl.SliceLayout(1, mma))
    out_rows = first_row + gl.arange(0, M, gl.SliceLayout(0, mma))
    inside = (out_rows < rows)[None, :] & (columns < n)[:, None]
    gl.store(pointer + out_rows[None, :] * n + columns[:, None], acc, mask=inside, cache_modifier=".cg")


@gluon.jit
def _halves(values, BN: gl.constexpr, R: gl.constexpr):
    """values [BN, R] as two [BN, R / 2]."""
    return gl.split(values.reshape([BN, 2, R // 2]).permute([0, 2, 1]))


@gluon.jit
def _store_quarter(values, out_ptr, first_row, rows, n, block, R: gl.constexpr, BN: gl.constexpr, flat: gl.constexpr):
    """values [BN, R] (outputs by rows of x) into out [rows, n], turned round through shared memory."""
    columns = block * BN + gl.arange(0, BN, gl.SliceLayout(0, flat))
    out_rows = first_row + gl.arange(0, R, gl.SliceLayout(1, flat))
    inside = (out_rows < rows)[:, None] & (columns < n)[None, :]
    turned = gl.convert_layout(values.permute([1, 0]), flat)
    gl.store(out_ptr + out_rows[:, None] * n + columns[None, :], turned, mask=inside)


@gluon.jit
def _store_in_quarters(values, out_ptr, row, rows, n, block, M: gl.constexpr, BN: gl.constexpr, flat: gl.constexpr):
    """values [BN, M] into out from row `row` on, a quarter of the rows at a time."""
    R: gl.constexpr = M // 4
    low, high = _halves(values, BN, M)
    first, second = _halves(low, BN, 2 * R)
    third, fourth = _halves(high, BN, 2 * R)
    _store_quarter(first, out_ptr, row, rows, n, block, R, BN, flat)
    _store_quarter(second, out_ptr, row + R, rows, n, block, R, BN, flat)
    _store_quarter(third, out_ptr, row + 2 * R, rows, n, block, R, BN, flat)
    _store_quarter(fourth, out_ptr, row + 3 * R, rows, n, block, R, BN, flat)


@gluon.jit
def finish(
    acc,
    out_ptr,
    parts_ptr,
    arrived_ptr,
    rows,
    n,
    block,
    slot,
    slots,
    M: gl.constexpr,
    BN: gl.constexpr,
    mma: gl.constexpr,
    PARTS: gl.constexpr,
    row_block=0,
):
    """Writes acc [BN, M] (outputs by rows of x), part `slot` of `slots` of a block's sum, where it belongs.

    out [rows, n] in the activation dtype, parts float32 [slots, rows, n], both contiguous.
    PARTS: to parts[slot], for another kernel to add. Else, with one slot, to out. Else to parts, and the last program
    of a block to arrive adds them in the order of slots, so that repeated runs are bit-equal; arrived_ptr holds one
    counter a block, zero before the launch and zero again after it, so that a captured graph can be replayed.
    """
    # With room beside the ring to turn 128 x 64 round at once, one program less would fit a multiprocessor.
    QUARTERS: gl.constexpr = M == 128 and BN == 64
    AT_ONCE: gl.constexpr = 4 if M * BN <= 16 * 128 else 1  # parts read together; more would cost registers
    lanes: gl.constexpr = 16 if BN == 64 else 32
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [32 // lanes, lanes], [gl.num_warps(), 1], [1, 0])
    columns = block * BN + gl.arange(0, BN, gl.SliceLayout(0, flat))
    out_rows = row_block * M + gl.arange(0, M, gl.SliceLayout(1, flat))
    inside = (out_rows < rows)[:, None] & (columns < n)[None, :]
    offsets = out_rows[:, None] * n + columns[None, :]
    size = n.to(gl.int64) * rows
    if PARTS:
        _store_part(acc, parts_ptr + slot * size, row_block * M, rows, n, block, M, BN, mma)
    elif slots > 1:
        if QUARTERS:
            _store_part(acc, parts_ptr + slot * size, row_block * M, rows, n, block, M, BN, mma)
        else:
            part = gl.convert_layout(acc.permute([1, 0]), flat)
            gl.store(parts_ptr + slot * size + offsets, part, mask=inside, cache_modifier=".cg")
        barrier()
        counter = arrived_ptr + row_block * gl.cdiv(n, BN) + block
        if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == slots - 1:
            barrier()
            total = gl.zeros([M, BN], gl.float32, flat)
            for first in range(0, slots, AT_ONCE):
                for ahead in gl.static_range(AT_ONCE):
                    there = inside & (first + ahead < slots)
                    pointers = parts_ptr + (first + ahead) * size + offsets
                    total += gl.load(pointers, mask=there, other=0.0, cache_modifier=".cg")
            gl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=inside)
            gl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
    elif QUARTERS:
        _store_in_quarters(acc.to(out_ptr.dtype.element_ty), out_ptr, row_block * M, rows, n, block, M, BN, flat)
    else:
        result = gl.convert_layout(acc.to(out_ptr.dtype.element_ty).permute([1, 0]), flat)
        gl.store(out_ptr + offsets, result, mask=inside)
