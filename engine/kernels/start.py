"""The start of a decode step whose tokens wait on the device: their embeddings and their requests' page tables."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels._launch import launch

START_BLOCK = 1024
"""Columns of an embedding, or entries of a page table, that a program copies."""


def start_decode_reference(
    pool: Tensor, slots: Tensor, table: Tensor, embedding: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """(the residual [R, H] in the dtype of the embedding, the page tables int32 [R, max_pages]) of R requests.

    pool int32 [slots]: the next token of every slot. slots int32 [R]: the requests' slots. table int32
    [slots, max_pages]. embedding [vocab, H], its rows taken times `scale` (in float32, rounded once).
    """
    rows = slots.long()
    hidden = embedding.index_select(0, pool.index_select(0, rows).long())
    scaled = hidden if scale == 1.0 else (hidden.float() * scale).to(hidden.dtype)
    return scaled, table.index_select(0, rows)


def start_decode(pool: Tensor, slots: Tensor, table: Tensor, embedding: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """See start_decode_reference."""
    function = start_decode_triton if pool.is_cuda else start_decode_reference
    return function(pool, slots, table, embedding, scale)


def start_decode_triton(
    pool: Tensor, slots: Tensor, table: Tensor, embedding: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """start_decode in one launch; reads and writes every row once."""
    from engine.kernels.start_triton import start_decode_kernel

    rows, hidden, pages = slots.shape[0], embedding.shape[1], table.shape[1]
    residual = torch.empty((rows, hidden), dtype=embedding.dtype, device=embedding.device)
    page_rows = torch.empty((rows, pages), dtype=torch.int32, device=table.device)
    if rows:
        hidden_blocks = -(-hidden // START_BLOCK)
        launch(
            start_decode_kernel, (rows, hidden_blocks + -(-pages // START_BLOCK)),
            pool, slots, table, embedding, residual, page_rows, hidden, pages, scale,
            HIDDEN_BLOCKS=hidden_blocks, BLOCK=START_BLOCK, num_warps=4,
        )  # fmt: skip
    return residual, page_rows
