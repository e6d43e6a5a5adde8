"""The 4-bit form, its plans, and the plain kernels in Triton's interpreter against the reference dequantization."""

import itertools
import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import quant
from engine.kernels import w4
from engine.kernels._launch import launch_options
from engine.quant import dequantize, group_for, pack, quantize, unpack

TUNED = json.loads((Path(w4.__file__).parent / "tuned/NVIDIA_H200.json").read_text())["w4"]
SHARED_LIMIT = 227 * 1024
H200 = "NVIDIA H200", 132


def random_codes(n, k, seed=0):
    return torch.randint(0, 16, (n, k), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def random_weight(n, k, group, zeros=False, seed=0, dtype=torch.float32):
    """A packed weight and, by plain indexing, the float64 matrix that it stands for."""
    generator = torch.Generator().manual_seed(seed + 1)
    groups = -(-k // group)
    codes = random_codes(n, k, seed)
    scales = (torch.rand(n, groups, generator=generator) * 0.2 - 0.1).to(dtype)
    zero = torch.randint(0, 16, (n, groups), generator=generator).to(dtype) if zeros else None
    of = torch.arange(k) // group
    offset = zero.double()[:, of] if zeros else 8.0
    return pack(codes, scales, zero, group), (codes.double() - offset) * scales.double()[:, of]


# ------------------------------------------------------------------------------------------------ the stored form


@pytest.mark.parametrize(
    ("row", "column", "position"),
    [
        (0, 0, 0),
        (8, 0, 1),  # row_half
        (0, 1, 2),  # pair
        (0, 8, 4),  # half
        (0, 16, 8),  # block
        (0, 2, 16),  # quad 1: the next thread
        (1, 0, 64),  # lane_row 1: four threads on
        (16, 0, 512),  # warp 1
        (63, 31, 2047),
        (37, 21, 2 * 512 + 22 * 16 + 8 + 2),  # warp 2, lane_row 5, quad 2, block 1, pair 1
    ],
)
def test_a_byte_stands_where_the_form_says(row, column, position):
    codes = torch.zeros((64, 64), dtype=torch.uint8)
    codes[row, column], codes[row, column + 32] = 5, 9
    packed = pack(codes, torch.ones(64, 1), None, 64).packed.flatten()
    assert packed[position] == 5 + 16 * 9
    assert packed.count_nonzero() == 1


def test_tiles_follow_each_other_by_inputs_then_by_outputs():
    codes = torch.zeros((130, 192), dtype=torch.uint8)
    codes[128, 64] = 7
    weight = pack(codes, torch.ones(130, 3), None, 64)
    assert weight.packed.shape == (3, 3, 2048)
    assert weight.packed.flatten().nonzero().tolist() == [[(2 * 3 + 1) * 2048]]


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 200), k=st.integers(1, 300), group=st.sampled_from([32, 64, 128]))
def test_packing_loses_nothing(n, k, group):
    codes = random_codes(n, k)
    scales = torch.arange(1, n * -(-k // group) + 1).float().reshape(n, -1)
    weight = pack(codes, scales, None, group)
    assert torch.equal(unpack(weight), codes)
    assert torch.equal(quant.expand_groups(weight.scales, weight), scales.repeat_interleave(group, 1)[:, :k])
    assert not weight.scales.transpose(1, 2).reshape(weight.n_tiles * 64, -1)[n:].any()


@pytest.mark.parametrize(("k", "group", "k_tiles"), [(576, 64, 9), (2880, 64, 45), (48, 32, 1), (5120, 128, 80)])
def test_the_group_of_a_width(k, group, k_tiles):
    assert group_for(k) == group
    weight = quantize(torch.randn(10, k, generator=torch.Generator().manual_seed(k)))
    assert (weight.group, weight.k_tiles, weight.k) == (group, k_tiles, k)
    assert weight.scales.shape == (1, k_tiles * 64 // group, 64)


@settings(max_examples=30, deadline=None)
@given(k=st.sampled_from([48, 64, 100, 576, 640]), seed=st.integers(0, 99))
def test_rounding_costs_at_most_half_a_step(k, seed):
    w = torch.randn(20, k, generator=torch.Generator().manual_seed(seed))
    w[3] = 0
    weight = quantize(w, scale_dtype=torch.float32)
    step = quant.expand_groups(weight.scales, weight).abs()
    wrong = (dequantize(weight) - w).abs()
    # The largest value of a group lies on code 0; one of the other sign may clip, by one step at most.
    assert (wrong <= step * 1.0001).all()
    clipped = w / torch.where(step == 0, 1.0, quant.expand_groups(weight.scales, weight)) > 7.5
    assert (wrong <= step * 0.5001)[~clipped].all()
    assert not dequantize(weight)[3].any()


def test_literal_dequantization_with_and_without_zeros():
    codes = torch.tensor([[0, 8, 15]], dtype=torch.uint8)
    assert dequantize(pack(codes, torch.tensor([[0.5]]), None, 32)).tolist() == [[-4.0, 0.0, 3.5]]
    assert dequantize(pack(codes, torch.tensor([[0.5]]), torch.tensor([[3.0]]), 32)).tolist() == [[-1.5, 2.5, 6.0]]


# ------------------------------------------------------------------------------------------------------ kernels

SHAPES = {"n": st.integers(1, 140), "k": st.integers(1, 330), "group": st.sampled_from([32, 64, 128])}


def inputs(rows, k, dtype, seed=3):
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got, x, dense, dtype):
    """Within the rounding of the weight and of the sums to the dtype of x."""
    exact = x.double() @ dense.T
    size = x.double().abs() @ dense.abs().T
    return bool(((got.double() - exact).abs() <= (2e-3 if dtype == torch.float16 else 1e-5) * size + 1e-6).all())


@settings(max_examples=12, deadline=None)
@given(**SHAPES, rows=st.integers(1, 70), zeros=st.booleans(), half=st.booleans())
def test_dot_kernel(n, k, group, rows, zeros, half):
    dtype = torch.float16 if half else torch.float32
    weight, dense = random_weight(n, k, group, zeros)
    x = inputs(rows, k, dtype)
    parts = w4.plain_partials(x, weight)
    assert parts.dtype == torch.float32 and parts.shape[1:] == (rows, n)
    assert close(parts.sum(0), x, dense, dtype)


@settings(max_examples=8, deadline=None)
@given(**SHAPES, rows=st.integers(1, 4), zeros=st.booleans(), half=st.booleans())
def test_gemv_kernel(n, k, group, rows, zeros, half):
    dtype = torch.float16 if half else torch.float32
    weight, dense = random_weight(n, k, group, zeros)
    x = inputs(rows, k, dtype)
    assert close(w4.gemv_partials(x, weight).sum(0), x, dense, torch.float32)


@settings(max_examples=12, deadline=None)
@given(**SHAPES, zeros=st.booleans())
def test_dequantize_kernel(n, k, group, zeros):
    weight, dense = random_weight(n, k, group, zeros)
    assert torch.allclose(w4.w4_dequantize_triton(weight, torch.float32).double(), dense, atol=1e-6)
    assert torch.equal(w4.w4_dequantize_triton(weight, torch.float16), dequantize(weight, torch.float16))


@settings(max_examples=10, deadline=None)
@given(splits=st.integers(1, 6), rows=st.integers(0, 5), n=st.integers(1, 600))
def test_sum_kernel(splits, rows, n):
    parts = torch.randn(splits, rows, n, generator=torch.Generator().manual_seed(n))
    total = torch.zeros(rows, n)
    for part in parts:
        total += part
    assert torch.equal(w4.sum_partials_triton(parts, torch.float32), total)


def test_splits_of_k_and_a_strided_input():
    weight, dense = random_weight(70, 1100, 128)
    wide = inputs(5, 1200, torch.float32)
    x = wide[:, 50:1150]
    parts = w4.plain_partials(x, weight)
    assert parts.shape[0] > 1 and w4.gemv_partials(x, weight).shape[0] > 1
    assert close(parts.sum(0), x, dense, torch.float32)
    assert close(w4.gemv_partials(x, weight).sum(0), x, dense, torch.float32)


def test_poison_outside_of_x_never_shows():
    weight, dense = random_weight(20, 40, 32)
    wide = torch.full((9, 128), float("nan"))
    wide[2:5, 16:56] = inputs(3, 40, torch.float32)
    x = wide[2:5, 16:56]
    assert close(w4.plain_partials(x, weight).sum(0), x, dense, torch.float32)


def test_a_row_does_not_depend_on_the_others():
    weight, _ = random_weight(64, 256, 128)
    x = inputs(16, 256, torch.float32)
    whole = w4.plain_partials(x, weight)
    other = torch.full_like(x, float("nan"))
    other[7] = x[7]
    assert torch.equal(w4.plain_partials(other, weight)[:, 7], whole[:, 7])


def test_a_wrong_width_is_refused_in_one_line():
    weight, _ = random_weight(8, 64, 64)
    with pytest.raises(ValueError, match=r"x has 63 columns, the weight \[8, 64\] takes 64"):
        w4.w4_partials(torch.zeros(1, 63), weight)


# -------------------------------------------------------------------------------------------------------- plans


def check_shares(p: w4.Plan, n_tiles: int, k_tiles: int, group_tiles: int) -> None:
    """Every unit has one owner, no program is idle, and a block's slots hold all of its parts (`w4_gluon.span`)."""
    blocks, programs = n_tiles * 64 // p.block, p.programs_of(n_tiles, k_tiles, group_tiles)
    per_slice = p.slice_tiles(k_tiles, group_tiles) // group_tiles
    shares = [0] * blocks
    for split in range(p.splits):
        groups = min(per_slice, k_tiles // group_tiles - split * per_slice)
        units = blocks * groups
        assert 1 <= programs <= (blocks if p.hands_over else units)
        starts = [i * (blocks if p.hands_over else units) // programs for i in range(programs + 1)]
        for first, after in itertools.pairwise(starts):
            assert first < after
            if p.hands_over:
                continue
            for block in range(first // groups, (after - 1) // groups + 1):
                shares[block] += 1
                owner = ((max(first, block * groups) + 1) * programs - 1) // units
                assert starts[owner] <= max(first, block * groups) < starts[owner + 1]
    if not p.hands_over:
        assert max(shares) <= p.slots(n_tiles, k_tiles, group_tiles)


def check_plan(p: w4.Plan, n_tiles: int, k_tiles: int, group_tiles: int, rows: int) -> None:
    groups = k_tiles // group_tiles
    per_slice = p.slice_tiles(k_tiles, group_tiles) // group_tiles
    assert per_slice * p.splits >= groups and per_slice * (p.splits - 1) < groups, "a slice is empty or missing"
    assert p.shared_bytes(k_tiles, group_tiles) + 4096 <= SHARED_LIMIT
    assert p.block in (64, 128) and p.stages >= 2 and p.programs >= 0
    assert n_tiles * 64 % p.block == 0, "the kernels read whole blocks"
    check_shares(p, n_tiles, k_tiles, group_tiles)
    if p.kind == "stream":
        assert p.rows == rows <= 16 and p.warps == 4
    else:
        assert p.kind == "tile" and p.rows in (8, 16, 32, 64, 128)
        assert p.rows <= rows and p.block >= 16 * p.warps


@pytest.mark.parametrize("key", TUNED)
def test_every_tuned_plan_is_valid(key):
    shape, rows = key.split(":")
    n_tiles, k_tiles, group_tiles = map(int, shape.split("x"))
    assert set(TUNED[key]) == {f.name for f in fields(w4.Plan)}
    check_plan(w4.Plan(**TUNED[key]), n_tiles, k_tiles, group_tiles, int(rows))
    assert w4.plan(n_tiles, k_tiles, group_tiles, int(rows), *H200) == w4.Plan(**TUNED[key])


@settings(max_examples=200, deadline=None)
@given(n_tiles=st.integers(1, 2400), groups=st.integers(1, 500), group_tiles=st.sampled_from([1, 2]),
       rows=st.sampled_from([8, 16, 32, 64, 128, 256]), processors=st.sampled_from([20, 78, 132]))  # fmt: skip
def test_every_rule_gives_a_valid_plan(n_tiles, groups, group_tiles, rows, processors):
    found = w4.plan(n_tiles, groups * group_tiles, group_tiles, rows, "another GPU", processors)
    check_plan(found, n_tiles, groups * group_tiles, group_tiles, rows)
    assert w4.plan.__wrapped__(n_tiles, groups * group_tiles, group_tiles, rows, "another GPU", processors) == found
    assert w4.plan(n_tiles, groups * group_tiles, group_tiles, rows, "another GPU", processors) is found


@pytest.mark.parametrize(
    ("rows", "bucket"), [(1, 8), (7, 8), (8, 8), (9, 16), (16, 16), (17, 32), (33, 64), (129, 256), (256, 256)]
)
def test_row_buckets(rows, bucket):
    assert w4.row_bucket(rows) == bucket


def test_launches_take_their_own_counters():
    counters = w4._Counters(torch.device("meta"))
    starts = [counters.take(n).storage_offset() for n in (5, 1, 4, 2**21 - 12, 1)]
    assert starts == [0, 8, 12, 0, 2**21 - 12]


def test_group_tails_and_unaligned_widths_stay_off_the_wgmma_kernels():
    x = torch.zeros(1, 192, dtype=torch.bfloat16)
    with launch_options(capability=(9, 0)):
        assert w4._hopper_takes(x, random_weight(64, 192, 64)[0])
        assert not w4._hopper_takes(x, random_weight(64, 192, 128)[0])
        assert not w4._hopper_takes(x, random_weight(64, 192, 32)[0])
        assert not w4._hopper_takes(x, random_weight(64, 200, 64)[0])
        assert not w4._hopper_takes(x, random_weight(1, 192, 64)[0])
        assert not w4._hopper_takes(x.half(), random_weight(64, 192, 64)[0])
    with launch_options(capability=(8, 0)):
        assert not w4._hopper_takes(x, random_weight(64, 192, 64)[0])


def test_unaligned_inputs_are_copied():
    base = torch.zeros(4 * 200 + 8, dtype=torch.bfloat16)
    assert w4._aligned(base[:768].view(4, 192)).data_ptr() == base.data_ptr()
    for x in (base[1:769].view(4, 192), base[: 4 * 200].view(4, 200)[:, :192], base[1:193].view(1, 192),
              base[:192].view(1, 192).expand(4, 192)):  # fmt: skip
        copied = w4._aligned(x)
        assert copied.data_ptr() % 16 == 0 and copied.stride() == (192, 1) and torch.equal(copied, x)


def test_the_reference_is_the_product_of_the_dequantized_weight():
    weight, dense = random_weight(9, 64, 32)
    x = inputs(2, 64, torch.float32)
    assert torch.allclose(w4.w4_matmul(x, weight).double(), x.double() @ dense.T, atol=1e-5)
    assert torch.allclose(w4.w4_standard(x, weight), w4.w4_matmul(x, weight), atol=1e-5)
