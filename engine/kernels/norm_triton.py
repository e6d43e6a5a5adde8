"""Triton kernels of norm.py. A program owns ROWS whole rows, or a slice of one where many parts are added."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels._device import load_sum


@triton.jit
def _load_weight(weight_ptr, column, width, PLUS_ONE: tl.constexpr):
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    if PLUS_ONE:
        weight += 1.0
    return weight


@triton.jit
def _normalise(x, weight, width, eps):
    mean = tl.sum(x * x, axis=1) / width
    return x * tl.rsqrt(mean + eps)[:, None] * weight


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, rows, width, row_stride, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PLUS_ONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < width)
    weight = _load_weight(weight_ptr, column, width, PLUS_ONE)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row.to(tl.int64) * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    out = _normalise(x, weight, width, eps).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row.to(tl.int64) * width + column, out, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def add_rms_norm_kernel(
    y_ptr, residual_ptr, weight_ptr, out_ptr, rows, width, split_stride, row_stride, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, PLUS_ONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < width)
    weight = _load_weight(weight_ptr, column, width, PLUS_ONE)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = row.to(tl.int64) * width + column
    dtype = residual_ptr.dtype.element_ty
    x = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x += load_sum(y_ptr + row.to(tl.int64) * row_stride + column, inside, split_stride, SPLITS)
    x = x.to(dtype)
    tl.store(residual_ptr + at, x, mask=inside)
    tl.store(out_ptr + at, _normalise(x.to(tl.float32), weight, width, eps).to(dtype), mask=inside)


@triton.jit
def add_rms_norm_slices_kernel(
    y_ptr, residual_ptr, weight_ptr, out_ptr, squares_ptr, arrived_ptr, width, split_stride, row_stride, eps,
    SLICE: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, PLUS_ONE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, slices): each program adds SLICE columns of a row; the last to arrive normalises the row.

    squares float32 [rows, SLICES] gets each slice's sum of squares, added in their order, so that repeated runs are
    bit-equal. arrived int32 [rows] is zero before and after. Bytes moved: the parts and the residual once, the sum
    once more from L2.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = part * SLICE + tl.arange(0, SLICE)
    inside = column < width
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dtype = residual_ptr.dtype.element_ty
    place = residual_ptr + row * width + column
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    x += load_sum(y_ptr + row * row_stride + column, inside, split_stride, SPLITS)
    x = x.to(dtype).to(tl.float32)
    tl.store(place, x.to(dtype), mask=inside)
    tl.store(squares_ptr + row * SLICES + part, tl.sum(x * x, axis=0))
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") == SLICES - 1:
        tl.debug_barrier()
        square = 0.0
        for other in tl.static_range(SLICES):
            square += tl.load(squares_ptr + row * SLICES + other, cache_modifier=".cg")
        whole = tl.arange(0, BLOCK)
        at = row * width + whole
        summed = tl.load(residual_ptr + at, mask=whole < width, other=0.0, cache_modifier=".cg").to(tl.float32)
        summed *= tl.rsqrt(square / width + eps) * _load_weight(weight_ptr, whole, width, PLUS_ONE)
        tl.store(out_ptr + at, summed.to(dtype), mask=whole < width)
        tl.atomic_xchg(arrived_ptr + row, 0, sem="relaxed")
