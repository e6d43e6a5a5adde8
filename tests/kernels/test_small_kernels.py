"""Norms and activations: literal values, and the kernels against float64 for random shapes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.activation import clamped_swiglu, clamped_swiglu_triton, silu_mul, silu_mul_triton
from engine.kernels.norm import add_rms_norm, add_rms_norm_triton, rms_norm, rms_norm_triton


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("function", [rms_norm, rms_norm_triton])
def test_rms_norm_of_three_and_four(function):
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, -0.5])
    rms = math.sqrt(12.5 + 0.5)
    assert torch.allclose(function(x, weight, 0.5), torch.tensor([[3 / rms, -2 / rms]]))
    assert torch.allclose(function(x, weight, 0.5, True), torch.tensor([[6 / rms, 2 / rms]]))


@pytest.mark.parametrize("function", [add_rms_norm, add_rms_norm_triton])
@pytest.mark.parametrize("partials", [False, True])
def test_add_rms_norm_updates_the_residual(function, partials):
    y = torch.tensor([[1.0, 5.0]])
    y = torch.stack([y, -2 * y, 2 * y]) if partials else y
    residual = torch.tensor([[2.0, -1.0]])
    out = function(y, residual, torch.ones(2), 0.0)
    assert residual.tolist() == [[3.0, 4.0]]
    assert torch.allclose(out, torch.tensor([[3.0, 4.0]]) / math.sqrt(12.5))


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(0, 9), width=st.integers(1, 300), splits=st.integers(0, 5), plus_one=st.booleans(),
       half=st.booleans())  # fmt: skip
def test_norm_kernels_for_any_shape(rows, width, splits, plus_one, half):
    dtype = torch.float16 if half else torch.float32
    y = random(splits, rows, width) if splits else random(rows, width).to(dtype)
    residual, weight = random(rows, width, seed=1).to(dtype), random(width, seed=2).to(dtype)
    summed = (residual.double() + (y.double().sum(0) if splits else y.double())).to(dtype)
    out = add_rms_norm_triton(y, residual, weight, 1e-5, plus_one)
    assert torch.allclose(residual.double(), summed.double(), rtol=2e-3 if half else 1e-5, atol=1e-5)
    wide = residual.double()
    factor = weight.double() + 1 if plus_one else weight.double()
    expected = wide / (wide.pow(2).mean(1, keepdim=True) + 1e-5).sqrt() * factor
    assert torch.allclose(out.double(), expected, rtol=2e-3 if half else 2e-5, atol=1e-5)
    assert torch.equal(rms_norm_triton(residual, weight, 1e-5, plus_one), out)


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 4), width=st.integers(1, 3000), splits=st.integers(1, 9), plus_one=st.booleans())
def test_a_row_cut_into_slices_gives_the_same_norm(rows, width, splits, plus_one):
    y, weight = random(splits, rows, width), random(width, seed=2)
    first, second = random(rows, width, seed=1), random(rows, width, seed=1)
    for _ in range(2):  # the second round finds the counters as the first left them
        expected = add_rms_norm_triton(y, first, weight, 1e-5, plus_one, sliced=False)
        out = add_rms_norm_triton(y, second, weight, 1e-5, plus_one, sliced=True)
        assert torch.equal(second, first)
        assert torch.allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_norm_of_a_row_does_not_depend_on_the_batch():
    x, weight = random(700, 40), random(40)
    whole = rms_norm_triton(x, weight, 1e-6)
    assert torch.equal(rms_norm_triton(x[333:334], weight, 1e-6), whole[333:334])


def test_rms_norm_of_strided_heads():
    x, weight = random(5, 3, 32)[:, :2], random(32)
    assert torch.allclose(rms_norm_triton(x, weight, 1e-6), rms_norm(x, weight, 1e-6), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", [silu_mul, silu_mul_triton])
def test_silu_mul_takes_halves(function):
    out = function(torch.tensor([[0.0, 1.0, 10.0, 3.0]]))
    assert torch.allclose(out, torch.tensor([[0.0, 3 / (1 + math.exp(-1))]]))


@pytest.mark.parametrize("function", [clamped_swiglu, clamped_swiglu_triton])
def test_clamped_swiglu_clamps_one_side_of_the_gate(function):
    y = torch.tensor([[9.0, 9.0, -9.0, -9.0, 1.0, 2.0]])
    expected = [8 * 7 / (1 + math.exp(-7 * 1.702)), -6 * -9 / (1 + math.exp(9 * 1.702)), 3 / (1 + math.exp(-1.702))]
    assert torch.allclose(function(y, 7.0, 1.702), torch.tensor([expected]))
    halves = torch.tensor([[9.0, -9.0, 1.0, 9.0, -9.0, 2.0]])
    assert torch.allclose(function(halves, 7.0, 1.702, interleaved=False), torch.tensor([expected]))


@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 4), width=st.integers(1, 400), splits=st.integers(0, 4), clamped=st.booleans())
def test_activation_kernels_for_any_shape(rows, width, splits, clamped):
    y = random(splits, rows, 2 * width) if splits else random(rows, 2 * width)
    if clamped:
        pair = [f(y, 0.7, 1.5, dtype=torch.float32) for f in (clamped_swiglu, clamped_swiglu_triton)]
    else:
        pair = [f(y, torch.float32) for f in (silu_mul, silu_mul_triton)]
    assert pair[1].shape == (rows, width)
    assert torch.allclose(*pair, rtol=1e-5, atol=1e-6)


def test_partials_become_bfloat16_unless_asked():
    assert silu_mul(torch.zeros(2, 1, 4)).dtype == torch.bfloat16
    assert silu_mul(torch.zeros(2, 1, 4), torch.float16).dtype == torch.float16
    assert silu_mul(torch.zeros((1, 4), dtype=torch.float16)).dtype == torch.float16


def test_strided_columns_are_refused_in_one_line():
    with pytest.raises(ValueError, match="columns must be contiguous"):
        silu_mul_triton(torch.zeros(4, 6).T)
