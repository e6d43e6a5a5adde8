"""The decode attention kernels on a GPU: bits alone and in a batch, poison, captured graphs, windows and sinks."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from engine.kernels._launch import arrival_counters
from engine.kernels.attention_decode import decode_attention_gluon, decode_attention_reference, decode_attention_triton
from tools import gpu_kernels as cases

pytestmark = pytest.mark.gpu
SCALE = 0.1


def inputs(lengths, dtype, heads=32, kv_heads=8, dim=128):
    batch, pages = cases.make_batch(1, lengths)
    return cases.random(len(lengths), heads, dim), cases.make_cache(pages, kv_heads, dim, dtype), batch


@pytest.mark.parametrize("dtype", [cases.BF16, cases.INT8, cases.FP8])
@pytest.mark.parametrize("heads,kv_heads,dim", [(32, 8, 64), (32, 8, 128), (64, 8, 128), (64, 4, 128), (3, 3, 64)])
@pytest.mark.parametrize("window,sinks", [(None, False), (128, True), (1000, False)])
def test_every_shape_against_the_reference(dtype, heads, kv_heads, dim, window, sinks):
    q, cache, batch = inputs([1, 63, 64, 65, 1000, 1025, 4097], dtype, heads, kv_heads, dim)
    sink = cases.random(heads) if sinks else None
    expected = decode_attention_reference(q, cache, batch, SCALE, window, sink)
    assert cases.error(decode_attention_gluon(q, cache, batch, SCALE, window, sink), expected, 0.01) < 1


FORMS = pytest.mark.parametrize("attend", [decode_attention_gluon, decode_attention_triton])


@pytest.mark.parametrize("dtype", [cases.BF16, cases.INT8])
@pytest.mark.parametrize("heads,kv_heads", [(24, 4), (16, 2)])
@pytest.mark.parametrize("window,sinks", [(None, False), (300, True)])
def test_heads_of_256_against_the_reference(dtype, heads, kv_heads, window, sinks):
    q, cache, batch = inputs([1, 63, 64, 65, 170, 1000, 4097, 0], dtype, heads, kv_heads, 256)
    sink = cases.random(heads) if sinks else None
    expected = decode_attention_reference(q, cache, batch, SCALE, window, sink)
    for max_kv in (4097, 65536):
        batch.max_kv = max_kv
        assert cases.error(decode_attention_triton(q, cache, batch, SCALE, window, sink), expected, 0.01) < 1


@FORMS
@pytest.mark.parametrize("dtype", [cases.BF16, cases.INT8, cases.FP8])
def test_a_row_is_bit_equal_alone_and_in_a_batch(attend, dtype):
    lengths = [4000, 1, 130, 64, 999] + [170] * 20
    q, cache, batch = inputs(lengths, dtype)
    together = attend(q, cache, batch, SCALE)
    for r in range(6):
        alone, _ = cases.make_batch(1, [lengths[r]])
        alone.page_table, alone.max_kv = batch.page_table[r : r + 1], 32768
        assert torch.equal(attend(q[r : r + 1], cache, alone, SCALE)[0], together[r])


@FORMS
def test_poison_behind_the_last_token_never_shows(attend):
    q, cache, batch = inputs([70, 1, 127], cases.BF16)
    clean = attend(q, cache, batch, SCALE)
    for r, length in enumerate((70, 1, 127)):
        page = int(batch.page_table[r, (length - 1) // 64])
        cache.k[page, :, length % 64 :], cache.v[page, :, length % 64 :] = float("nan"), float("nan")
    cache.k[0], cache.v[0] = float("nan"), float("nan")
    assert torch.equal(attend(q, cache, batch, SCALE), clean)


@FORMS
@pytest.mark.parametrize("requests", [4, 40])
def test_a_captured_step_serves_other_lengths_and_leaves_its_counters_at_zero(attend, requests):
    q, cache, batch = inputs([3000] * requests, cases.BF16)
    attend(q, cache, batch, SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, cache, batch, SCALE)
    for lengths in ([1, 0, 3000, 257], [256, 255, 64, 2999]):
        batch.kv_len.copy_(torch.tensor(lengths * (requests // 4), dtype=torch.int32))
        expected = decode_attention_reference(q, cache, batch, SCALE)
        graph.replay()
        first = out.clone()
        assert cases.error(first, expected, 0.01) < 1
        assert not arrival_counters(q).any()
        for _ in range(20):
            graph.replay()
            assert torch.equal(out, first)
