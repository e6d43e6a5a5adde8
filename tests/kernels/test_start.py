"""The start of a decode step: tokens from the pool, their embeddings, the page tables of their slots."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.start import start_decode, start_decode_triton


@pytest.mark.parametrize("function", [start_decode, start_decode_triton])
def test_slots_find_their_token_and_pages(function):
    pool = torch.tensor([0, 2, 1], dtype=torch.int32)
    table = torch.tensor([[0, 0], [7, 8], [9, 0]], dtype=torch.int32)
    embedding = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    residual, pages = function(pool, torch.tensor([2, 1, 0], dtype=torch.int32), table, embedding, 2.0)
    assert residual.tolist() == [[6.0, 8.0], [10.0, 12.0], [2.0, 4.0]]
    assert pages.tolist() == [[9, 0], [7, 8], [0, 0]] and pages.dtype == torch.int32


@settings(max_examples=8, deadline=None)
@given(rows=st.integers(0, 5), hidden=st.integers(1, 2100), pages=st.integers(1, 2100), half=st.booleans(),
       scale=st.sampled_from([1.0, 11.3]))  # fmt: skip
def test_the_kernel_for_any_shape(rows, hidden, pages, half, scale):
    generator = torch.Generator().manual_seed(rows)
    embedding = torch.randn((50, hidden), generator=generator).to(torch.float16 if half else torch.float32)
    table = torch.randint(0, 2**31 - 1, (9, pages), generator=generator, dtype=torch.int32)
    pool = torch.randint(0, 50, (9,), generator=generator, dtype=torch.int32)
    slots = torch.randint(0, 9, (rows,), generator=generator, dtype=torch.int32)
    residual, page_rows = start_decode_triton(pool, slots, table, embedding, scale)
    expected = (embedding[pool[slots.long()].long()].float() * scale).to(embedding.dtype)
    assert torch.equal(residual, expected) and torch.equal(page_rows, table[slots.long()])
