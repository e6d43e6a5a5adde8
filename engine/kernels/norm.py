"""Root-mean-square norms: y = x / sqrt(mean(x^2) + eps) * w (or (1 + w)), arithmetic in float32, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels._launch import arrival_counters, launch, partials_of, power_of_2, whole


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """x [..., D], weight [D] -> [..., D] in the dtype of x."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (weight.float() + 1.0 if plus_one else weight.float())).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """See rms_norm_reference."""
    return (rms_norm_triton if x.is_cuda else rms_norm_reference)(x, weight, eps, plus_one)


def add_rms_norm_reference(y: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """Adds y ([T, H] or Partials) to the residual [T, H] in place (rounded to its dtype); the norm of the sum, [T, H].

    The norm is taken of the rounded residual, so that it does not depend on how the sum was fused.
    """
    residual.copy_((residual.float() + whole(y).float()).to(residual.dtype))
    return rms_norm_reference(residual, weight, eps, plus_one)


def add_rms_norm(y: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """See add_rms_norm_reference."""
    function = add_rms_norm_triton if residual.is_cuda else add_rms_norm_reference
    return function(y, residual, weight, eps, plus_one)


def _shape(width: int) -> dict[str, int]:
    """Rows a program and warps. Of the width alone: a row's sum must not be ordered by how many rows there are."""
    block = power_of_2(width)
    rows = max(1, 1024 // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": max(1, min(16, rows * block // 512))}


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """rms_norm in one launch; reads and writes x once."""
    from engine.kernels.norm_triton import rms_norm_kernel

    width = x.shape[-1]
    flat = x.reshape(-1, width)
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    rows = flat.shape[0]
    if rows:
        shape = _shape(width)
        grid = (-(-rows // shape["ROWS"]),)
        launch(rms_norm_kernel, grid, flat, weight, out, rows, width, flat.stride(0), eps, PLUS_ONE=plus_one, **shape)
    return out.reshape(x.shape)


SLICE, SLICED_ROWS, SLICED_ELEMENTS = 1024, 32, 12 * 1024
"""Columns of a slice; a row is cut into slices where rows are few and its parts many (one multiprocessor alone takes
5.7 us for 8 parts of 5,120 columns on an H200)."""


def add_rms_norm_triton(
    y: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool = False, sliced: bool | None = None
) -> Tensor:
    """add_rms_norm in one launch: reads y (Partials: 4 S bytes an element) and the residual, writes both results.

    `sliced`: whether several programs share a row; None: as its parts and the number of rows ask for.
    """
    from engine.kernels.norm_triton import add_rms_norm_kernel, add_rms_norm_slices_kernel

    rows, width = residual.shape
    out = torch.empty_like(residual)
    splits, split_stride, row_stride = partials_of(y)
    if not rows:
        return out
    if sliced is None:
        sliced = rows <= SLICED_ROWS and splits * width >= SLICED_ELEMENTS
    if sliced:
        slices = -(-width // SLICE)
        squares = torch.empty(rows, slices, dtype=torch.float32, device=residual.device)
        launch(
            add_rms_norm_slices_kernel, (rows, slices), y, residual, weight, out, squares, arrival_counters(residual),
            width, split_stride, row_stride, eps, SLICE=SLICE, SLICES=slices, BLOCK=power_of_2(width), SPLITS=splits,
            PLUS_ONE=plus_one, num_warps=8,
        )  # fmt: skip
        return out
    shape = _shape(width)
    launch(
        add_rms_norm_kernel, (-(-rows // shape["ROWS"]),), y, residual, weight, out, rows, width,
        split_stride, row_stride, eps, SPLITS=splits, PLUS_ONE=plus_one, **shape,
    )  # fmt: skip
    return out
