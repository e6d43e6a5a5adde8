"""The plain-Triton kernels over the packed 4-bit form: one-request product, dequantization, sum of partial products.

They run on any GPU that Triton supports and in its interpreter. The stored order of a tile (engine/quant.py) is undone
by reshapes and transpositions of the 2,048 bytes, which cost nothing: no byte is gathered.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def w4_gemv_kernel(
    x_ptr,
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    rows,
    n,
    k,
    k_tiles,
    slice_tiles,
    HAS_ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out[split, row, n] = sum over the slice of x[row, k] * w[n, k]: a program owns 64 outputs of one row of x.

    x [rows, k] contiguous, any float; out float32. Grid (n_tiles, splits, rows). Every row reads the weight again: this
    is the product of a single request. A thread keeps 16 sums, one for each of its bytes, and adds them at the end.
    """
    n_tile = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    warp = tl.arange(0, 4)[:, None, None, None, None, None, None]
    lane = tl.arange(0, 8)[None, :, None, None, None, None, None]
    quad = tl.arange(0, 4)[None, None, :, None, None, None, None]
    block = tl.arange(0, 2)[None, None, None, :, None, None, None]
    half = tl.arange(0, 2)[None, None, None, None, :, None, None]
    pair = tl.arange(0, 2)[None, None, None, None, None, :, None]
    row_half = tl.arange(0, 2)[None, None, None, None, None, None, :]
    column = 16 * block + 8 * half + 2 * quad + pair
    w_row = 16 * warp + 8 * row_half + lane
    offsets = tl.arange(0, 2048)
    groups = tl.cdiv(k_tiles * 64, GROUP)
    first = split * slice_tiles
    last = tl.minimum(first + slice_tiles, k_tiles)
    acc = tl.zeros([4, 8, 4, 2, 2, 2, 2], tl.float32)
    base = packed_ptr + n_tile.to(tl.int64) * k_tiles * 2048
    for tile in range(first, last):
        packed = tl.reshape(tl.load(base + tile * 2048 + offsets), [4, 8, 4, 2, 2, 2, 2])
        k_low = tile * 64 + column
        x_low = tl.load(x_ptr + row * k + k_low, mask=k_low < k, other=0.0).to(tl.float32)
        x_high = tl.load(x_ptr + row * k + k_low + 32, mask=k_low + 32 < k, other=0.0).to(tl.float32)
        low_group = (n_tile * groups + tile * 64 // GROUP) * 64
        high_group = (n_tile * groups + (tile * 64 + 32) // GROUP) * 64
        low = (packed & 15).to(tl.float32)
        high = (packed >> 4).to(tl.float32)
        if HAS_ZEROS:
            low -= tl.load(zeros_ptr + low_group + w_row).to(tl.float32)
            high -= tl.load(zeros_ptr + high_group + w_row).to(tl.float32)
        else:
            low -= 8.0
            high -= 8.0
        if GROUP == 32:
            acc += low * x_low * tl.load(scales_ptr + low_group + w_row).to(tl.float32)
            acc += high * x_high * tl.load(scales_ptr + high_group + w_row).to(tl.float32)
        else:
            acc += (low * x_low + high * x_high) * tl.load(scales_ptr + low_group + w_row).to(tl.float32)
    total = tl.sum(tl.sum(tl.sum(tl.sum(acc, 5), 4), 3), 2)
    rows_out = 16 * tl.arange(0, 4)[:, None, None] + tl.arange(0, 8)[None, :, None] + 8 * tl.arange(0, 2)[None, None, :]
    column_out = n_tile * 64 + rows_out
    out = out_ptr + (split * rows + row).to(tl.int64) * n + column_out
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=column_out < n)


@triton.jit
def w4_dequantize_kernel(
    packed_ptr, scales_ptr, zeros_ptr, out_ptr, n, k, k_tiles, HAS_ZEROS: tl.constexpr, GROUP: tl.constexpr
):
    """out[n, k] = (code - zero) * scale. A program owns one tile of 64 x 64. Grid (k_tiles, n_tiles).

    Moves 0.5 bytes and a share of the scales in, one element of out a weight.
    """
    k_tile = tl.program_id(0)
    n_tile = tl.program_id(1)
    groups = tl.cdiv(k_tiles * 64, GROUP)
    packed = tl.load(packed_ptr + (n_tile.to(tl.int64) * k_tiles + k_tile) * 2048 + tl.arange(0, 2048))
    packed = tl.reshape(packed, [4, 8, 4, 2, 2, 2, 2])
    packed = tl.reshape(tl.permute(packed, [0, 6, 1, 3, 4, 2, 5]), [64, 32])
    row = tl.arange(0, 64)
    low_group = (n_tile * groups + k_tile * 64 // GROUP) * 64 + row
    high_group = (n_tile * groups + (k_tile * 64 + 32) // GROUP) * 64 + row
    if HAS_ZEROS:
        low = (packed & 15).to(tl.float32) - tl.load(zeros_ptr + low_group).to(tl.float32)[:, None]
        high = (packed >> 4).to(tl.float32) - tl.load(zeros_ptr + high_group).to(tl.float32)[:, None]
    else:
        low = (packed & 15).to(tl.float32) - 8.0
        high = (packed >> 4).to(tl.float32) - 8.0
    low *= tl.load(scales_ptr + low_group).to(tl.float32)[:, None]
    high *= tl.load(scales_ptr + high_group).to(tl.float32)[:, None]
    out_row = n_tile * 64 + row[:, None]
    column = k_tile * 64 + tl.arange(0, 32)[None, :]
    out = out_ptr + out_row.to(tl.int64) * k + column
    dtype = out_ptr.dtype.element_ty
    inside = out_row < n
    tl.store(out, low.to(dtype), mask=inside & (column < k))
    tl.store(out + 32, high.to(dtype), mask=inside & (column + 32 < k))


@triton.jit
def sum_partials_kernel(
    partials_ptr, out_ptr, count, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False
):
    """out[i] = sum over s of partials[s, i], in the order of s. A program owns BLOCK elements.

    Moves 4 * SPLITS bytes in and one element out. The kernel after this one may start at once: it waits in its turn.
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partials_ptr + split * count + index, mask=inside, other=0.0)
    tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def w4_dot_kernel(
    x_ptr,
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    rows,
    n,
    k,
    x_stride,
    k_tiles,
    slice_tiles,
    HAS_ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
):
    """The fused product in plain Triton: the twin of the Hopper kernels, for other GPUs and for the interpreter.

    out[split, row, n] float32; x's rows x_stride elements apart. A program owns 64 outputs of M rows over one slice of
    K, scales the weight in float32 and rounds it once to x's dtype. Grid (n_tiles, row blocks, splits). Moves the
    weight once a row block and x once a row tile of the weight.
    """
    n_tile = tl.program_id(0)
    row_block = tl.program_id(1)
    split = tl.program_id(2)
    groups = tl.cdiv(k_tiles * 64, GROUP)
    w_row = tl.arange(0, 64)
    out_row = row_block * M + tl.arange(0, M)
    column = tl.arange(0, 32)
    x_base = x_ptr + tl.minimum(out_row, rows - 1)[None, :].to(tl.int64) * x_stride
    acc = tl.zeros([64, M], tl.float32)
    for tile in range(split * slice_tiles, tl.minimum((split + 1) * slice_tiles, k_tiles)):
        packed = tl.load(packed_ptr + (n_tile.to(tl.int64) * k_tiles + tile) * 2048 + tl.arange(0, 2048))
        packed = tl.reshape(packed, [4, 8, 4, 2, 2, 2, 2])
        packed = tl.reshape(tl.permute(packed, [0, 6, 1, 3, 4, 2, 5]), [64, 32])
        low_group = (n_tile * groups + tile * 64 // GROUP) * 64 + w_row
        high_group = (n_tile * groups + (tile * 64 + 32) // GROUP) * 64 + w_row
        low = (packed & 15).to(tl.float32)
        high = (packed >> 4).to(tl.float32)
        if HAS_ZEROS:
            low -= tl.load(zeros_ptr + low_group).to(tl.float32)[:, None]
            high -= tl.load(zeros_ptr + high_group).to(tl.float32)[:, None]
        else:
            low -= 8.0
            high -= 8.0
        low *= tl.load(scales_ptr + low_group).to(tl.float32)[:, None]
        high *= tl.load(scales_ptr + high_group).to(tl.float32)[:, None]
        k_low = tile * 64 + column[:, None]
        x_low = tl.load(x_base + k_low, mask=k_low < k, other=0.0)
        x_high = tl.load(x_base + k_low + 32, mask=k_low + 32 < k, other=0.0)
        acc += tl.dot(low.to(x_low.dtype), x_low, input_precision="ieee")
        acc += tl.dot(high.to(x_high.dtype), x_high, input_precision="ieee")
    columns = n_tile * 64 + w_row
    out = out_ptr + (split * rows + out_row[None, :]).to(tl.int64) * n + columns[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(out_row < rows)[None, :] & (columns < n)[:, None])
