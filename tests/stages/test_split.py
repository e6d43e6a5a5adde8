"""The division of layers over stages and of prompts into pieces, against literal values."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineError
from engine.models import model_config
from engine.pieces import PieceSizer
from engine.split import attention_ratio, layer_costs, split_layers, stage_layers


@pytest.mark.parametrize(
    ("costs", "head", "stages", "expected"),
    [
        ([1.0] * 4, 0.0, 1, [(0, 4)]),
        ([1.0] * 4, 0.0, 2, [(0, 2), (2, 4)]),
        ([1.0] * 4, 2.0, 2, [(0, 3), (3, 4)]),
        ([1.0] * 6, 1.0, 3, [(0, 2), (2, 4), (4, 6)]),
        ([5.0, 1.0, 1.0, 1.0, 1.0, 1.0], 0.0, 2, [(0, 1), (1, 6)]),
        ([1.0, 1.0, 1.0, 9.0], 9.0, 4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        ([1.0] * 3, 100.0, 2, [(0, 2), (2, 3)]),
    ],
)
def test_literal_divisions(costs, head, stages, expected):
    assert split_layers(costs, head, stages) == expected


@pytest.mark.parametrize("stages", [0, 5])
def test_more_stages_than_layers_are_refused(stages):
    with pytest.raises(EngineError, match="a model of 4 layers takes 1 to 4 stages"):
        split_layers([1.0] * 4, 0.0, stages)


def best_of_all(costs, head, stages):
    """The dearest stage of the best division, by trying all."""
    if stages == 1:
        return sum(costs) + head
    rest = range(1, len(costs) - stages + 2)
    return min(max(sum(costs[:n]), best_of_all(costs[n:], head, stages - 1)) for n in rest)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_division_is_better(data):
    costs = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    head, stages = data.draw(st.integers(0, 20)), data.draw(st.integers(1, len(costs)))
    found = split_layers(costs, head, stages)
    assert [first for first, _ in found] == [0, *(last for _, last in found[:-1])]
    assert found[-1][1] == len(costs) and all(first < last for first, last in found)
    dearest = max(sum(costs[a:b]) + (head if b == len(costs) else 0) for a, b in found)
    assert dearest == best_of_all(costs, head, stages)


def test_costs_are_shares_and_the_head_counts():
    costs, head = layer_costs(model_config("Llama-3.2-1B"))
    assert sum(costs) + head == pytest.approx(1.0)
    # 128,256 x 2,048 of the head beside 16 layers of 60.8 million: half its share of the bytes.
    assert head == pytest.approx(0.5 * 262_668_288 / (262_668_288 + 16 * 60_817_408))


@pytest.mark.parametrize(
    ("model", "stages", "expected"),
    [
        ("Llama-3.2-1B", 2, [(0, 9), (9, 16)]),
        ("Qwen3-8B", 2, [(0, 19), (19, 36)]),
        ("Qwen3.5-122B-A10B", 4, [(0, 13), (13, 26), (26, 38), (38, 48)]),
    ],
)
def test_published_models(model, stages, expected):
    assert stage_layers(model_config(model), stages) == expected


def test_attention_ratio_of_a_dense_model():
    # Qwen3-8B: 36 layers, 32 heads of 128; products of 192,937,984 weights a layer.
    expected = 2.0 * 2 * 32 * 128 / 192_937_984 / 2
    assert attention_ratio(model_config("Qwen3-8B")) == pytest.approx(expected)


def test_pieces_without_attention_are_equal():
    sizer = PieceSizer(2, 8192, 0.0)
    budget = sizer.budget(64_000)
    assert budget == 4032
    assert [sizer.count(budget, context) for context in (0, 4032, 60_000)] == [4032] * 3


def test_pieces_shrink_as_the_context_grows():
    sizer = PieceSizer(2, 8192, 1e-4)
    budget = sizer.budget(64_000)
    # x + 1e-4 (2 L x + x^2) = 4032 + 1e-4 * 4032^2 gives 1,107 at L = 20,000: 0.65 of the way from 4,032 to it.
    alone = (-5 + math.sqrt(25 + 4e-4 * (4032 + 1e-4 * 4032**2))) / 2e-4
    assert alone == pytest.approx(1107.0, abs=0.1)
    assert sizer.count(budget, 20_000) == int(4032 + 0.65 * (alone - 4032)) // 64 * 64 == 2112
    assert sizer.count(budget, 10_000_000) == 1408


def test_a_burst_keeps_its_piece_until_nothing_waits():
    sizer = PieceSizer(4, 8192, 0.0)
    assert [sizer.budget(n) for n in (64_000, 128_000, 10_000, 0, 10_000)] == [2048, 4032, 4032, 0, 1024]


@given(st.integers(0, 200_000), st.floats(0, 1e-3), st.integers(1, 8), st.integers(1, 9000))
def test_a_piece_is_never_empty_and_aligned(context, ratio, stages, most):
    sizer = PieceSizer(stages, most, ratio)
    count = sizer.count(sizer.budget(100_000), context)
    assert 1 <= count <= most and (count < 64 or count % 64 == 0)
