"""Triton kernel of activation.py."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels._device import load_sum


@triton.jit
def gated_activation_kernel(
    y_ptr, out_ptr, width, split_stride, row_stride, clamp, alpha,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, CLAMPED: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[row, i] = act(gate[row, i]) * up[row, i]. A program owns BLOCK outputs of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    y_row = y_ptr + row * row_stride
    if INTERLEAVED:
        gate = load_sum(y_row + 2 * column, inside, split_stride, SPLITS)
        up = load_sum(y_row + 2 * column + 1, inside, split_stride, SPLITS)
    else:
        gate = load_sum(y_row + column, inside, split_stride, SPLITS)
        up = load_sum(y_row + width + column, inside, split_stride, SPLITS)
    if CLAMPED:
        gate = tl.minimum(gate, clamp)
        up = tl.minimum(tl.maximum(up, -clamp), clamp) + 1.0
    out = up * gate / (1.0 + tl.exp(-alpha * gate))
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=inside)
