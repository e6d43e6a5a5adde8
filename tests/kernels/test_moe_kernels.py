"""The expert kernels against their references, in the Triton interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import MoeFfn
from engine.kernels import moe
from engine.quant import pack_mxfp4, quantize, stack_experts

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the Triton interpreter")


def make_weight(codes: str, experts: int, n: int, k: int, scale_dtype: torch.dtype = torch.float32):
    if codes == "dense":
        return torch.randn(experts, n, k) * k**-0.5
    if codes == "int4":
        return stack_experts([quantize(torch.randn(n, k) * k**-0.5, scale_dtype=scale_dtype) for _ in range(experts)])
    blocks = torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8)
    scales = torch.randint(120, 125, (experts, n, k // 32), dtype=torch.uint8)
    return stack_experts([pack_mxfp4(b, s) for b, s in zip(blocks, scales, strict=True)], "mxfp4")


@pytest.mark.parametrize("codes", ["int4", "mxfp4", "dense"])
@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(1, 512, 64), (5, 192, 128), (66, 64, 64)])
@pytest.mark.parametrize("clamp", [None, 0.5])
def test_experts_match_reference(codes, tokens, hidden, inner, clamp):
    torch.manual_seed(tokens)
    count = 4
    bias = [torch.randn(count, 2 * inner), torch.randn(count, hidden)] if clamp else [None, None]
    experts = moe.Experts(make_weight(codes, count, 2 * inner, hidden), make_weight(codes, count, hidden, inner), *bias)
    spec = MoeFfn(count, 2, inner, clamp=clamp, alpha=1.702 if clamp else 1.0)
    x = torch.randn(tokens, hidden)
    ids = torch.stack([torch.randperm(count)[:2] for _ in range(tokens)]).to(torch.int32)
    weights = torch.rand(tokens, 2)
    expected = moe.moe_experts_reference(x, ids, weights, experts, spec)
    got = moe.moe_experts_triton(x, ids, weights, experts, spec, asm=False)
    got = got.sum(0) if got.dim() == 3 else got
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


RULES = [
    MoeFfn(8, 3, 32),
    MoeFfn(8, 3, 32, renormalize=False),
    MoeFfn(8, 2, 32, shared=32, shared_gate=True),
    MoeFfn(8, 3, 32, shared=32, router="sigmoid", selection_bias=True, routed_scale=1.8),
    MoeFfn(8, 4, 32, router="topk_softmax", router_bias=True),
]


@pytest.mark.parametrize("spec", RULES)
def test_route_matches_reference(spec):
    from engine.kernels.moe_triton import route_kernel

    torch.manual_seed(0)
    tokens, shared = 9, spec.shared > 0
    logits = torch.randn(tokens, spec.experts + spec.shared_gate)
    logits[3, 2] = logits[3, 5]  # equal scores go to the lower expert
    bias = torch.randn(spec.experts) if spec.router_bias else None
    selection = torch.randn(spec.experts) if spec.selection_bias else None
    expected_ids, expected = moe.route_reference(logits, spec, bias, selection, shared)
    slots = expected_ids.shape[1]
    ids, weights = torch.empty(tokens, slots, dtype=torch.int32), torch.empty(tokens, slots)
    route_kernel[(tokens,)](
        logits, bias, selection, ids, weights, spec.experts, 8, spec.top_k, slots, logits.shape[1], spec.router,
        spec.renormalize, spec.routed_scale, bias is not None, selection is not None, shared, spec.shared_gate,
    )  # fmt: skip
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=12, deadline=None)
@given(tokens=st.integers(1, 40), slots=st.integers(1, 5), experts=st.integers(5, 17), seed=st.integers(0, 99))
def test_grouping_matches_reference(tokens, slots, experts, seed):
    from engine.kernels.moe_triton import group_kernel

    ids = torch.randint(0, experts, (tokens, slots), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    expected = moe.group_pairs_reference(ids, experts, 16)
    blocks = expected.expert.shape[0]
    order, expert = torch.empty(blocks * 16, dtype=torch.int32), torch.empty(blocks, dtype=torch.int32)
    power = [moe._power_of_two(n) for n in (ids.numel(), experts + 1, blocks)]
    group_kernel[(1,)](ids, order, expert, ids.numel(), blocks, power[0], experts, power[1], power[2], 16)
    assert torch.equal(order, expected.order)
    assert torch.equal(expert, expected.expert)


def test_grouping_of_a_known_case():
    ids = torch.tensor([[2, 0], [2, 1], [2, 0]], dtype=torch.int32)
    groups = moe.group_pairs_reference(ids, 4, 2)
    assert groups.expert.tolist() == [0, 1, 2, 2, -1, -1]
    assert groups.order.tolist() == [1, 5, 3, -1, 0, 2, 4, -1, -1, -1, -1, -1]


@pytest.mark.parametrize("codes", ["int4", "mxfp4"])
def test_few_tokens_give_the_same_bits_as_many(codes, monkeypatch):
    """A small grid splits the inputs into segments, a large one sums the same segments in the same order."""
    torch.manual_seed(1)
    experts = moe.Experts(make_weight(codes, 4, 128, 1024), make_weight(codes, 4, 1024, 64))
    spec, x = MoeFfn(4, 2, 64), torch.randn(6, 1024)
    ids, weights = torch.tensor([[0, 1]] * 6, dtype=torch.int32), torch.rand(6, 2)
    one = moe.moe_experts_triton(x[:1], ids[:1], weights[:1], experts, spec, asm=False)
    monkeypatch.setattr(moe, "MIN_PROGRAMS", 0)
    many = moe.moe_experts_triton(x, ids, weights, experts, spec, asm=False)
    assert torch.equal(one[:, 0], many[:, 0])
