"""The DeltaNet kernels against the recurrence, in the Triton interpreter."""

from __future__ import annotations

import pytest
import torch

from engine.batch import Batch, StateCache
from engine.config import DeltaNet
from engine.kernels import deltanet

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the Triton interpreter")
SPEC = DeltaNet(key_heads=2, value_heads=4, key_dim=16, value_dim=32)
SLOTS = 5


def make_weights(seed: int = 0) -> deltanet.DeltaWeights:
    torch.manual_seed(seed)
    heads = SPEC.value_heads
    return deltanet.DeltaWeights(
        torch.randn(deltanet.channels(SPEC), SPEC.conv), torch.randn(heads), torch.randn(heads),
        1 + 0.3 * torch.randn(SPEC.value_dim), 1e-6,
    )  # fmt: skip


def make_cache() -> StateCache:
    conv = torch.randn(SLOTS, SPEC.conv, deltanet.channels(SPEC))
    return StateCache(conv, torch.randn(SLOTS, SPEC.value_heads, SPEC.key_dim, SPEC.value_dim))


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
    from engine.kernels import deltanet_triton

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
    from engine.kernels import deltanet_triton

    weights, cache = make_weights(1), make_cache()
    batch = make_batch(counts, firsts, False)
    y = torch.randn(sum(counts), deltanet.row_width(SPEC))
    expected_cache = clone(cache)
    expected = deltanet.delta_prefill_reference(y, SPEC, weights, batch, expected_cache)
    got = deltanet_triton.prefill(y, SPEC, weights, batch, cache)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    assert_same(cache, expected_cache)


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
