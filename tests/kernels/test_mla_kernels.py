"""The latent-attention kernels against their references, in the Triton interpreter."""

from __future__ import annotations

import pytest
import torch

from engine.batch import Batch, LayerCache
from engine.config import LatentAttention, Rope
from engine.kernels import mla

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the Triton interpreter")
PAGE, PAGES = 16, 24


def make_spec(interleaved: bool) -> LatentAttention:
    return LatentAttention(5, 24, 32, 16, 32, 32, Rope(rotary_dim=32, interleaved=interleaved), 0.2)


def make_table(positions: int = 300) -> torch.Tensor:
    angles = torch.outer(torch.arange(positions).float(), 10000.0 ** -(torch.arange(16) / 16))
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def make_cache(spec: LatentAttention, dtype: torch.dtype) -> LayerCache:
    """A cache whose every slot is poisoned."""
    if dtype != torch.int8:
        k, v = (torch.full((PAGES, 1, PAGE, d), float("nan"), dtype=dtype) for d in (spec.kv_rank, spec.rope_dim))
        return LayerCache(k, v)
    k, v = (torch.full((PAGES, 1, PAGE, d), 99, dtype=dtype) for d in (spec.kv_rank, spec.rope_dim))
    return LayerCache(k, v, *(torch.full((PAGES, 1, PAGE), float("nan")) for _ in range(2)))


def make_batch(counts: list[int], lengths: list[int]) -> Batch:
    """Requests with `lengths` tokens in the cache, the last `counts` of them new."""

    def ints(values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    order, table = iter(torch.randperm(PAGES - 1).tolist()), torch.zeros(len(counts), 12, dtype=torch.int32)
    for request, length in enumerate(lengths):
        for i in range(-(-length // PAGE)):
            table[request, i] = next(order) + 1
    positions = [
        p for n, length in zip(counts, lengths, strict=True) for p in range(max(length - n, 0), max(length, n))
    ]
    owners = [r for r, n in enumerate(counts) for _ in range(n)]
    slots = [int(table[r, p // PAGE]) * PAGE + p % PAGE if lengths[r] else 0
             for r, p in zip(owners, positions, strict=True)]  # fmt: skip
    starts = ints([sum(counts[:i]) for i in range(len(counts) + 1)])
    empty = ints([])
    decode = all(n == 1 for n in counts)
    return Batch(empty, ints(positions), ints(slots), starts, ints(lengths), table, empty, empty, decode,
                 max(counts), max(lengths))  # fmt: skip


def fill(cache: LayerCache, spec: LatentAttention, batch: Batch, table: torch.Tensor) -> None:
    """Writes made-up latents for every token of every request."""
    for request, length in enumerate(batch.kv_len.tolist()):
        positions = torch.arange(length, dtype=torch.int32)
        pages = batch.page_table[request, (positions // PAGE).long()]
        whole = Batch(**{**vars(batch), "positions": positions, "slots": pages * PAGE + positions % PAGE})
        y = torch.randn(length, spec.q_rank + spec.kv_rank + spec.rope_dim)
        mla.latent_write_reference(
            y, spec, torch.ones(spec.q_rank), torch.ones(spec.kv_rank), table, whole, cache, torch.float32
        )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dtype", "parts"), [(torch.float32, 1), (torch.float16, 2), (torch.int8, 1)])
def test_write(interleaved, dtype, parts):
    from engine.kernels import mla_triton

    torch.manual_seed(0)
    spec, table, batch = make_spec(interleaved), make_table(), make_batch([3, 1], [20, 1])
    y = torch.randn(parts, 4, spec.q_rank + spec.kv_rank + spec.rope_dim)
    y = y[0] if parts == 1 else y
    weights = torch.randn(spec.q_rank), torch.randn(spec.kv_rank)
    caches = make_cache(spec, dtype), make_cache(spec, dtype)
    expected = mla.latent_write_reference(y, spec, *weights, table, batch, caches[0], torch.float32)
    got = mla_triton.latent_write(y, spec, *weights, table, batch, caches[1], torch.float32)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for name, tensor in vars(caches[0]).items():
        if isinstance(tensor, torch.Tensor):
            loose = {"rtol": 0, "atol": 1} if tensor.dtype == torch.int8 else {"rtol": 2e-3, "atol": 1e-5}
            torch.testing.assert_close(getattr(caches[1], name), tensor, equal_nan=True, **loose)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize(
    ("counts", "lengths"),
    [([1], [1]), ([1, 1, 1], [130, 0, 17]), ([20, 1, 3], [20, 70, 35]), ([33], [64])],
)
def test_attention(dtype, counts, lengths, monkeypatch):
    from engine.kernels import mla_triton

    monkeypatch.setattr(mla_triton, "_shares", lambda max_kv: 2)  # so that one program has several tiles
    torch.manual_seed(1)
    spec, table = make_spec(True), make_table()
    batch, cache = make_batch(counts, lengths), make_cache(make_spec(True), dtype)
    fill(cache, spec, batch, table)
    q_latent = torch.randn(sum(counts), spec.heads, spec.kv_rank)
    q_rope = torch.randn(sum(counts), spec.heads, spec.nope_dim + spec.rope_dim)[..., spec.nope_dim :]
    expected = mla.latent_attention_reference(q_latent, q_rope, spec, table, batch, cache)
    if batch.decode:
        value_down = torch.randn(spec.heads, spec.kv_rank, spec.value_dim)
        expected = torch.einsum("thr,hrv->thv", expected, value_down).flatten(1)
        got = mla_triton.latent_decode(q_latent, q_rope, value_down, spec, table, batch, cache)
    else:
        got = mla_triton.latent_attention(q_latent, q_rope, spec, table, batch, cache)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 16, 17])
def test_absorb(rows):
    from engine.kernels import mla_triton

    torch.manual_seed(2)
    nope, key_up = torch.randn(rows, 5, 56)[..., :24], torch.randn(5, 24, 32)
    expected = torch.einsum("thk,hkn->thn", nope, key_up)
    torch.testing.assert_close(mla_triton.absorb(nope, key_up), expected, rtol=1e-4, atol=1e-4)
