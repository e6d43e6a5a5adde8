"""Triton kernel of start.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def start_decode_kernel(
    pool_ptr, slots_ptr, table_ptr, embedding_ptr, residual_ptr, page_rows_ptr, hidden, pages, scale,
    HIDDEN_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (requests, HIDDEN_BLOCKS + blocks of the page table): a program copies BLOCK values of one request.

    Bytes moved: a row of the embedding and the int32 entries of a row of the page table, each read and written once.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if block < HIDDEN_BLOCKS:
        column = block * BLOCK + tl.arange(0, BLOCK)
        token = tl.load(pool_ptr + slot).to(tl.int64)
        values = tl.load(embedding_ptr + token * hidden + column, mask=column < hidden).to(tl.float32) * scale
        tl.store(residual_ptr + row * hidden + column, values.to(residual_ptr.dtype.element_ty), mask=column < hidden)
    else:
        entry = (block - HIDDEN_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        page = tl.load(table_ptr + slot * pages + entry, mask=entry < pages)
        tl.store(page_rows_ptr + row * pages + entry, page, mask=entry < pages)
