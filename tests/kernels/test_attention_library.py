"""Long prompt pieces by PyTorch's kernels: pages gathered, lengths padded, and who may go there."""

from dataclasses import replace

import pytest
import torch
from kernel_cases import filled_cache, make_batch
from test_attention import close, dense, setup

from engine.batch import LayerCache
from engine.kernels import attention_library as library


@pytest.mark.parametrize("function", [library.gather_pages_reference, library.gather_pages_triton])
@pytest.mark.parametrize(("length", "padded"), [(1, 1), (70, 70), (130, 192), (64, 128)])
@pytest.mark.parametrize("dim", [16, 24])
def test_pages_are_gathered_and_the_rest_is_zero(function, length, padded, dim):
    batch, pages = make_batch([length], [length], 16)
    cache = filled_cache(batch, pages, 2, 16, dim, torch.float32)
    for got, stored in zip(function(cache, batch.page_table[0], length, padded), (cache.k, cache.v), strict=True):
        assert got.shape == (2, padded, dim) and (got[:, length:] == 0).all()
        for position in range(length):
            page = int(batch.page_table[0, position // 16])
            assert torch.equal(got[:, position], stored[page, :, position % 16])


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (70, 70), (64, 64), (33, 130), (1, 65)])
@pytest.mark.parametrize("heads,kv_heads,dim", [(4, 2, 16), (6, 1, 32)])
@pytest.mark.parametrize("backend", ["cudnn", "flash"])
def test_the_library_reads_one_request_from_its_pages(rows, length, heads, kv_heads, dim, backend):
    if backend == "cudnn" and rows < length:
        pytest.skip("cuDNN's causal mask begins at the first key")
    q, cache, batch, scale = setup([rows], [length], heads, kv_heads, dim, 16, torch.float32)
    out = library.prefill_attention_library(q, cache, batch, scale, backend)
    assert out.is_contiguous()
    close(out, dense(q, cache, batch, scale), torch.float32)


def test_cudnn_sees_few_lengths_none_much_longer():
    assert [library.padded_length(n) for n in (1, 128, 1000, 1024, 1025, 2048, 2049, 5000, 8192, 8193)] == [
        128, 128, 1024, 1024, 1152, 2048, 2304, 5120, 8192, 9216,
    ]  # fmt: skip
    lengths = range(min(rule.rows for rule in library.RULES.values()), 8193)
    assert len({library.padded_length(n) for n in lengths}) == 17
    assert all(n <= library.padded_length(n) <= n * 9 / 8 + 1 for n in lengths)


def test_every_published_head_dimension_has_a_rule():
    assert library.rule_for(64) is library.RULES[64]
    assert library.rule_for(80) is library.rule_for(128) is library.RULES[128]
    assert library.rule_for(256) is library.RULES[256]
    assert library.rule_for(100) is None and library.rule_for(512) is None


@pytest.fixture
def gpu_with_both(monkeypatch):
    monkeypatch.setattr(library, "supported", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def piece(rows, length, requests=1, dtype=torch.bfloat16, page=64, dim=128):
    batch, _ = make_batch([rows] * requests, [length] * requests, page)
    cache = LayerCache(*(torch.empty(1, 8, page, dim, dtype=dtype) for _ in range(2)))
    return torch.empty(rows * requests, 32, dim, dtype=torch.bfloat16), cache, batch


def test_who_goes_to_the_library(gpu_with_both, monkeypatch):
    rows = library.RULES[128].rows
    assert library.library_backend(*piece(rows, rows), None, None) == "cudnn"
    assert library.library_backend(*piece(rows, 4 * rows), None, None) == "flash"
    assert library.library_backend(*piece(rows - 1, rows - 1), None, None) is None
    assert library.library_backend(*piece(2048, 2048, dim=64), None, None) is None
    assert library.library_backend(*piece(4096, 4096, dim=64), None, None) == "cudnn"
    assert library.library_backend(*piece(rows, rows, requests=2), None, None) is None
    assert library.library_backend(*piece(rows, rows, dtype=torch.int8), None, None) is None
    assert library.library_backend(*piece(rows, rows, dtype=torch.float16), None, None) is None
    assert library.library_backend(*piece(rows, rows), 128, None) is None
    assert library.library_backend(*piece(rows, rows), None, torch.zeros(32)) is None
    q, cache, batch = piece(rows, rows)
    assert library.library_backend(q, cache, replace(batch, max_query=rows - 64), None, None) is None
    assert library.library_backend(q, cache, replace(batch, max_kv=1 << 18), None, None) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert library.library_backend(q, cache, batch, None, None) is None


def test_a_gpu_without_cudnn_takes_flash_attention_or_none(gpu_with_both, monkeypatch):
    arguments = (*piece(2048, 2048), None, None)
    monkeypatch.setattr(library, "supported", lambda name, *_: name == "flash")
    assert library.library_backend(*arguments) == "flash"
    monkeypatch.setattr(library, "supported", lambda name, *_: name == "cudnn")
    assert library.library_backend(*piece(2048, 4096), None, None) is None
    monkeypatch.setattr(library, "supported", lambda *_: False)
    assert library.library_backend(*arguments) is None
