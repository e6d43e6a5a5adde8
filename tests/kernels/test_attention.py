"""The attention kernels against dense attention in float64, written here without the package's references."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import filled_cache, make_batch, token_slots

from engine.kernels._launch import arrival_counters
from engine.kernels.attention_decode import MOST_COMBINED, Segments, decode_attention, decode_attention_triton
from engine.kernels.attention_prefill import prefill_attention, prefill_attention_triton


def dense(q, cache, batch, scale, window=None, sinks=None):
    """Attention row by row, head by head, in float64."""
    slots = token_slots(batch, cache.page_size)
    pages, offsets = slots // cache.page_size, slots % cache.page_size
    k, v = cache.k[pages, :, offsets].double(), cache.v[pages, :, offsets].double()
    if cache.k_scale is not None:
        k *= cache.k_scale[pages, :, offsets].double()[..., None]
        v *= cache.v_scale[pages, :, offsets].double()[..., None]
    out = torch.zeros(q.shape, dtype=torch.float64)
    first = 0
    for r, length in enumerate(batch.kv_len.tolist()):
        begin, end = batch.query_start[r : r + 2].tolist()
        for row in range(begin, end if length else begin):
            position = length - (end - row)
            oldest = 0 if window is None else max(0, position + 1 - window)
            for head in range(q.shape[1]):
                kv_head = head // (q.shape[1] // k.shape[1])
                keys = k[first + oldest : first + position + 1, kv_head]
                scores = (keys @ q[row, head].double()) * scale
                weights = (scores - scores.max()).exp()
                total = weights.sum()
                if sinks is not None:
                    total = total + (sinks[head].double() - scores.max()).exp()
                out[row, head] = (weights / total) @ v[first + oldest : first + position + 1, kv_head]
        first += length
    return out


def setup(query_lens, kv_lens, heads, kv_heads, dim, page, dtype, padding_rows=0, seed=0, q_dtype=torch.float32):
    batch, pages = make_batch(query_lens, kv_lens, page, seed, padding_rows)
    cache = filled_cache(batch, pages, kv_heads, page, dim, dtype, seed)
    q = torch.randn((batch.rows, heads, dim), generator=torch.Generator().manual_seed(seed + 7)).to(q_dtype)
    return q, cache, batch, 1 / math.sqrt(dim)


TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.int8: 2e-5, torch.float8_e4m3fn: 4e-3}


def close(out, expected, dtype):
    assert not out.isnan().any()
    assert (out.double() - expected).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("function", [decode_attention, decode_attention_triton])
@pytest.mark.parametrize("heads,kv_heads,dim,page", [(4, 2, 16, 4), (3, 3, 48, 16), (20, 1, 32, 32)])
def test_decode_of_mixed_lengths_with_a_padding_request(function, heads, kv_heads, dim, page):
    q, cache, batch, scale = setup([1] * 5, [1, 129, 0, 16, 300], heads, kv_heads, dim, page, torch.float32)
    out = function(q, cache, batch, scale)
    close(out, dense(q, cache, batch, scale), torch.float32)
    assert (out[2] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("page", [8, 64])
def test_decode_reads_every_cache_dtype(dtype, page):
    q, cache, batch, scale = setup([1, 1], [70, 130], 4, 2, 16, page, dtype)
    close(decode_attention_triton(q, cache, batch, scale), dense(q, cache, batch, scale), dtype)


@pytest.mark.parametrize("function", [decode_attention, decode_attention_triton])
@pytest.mark.parametrize("window", [1, 5, 128, 1000])
def test_decode_with_window_and_sinks(function, window):
    q, cache, batch, scale = setup([1, 1, 1], [3, 257, 130], 4, 1, 16, 16, torch.float32)
    sinks = torch.tensor([-3.0, 0.0, 2.5, 30.0])
    close(function(q, cache, batch, scale, window, sinks), dense(q, cache, batch, scale, window, sinks), torch.float32)


@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.integers(0, 70), min_size=1, max_size=4), parts=st.sampled_from([1, 2, 8]),
       shortest=st.sampled_from([16, 32]), sinks=st.booleans(), window=st.sampled_from([None, 9]))  # fmt: skip
def test_decode_of_any_length_and_segment(lengths, parts, shortest, sinks, window):
    segments = Segments(parts, shortest, 64)
    q, cache, batch, scale = setup([1] * len(lengths), lengths, 2, 1, 16, 16, torch.float32)
    sink = torch.tensor([0.5, -0.5]) if sinks else None
    out = decode_attention_triton(q, cache, batch, scale, window, sink, segments=segments)
    close(out, dense(q, cache, batch, scale, window, sink), torch.float32)


@pytest.mark.parametrize("sinks", [False, True])
def test_segments_are_combined_by_the_last_program_or_by_a_second_launch(sinks):
    q, cache, batch, scale = setup([1] * 3, [600, 5, 33], 6, 2, 16, 16, torch.float32)
    sink = torch.linspace(-2, 2, 6) if sinks else None
    expected = dense(q, cache, batch, scale, None, sink)
    for segments in (Segments(8, 16, 128), Segments(64, 16, 16)):
        out = decode_attention_triton(q, cache, batch, scale, None, sink, segments=segments)
        close(out, expected, torch.float32)
        assert torch.equal(out, decode_attention_triton(q, cache, batch, scale, None, sink, segments=segments))
    assert Segments(8, 16, 128).most(600) == 8 and Segments(64, 16, 16).most(600) == 38 > MOST_COMBINED
    assert not arrival_counters(q).any()


@pytest.mark.parametrize("max_kv,most", [(1, 1), (256, 1), (257, 2), (2048, 8), (9000, 9), (64000, 63)])
def test_segments_of_a_request_are_bounded(max_kv, most):
    assert Segments(8, 256, 1024).most(max_kv) == most


def test_decode_of_a_row_is_bit_equal_alone_and_in_a_batch():
    q, cache, batch, scale = setup([1] * 4, [40, 300, 7, 129], 4, 2, 16, 16, torch.float32)
    together = decode_attention_triton(q, cache, batch, scale)
    for r in range(4):
        alone = make_batch([1], [int(batch.kv_len[r])], 16)[0]
        alone.page_table = batch.page_table[r : r + 1]
        alone.max_kv = 2048
        assert torch.equal(decode_attention_triton(q[r : r + 1], cache, alone, scale)[0], together[r])


@pytest.mark.parametrize("function", [decode_attention_triton, prefill_attention_triton])
def test_contiguous_pages_give_the_same_bits(function):
    q, _, _, scale = setup([1, 1], [70, 33], 4, 2, 16, 16, torch.float32)
    ordered, pages = make_batch([1, 1], [70, 33], 16)
    ordered.page_table = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]], dtype=torch.int32)
    cache = filled_cache(ordered, pages, 2, 16, 16, torch.float32)
    paged = function(q, cache, ordered, scale)
    assert torch.equal(function(q, cache, ordered, scale, contiguous=True), paged)
    close(paged, dense(q, cache, ordered, scale), torch.float32)


PREFILL = [prefill_attention, prefill_attention_triton]


@pytest.mark.parametrize("function", PREFILL)
@pytest.mark.parametrize("heads,kv_heads,dim,page", [(4, 2, 16, 4), (3, 1, 48, 16), (5, 5, 32, 64)])
def test_prefill_of_mixed_requests(function, heads, kv_heads, dim, page):
    q, cache, batch, scale = setup([1, 40, 3, 17], [60, 40, 0, 90], heads, kv_heads, dim, page, torch.float32, 21)
    out = function(q, cache, batch, scale)
    close(out, dense(q, cache, batch, scale), torch.float32)
    assert (out[41:44] == 0).all() and (out[61:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("page", [8, 64])
def test_prefill_reads_every_cache_dtype(dtype, page):
    q, cache, batch, scale = setup([30, 5], [30, 81], 4, 2, 16, page, dtype)
    close(prefill_attention_triton(q, cache, batch, scale), dense(q, cache, batch, scale), dtype)


@settings(max_examples=12, deadline=None)
@given(pieces=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=3),
       sinks=st.booleans(), window=st.sampled_from([None, 1, 20]), group=st.sampled_from([1, 3]))  # fmt: skip
def test_prefill_of_any_lengths(pieces, sinks, window, group):
    query_lens = [n for n, _ in pieces]
    if sum(query_lens) == 0:
        return
    q, cache, batch, scale = setup(query_lens, [n + past for n, past in pieces], group, 1, 16, 16, torch.float32, 2)
    sink = torch.linspace(-1, 1, group) if sinks else None
    out = prefill_attention_triton(q, cache, batch, scale, window, sink)
    close(out, dense(q, cache, batch, scale, window, sink), torch.float32)


def test_prefill_in_pieces_is_bit_equal_to_prefill_at_once():
    q, cache, batch, scale = setup([75], [75], 4, 2, 16, 16, torch.float32)
    whole = prefill_attention_triton(q, cache, batch, scale)
    for begin, end in ((0, 16), (16, 49), (49, 75)):
        piece = make_batch([end - begin], [end], 16)[0]
        piece.page_table = batch.page_table
        assert torch.equal(prefill_attention_triton(q[begin:end], cache, piece, scale), whole[begin:end])
