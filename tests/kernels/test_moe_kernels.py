"""The expert kernels against their references, in the Triton interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import MoeFfn
from engine.kernels import moe
from engine.models import model_config
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


def make_experts(codes: str, count: int, hidden: int, inner: int, bias: bool = False) -> moe.Experts:
    biases = [torch.randn(count, 2 * inner), torch.randn(count, hidden)] if bias else [None, None]
    return moe.Experts(make_weight(codes, count, 2 * inner, hidden), make_weight(codes, count, hidden, inner), *biases)


def summed(y: torch.Tensor) -> torch.Tensor:
    return y.sum(0) if y.dim() == 3 else y


SHAPES = [(1, 192, 64), (5, 128, 128), (66, 64, 64)]


@pytest.mark.parametrize("codes", ["int4", "mxfp4", "dense"])
@pytest.mark.parametrize(("tokens", "hidden", "inner"), SHAPES)
@pytest.mark.parametrize("clamp", [None, 0.5])
def test_experts_match_reference(codes, tokens, hidden, inner, clamp):
    torch.manual_seed(tokens)
    count = 4
    experts = make_experts(codes, count, hidden, inner, bias=clamp is not None)
    spec = MoeFfn(count, 2, inner, clamp=clamp, alpha=1.702 if clamp else 1.0)
    x = torch.randn(tokens, hidden)
    ids = torch.stack([torch.randperm(count)[:2] for _ in range(tokens)]).to(torch.int32)
    weights = torch.rand(tokens, 2)
    expected = moe.moe_experts_reference(x, ids, weights, experts, spec)
    got = summed(moe.moe_experts_triton(x, ids, weights, experts, spec, asm=False))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


STRIPS = [((16, 8), (32, 8)), ((32, 4), (64, 4)), ((64, 16), (16, 4))]
AWKWARD = [("int4", 1, 320, 64), ("mxfp4", 9, 64, 320), ("int4", 2, 96, 64)]


@pytest.mark.parametrize("strips", STRIPS)
@pytest.mark.parametrize(("codes", "tokens", "hidden", "inner"), AWKWARD)
def test_every_strip_and_sizes_that_it_does_not_divide(codes, tokens, hidden, inner, strips, monkeypatch):
    """5 tiles of K in chunks of 4, 8 or 16; a block of 8 and one of a single pair; half a tile."""
    torch.manual_seed(tokens)
    launches = moe.Launches(few_gate=strips[:1], few_down=strips[1:], more=strips, wide=strips)
    monkeypatch.setattr(moe, "LAUNCHES", launches)
    experts, spec = make_experts(codes, 3, hidden, inner, bias=True), MoeFfn(3, 2, inner)
    x, weights = torch.randn(tokens, hidden), torch.rand(tokens, 2)
    ids = torch.tensor([[2, 0]] * tokens, dtype=torch.int32)
    expected = moe.moe_experts_reference(x, ids, weights, experts, spec)
    got = moe.moe_experts_triton(x, ids, weights, experts, spec, asm=False)
    assert got.shape == (2, tokens, hidden)
    torch.testing.assert_close(got.sum(0), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_a_row_has_the_same_bits_alone_beside_others_and_grouped():
    """What pads a captured step, or another request, changes nothing; 5 tokens are grouped, fewer are not."""
    torch.manual_seed(1)
    experts, spec = make_experts("int4", 4, 320, 64), MoeFfn(4, 2, 64)
    x, weights = torch.randn(5, 320), torch.rand(5, 2)
    ids = torch.tensor([[0, 1]] * 5, dtype=torch.int32)
    one, few, all_of_them = (
        moe.moe_experts_triton(x[:n], ids[:n], weights[:n], experts, spec, asm=False) for n in (1, 2, 5)
    )
    assert torch.equal(one[:, 0], few[:, 0])
    assert torch.equal(few, all_of_them[:, :2])


# Programs of one token, at least two a multiprocessor of an H200 (132) and resident at once (4 a multiprocessor).
GEOMETRIES = {
    "Qwen3-Coder-30B": ((16, 8), 384, (32, 8), 512),
    "Qwen3.6-35B-A3B": ((16, 8), 288, (64, 4), 288),
    "Qwen3.5-122B-A10B": ((32, 4), 288, (64, 4), 432),
    "GLM-4.7-Flash": ((16, 8), 480, (32, 8), 320),
    "gpt-oss-20b": ((32, 4), 360, (32, 8), 360),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_one_token_fills_the_gpu(name):
    config = model_config(name)
    spec = config.layers[-1].ffn
    slots, tiles, hidden_tiles = spec.top_k + (spec.shared > 0), spec.intermediate // 64, config.hidden // 64
    gate, down = moe.few_strips(1, slots, 8, tiles, hidden_tiles)
    programs = [slots * n * 64 // strip[0] for n, strip in ((tiles, gate), (hidden_tiles, down))]
    assert (gate, programs[0], down, programs[1]) == GEOMETRIES[name]
    assert all(2 * 132 <= n <= 4 * 132 for n in programs)


LAUNCHED = {
    4: ["few_route", "few_gate_up", "few_down"],
    5: ["few_route", "group_few", "few_gate_up", "few_down"],
    65: ["router_logits", "route", "group_few", "gate_up", "down", "sum_slots"],
    600: ["router_logits", "route", "count", "place", "gate_up", "down", "sum_slots"],
}


@pytest.mark.parametrize("tokens", LAUNCHED)
def test_what_is_launched_for_a_layer(tokens, monkeypatch):
    names: list[str] = []
    monkeypatch.setattr(
        moe, "launch", lambda kernel, *_, **__: names.append(kernel.fn.__name__.removesuffix("_kernel"))
    )
    spec = MoeFfn(8, 2, 64)
    x = torch.zeros(tokens, 64)
    _, ids, weights = moe.choose_experts_triton(x, torch.zeros(8, 64), spec, None, None, False)
    moe.moe_experts_triton(x, ids, weights, make_experts("int4", 8, 64, 64), spec)
    assert names == LAUNCHED[tokens]


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_every_block_of_a_prompt_matches_reference(rows, monkeypatch):
    """Rows of a block, one expert that nobody visits and one that has more than a block."""
    torch.manual_seed(rows)
    monkeypatch.setattr(moe, "BLOCK_ROWS", ((float("inf"), rows),))
    experts, spec = make_experts("int4", 4, 128, 64), MoeFfn(4, 2, 64)
    x, weights = torch.randn(70, 128), torch.rand(70, 2)
    ids = torch.tensor([[0, 3], [2, 0]], dtype=torch.int32).repeat(35, 1)
    expected = moe.moe_experts_reference(x, ids, weights, experts, spec)
    torch.testing.assert_close(
        moe.moe_experts_triton(x, ids, weights, experts, spec, asm=False), expected, rtol=1e-4, atol=1e-4
    )


RULES = [
    MoeFfn(8, 3, 32),
    MoeFfn(8, 3, 32, renormalize=False),
    MoeFfn(8, 2, 32, shared=32, shared_gate=True),
    MoeFfn(8, 3, 32, shared=32, router="sigmoid", selection_bias=True, routed_scale=1.8),
    MoeFfn(8, 4, 32, router="topk_softmax", router_bias=True),
]


@pytest.mark.parametrize("spec", RULES)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 320), (9, 576), (37, 64), (70, 192)])
def test_the_router_matches_reference(spec, tokens, hidden):
    torch.manual_seed(tokens)
    shared = spec.shared > 0
    x, router = torch.randn(tokens, hidden), torch.randn(spec.experts + spec.shared_gate, hidden) * hidden**-0.5
    router[5] = router[2]  # equal scores go to the lower expert
    bias = torch.randn(spec.experts) if spec.router_bias else None
    selection = torch.randn(spec.experts) if spec.selection_bias else None
    if bias is not None:
        bias[5] = bias[2]
    if selection is not None:
        selection[5] = selection[2]
    logits, ids, weights = moe.choose_experts_triton(x, router, spec, bias, selection, shared)
    torch.testing.assert_close(logits, moe.router_logits_reference(x, router), rtol=1e-4, atol=1e-5)
    expected_ids, expected = moe.route_reference(logits, spec, bias, selection, shared)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    assert moe.arrival_counters(x).sum() == 0


def test_the_gate_of_a_shared_expert_that_stands_apart_is_in_the_logits():
    torch.manual_seed(0)
    spec = MoeFfn(8, 2, 32, shared=32, shared_gate=True)
    x, router = torch.randn(3, 64), torch.randn(9, 64)
    logits, ids, _ = moe.choose_experts_triton(x, router, spec, None, None, False)
    assert ids.shape == (3, 2)
    torch.testing.assert_close(logits[:, 8], x @ router[8], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("router", ["softmax", "sigmoid", "topk_softmax"])
def test_logits_that_are_no_numbers_still_choose_experts_that_exist(router):
    """A row of NaN (as padding may hold) must not lead the products out of their memory, nor change other rows."""
    torch.manual_seed(0)
    spec = MoeFfn(6, 3, 32, router=router)
    x, weight = torch.randn(5, 64), torch.randn(6, 64)
    _, expected, _ = moe.choose_experts_triton(x, weight, spec, None, None, False)
    x[3] = float("nan")
    _, ids, _ = moe.choose_experts_triton(x, weight, spec, None, None, False)
    assert ids.min() >= 0 and ids.max() < 6
    others = [0, 1, 2, 4]
    assert torch.equal(ids[others], expected[others])


def assert_grouped(ids: torch.Tensor, experts: int, size: int) -> None:
    """The order of a block without expert is undefined."""
    expected, got = moe.group_pairs_reference(ids, experts, size), moe.group_pairs_triton(ids, experts, size)
    assert torch.equal(got.expert, expected.expert)
    used = (expected.expert >= 0).repeat_interleave(size)
    assert torch.equal(got.order[used], expected.order[used])


@settings(max_examples=12, deadline=None)
@given(
    tokens=st.integers(1, 40), slots=st.integers(1, 5), experts=st.integers(5, 17), size=st.sampled_from([8, 16, 64]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_grouping_matches_reference(tokens, slots, experts, size, seed):
    ids = torch.randint(0, experts, (tokens, slots), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    assert_grouped(ids, experts, size)


@settings(max_examples=8, deadline=None)
@given(
    tokens=st.integers(1, 90), experts=st.sampled_from([5, 31, 33]), size=st.sampled_from([8, 128]),
    kind=st.sampled_from(["one expert", "even", "random"]),
)  # fmt: skip
def test_grouping_in_chunks_matches_reference(tokens, experts, size, kind):
    """As for a prompt, whose pairs are more than one program counts; 90 tokens are 6 chunks of 64 pairs."""
    pairs = torch.arange(tokens * 4)
    ids = {"one expert": pairs * 0 + 3, "even": pairs % experts, "random": pairs * 7919 % 10007 % experts}[kind]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "GROUPED_AT_ONCE", 0)
        patch.setattr(moe, "GROUP_CHUNK", 64)
        assert_grouped(ids.reshape(tokens, 4).to(torch.int32), experts, size)


def test_grouping_of_a_known_case():
    ids = torch.tensor([[2, 0], [2, 1], [2, 0]], dtype=torch.int32)
    groups = moe.group_pairs_reference(ids, 4, 2)
    assert groups.expert.tolist() == [0, 1, 2, 2, -1, -1]
    assert groups.order.tolist() == [1, 5, 3, -1, 0, 2, 4, -1, -1, -1, -1, -1]
