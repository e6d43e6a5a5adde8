"""The DeltaNet kernels against the recurrence, in the Triton interpreter."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Batch, StateCache
from engine.config import DeltaNet
from engine.kernels import deltanet, deltanet_triton

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the Triton interpreter")
SPEC = DeltaNet(key_heads=2, value_heads=4, key_dim=16, value_dim=32)
SLOTS = 5


@triton.jit
def inverse_kernel(strict, out, C: tl.constexpr):
    at = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(out + at, deltanet_triton._unit_lower_inverse(tl.load(strict + at), C))


def make_weights(seed: int = 0, spec: DeltaNet = SPEC) -> deltanet.DeltaWeights:
    torch.manual_seed(seed)
    heads = spec.value_heads
    return deltanet.DeltaWeights(
        torch.randn(deltanet.channels(spec), spec.conv), torch.randn(heads), torch.randn(heads),
        1 + 0.3 * torch.randn(spec.value_dim), 1e-6,
    )  # fmt: skip


def make_cache(spec: DeltaNet = SPEC, dtype: torch.dtype = torch.float32) -> StateCache:
    conv = torch.randn(SLOTS, spec.conv, deltanet.channels(spec)).to(dtype)
    return StateCache(conv, torch.randn(SLOTS, spec.value_heads, spec.key_dim, spec.value_dim))


def make_batch(counts: list[int], firsts: list[int], decode: bool) -> Batch:
    def ints(values) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32)

    positions = [first + i for first, n in zip(firsts, counts, strict=True) for i in range(n)]
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    empty = ints([])
    return Batch(empty, ints(positions), empty, ints(starts), empty, empty, ints(range(1, len(counts) + 1)), empty,
                 decode, max(counts), 0)  # fmt: skip


def clone(cache: StateCache) -> StateCache:
    return StateCache(cache.conv.clone(), cache.state.clone())


def assert_same(got: StateCache, expected: StateCache) -> None:
    torch.testing.assert_close(got.conv, expected.conv, rtol=0, atol=0)
    torch.testing.assert_close(got.state, expected.state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("parts", [1, 3])
def test_step(parts):
    weights, cache = make_weights(), make_cache()
    batch = make_batch([1, 1, 1], [0, 2, 9], True)
    y = torch.randn(parts, 3, deltanet.row_width(SPEC))
    y = y[0] if parts == 1 else y
    expected_cache = clone(cache)
    expected = deltanet.delta_step_reference(y, SPEC, weights, batch, expected_cache)
    got = deltanet_triton.step(y, SPEC, weights, batch, cache)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert_same(cache, expected_cache)


@pytest.mark.parametrize(
    ("counts", "firsts"),
    [([1], [0]), ([63, 2], [0, 5]), ([64, 0, 65], [3, 0, 0]), ([3, 130], [1, 2])],
)
def test_prefill(counts, firsts):
    weights, cache = make_weights(1), make_cache()
    batch = make_batch(counts, firsts, False)
    y = torch.randn(sum(counts), deltanet.row_width(SPEC))
    expected_cache = clone(cache)
    expected = deltanet.delta_prefill_reference(y, SPEC, weights, batch, expected_cache)
    got = deltanet_triton.prefill(y, SPEC, weights, batch, cache)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    assert_same(cache, expected_cache)


@settings(max_examples=6, deadline=None)
@given(
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=4), padding=st.integers(0, 140), seed=st.integers(0, 99)
)
def test_prefill_of_any_lengths_and_rows_of_no_request(counts, padding, seed):
    if sum(counts) + padding == 0:
        return
    weights, cache = make_weights(seed), make_cache()
    firsts = [(seed + i) % 3 * 2 for i in range(len(counts))]
    batch = make_batch(counts, firsts, False)
    batch.positions = torch.cat([batch.positions, torch.zeros(padding, dtype=torch.int32)])
    y = torch.randn(sum(counts) + padding, deltanet.row_width(SPEC))
    expected_cache = clone(cache)
    expected = deltanet.delta_prefill_reference(y, SPEC, weights, batch, expected_cache)
    got = deltanet_triton.prefill(y, SPEC, weights, batch, cache)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    assert (got[sum(counts) :] == 0).all()
    assert_same(cache, expected_cache)


@pytest.mark.parametrize("alike", [False, True])
def test_prefill_in_half_precision_at_true_head_sizes(alike):
    """`alike`: every token has nearly the same key, beta is near 1 and nothing decays, the worst case of the solve."""
    spec = DeltaNet(key_heads=1, value_heads=1, key_dim=128, value_dim=128)
    weights, cache = make_weights(4, spec), make_cache(spec, torch.float16)
    y = torch.randn(130, deltanet.row_width(spec))
    if alike:
        weights.conv[:128] = 0
        weights.conv[:, -1] = 1
        y[:, 128:256] = torch.randn(128) + 0.05 * torch.randn(130, 128)
        y[:, -2], y[:, -1] = 5.0, -9.0
    batch, expected_cache = make_batch([130], [0], False), clone(cache)
    expected = deltanet.delta_prefill_reference(y.half(), spec, weights, batch, expected_cache)
    got = deltanet_triton.prefill(y.half(), spec, weights, batch, cache)
    for ours, theirs in ((got, expected), (cache.state[1], expected_cache.state[1])):
        assert (ours.float() - theirs.float()).abs().max() < 5e-3 * theirs.float().abs().max()


@pytest.mark.parametrize("size", [16, 64])
def test_the_triangular_inverse_by_doubling(size):
    torch.manual_seed(5)
    strict = torch.randn(size, size).tril(-1)
    out = torch.empty_like(strict)
    inverse_kernel[(1,)](strict, out, size)
    expected = torch.linalg.inv(strict.double() + torch.eye(size, dtype=torch.float64))
    assert ((out - expected).abs() <= 1e-4 * expected.abs().max()).all()
    assert (out.triu(1) == 0).all() and (out.diagonal() == 1).all()


def test_chunked_reference_equals_recurrence():
    torch.manual_seed(3)
    count, heads, dk, dv = 150, 3, 8, 16
    q, k = (torch.nn.functional.normalize(torch.randn(count, heads, dk), dim=-1) for _ in range(2))
    v, beta, g = torch.randn(count, heads, dv), torch.rand(count, heads), -torch.rand(count, heads)
    state = torch.randn(heads, dk, dv)
    for got, expected in zip(
        deltanet.delta_rule_chunked(q, k, v, beta, g, state),
        deltanet.delta_rule_recurrent(q, k, v, beta, g, state),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
