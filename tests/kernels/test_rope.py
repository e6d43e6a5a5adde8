"""Rotary tables against transformers, and the fused q/k/v step against a version written head by head."""

import math
from dataclasses import replace

import pytest
import torch
from kernel_cases import make_batch, poisoned_cache
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.config import Attention, Rope
from engine.kernels.rope import (
    projection_width,
    qk_norm_rope_write,
    qk_norm_rope_write_triton,
    rope_table,
)

LLAMA3 = Rope(
    "llama3", theta=5e5, rotary_dim=64, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max=8192
)
YARN = Rope(
    "yarn", theta=1.5e5, rotary_dim=64, factor=32.0, original_max=4096, truncate=False, cos_sin_scale=1.3465735902799727
)
ROUNDED = Rope("yarn", theta=1e6, rotary_dim=128, factor=16.0, original_max=16384, beta_fast=32.0, beta_slow=1.0)

# Triton's interpreter drops the carry of 1% of its e4m3 casts (127.9 becomes 64); a GPU has none of that.
FP8_RIGHT = 0.93


def parameters(rope: Rope) -> dict:
    common = {"rope_type": rope.kind, "rope_theta": rope.theta, "factor": rope.factor,
              "original_max_position_embeddings": rope.original_max}  # fmt: skip
    if rope.kind == "llama3":
        return common | {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    return common | {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate,
                     "attention_factor": rope.cos_sin_scale}  # fmt: skip


@pytest.mark.parametrize("rope", [LLAMA3, YARN, ROUNDED])
def test_tables_agree_with_transformers(rope):
    config = LlamaConfig(
        hidden_size=rope.rotary_dim * 2, num_attention_heads=2, head_dim=rope.rotary_dim,
        max_position_embeddings=int(rope.original_max * rope.factor), rope_parameters=parameters(rope),
    )  # fmt: skip
    inverse, factor = ROPE_INIT_FUNCTIONS[rope.kind](config, "cpu")
    assert factor == pytest.approx(rope.cos_sin_scale)
    table = rope_table(rope, 1000, "cpu")
    assert table.shape == (1000, rope.rotary_dim) and table.dtype == torch.float32
    angles = torch.outer(torch.arange(1000).double(), inverse.double())
    expected = torch.cat([angles.cos(), angles.sin()], dim=1) * factor
    assert (table.double() - expected).abs().max() < 2e-4


def test_default_table_and_query_scale_by_hand():
    rope = Rope(theta=100.0, rotary_dim=4, original_max=2, query_scale_beta=0.1)
    table = rope_table(rope, 5, "cpu")
    assert table.shape == (5, 5)
    row = [math.cos(4), math.cos(0.4), math.sin(4), math.sin(0.4), 1 + 0.1 * math.log(3)]
    assert table[4].tolist() == pytest.approx(row, abs=1e-7)
    assert table[1, 4] == 1.0


def by_hand(wide, spec, q_weight, k_weight, eps, plus_one, table, positions):
    """(q, gate, k, v) of float64 rows, one head at a time."""
    dim, half = spec.head_dim, spec.rope.rotary_dim // 2

    def head(row, start, weight):
        x = wide[row, start : start + dim].clone()
        if weight is not None:
            x = x / (x.pow(2).mean() + eps).sqrt() * (weight.double() + (1 if plus_one else 0))
        turned = x.clone()
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if spec.rope.interleaved else (i, i + half)
            cos, sin = table[positions[row], i].double(), table[positions[row], half + i].double()
            turned[a], turned[b] = x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin
        return turned

    rows, step = range(len(wide)), dim * (2 if spec.output_gate else 1)
    keys = spec.heads * step
    values = keys + spec.kv_heads * dim
    q = torch.stack([torch.stack([head(r, h * step, q_weight) for h in range(spec.heads)]) for r in rows])
    k = torch.stack([torch.stack([head(r, keys + h * dim, k_weight) for h in range(spec.kv_heads)]) for r in rows])
    v = torch.stack([wide[r, values : values + spec.kv_heads * dim].reshape(-1, dim) for r in rows])
    if spec.rope.query_scale_beta:
        q = q * torch.stack([table[positions[r], 2 * half].double() for r in rows])[:, None, None]
    gate = wide[:, :keys].reshape(len(wide), spec.heads, step)[:, :, dim:] if spec.output_gate else None
    return q, gate, k, v


PLAIN = Attention(heads=3, kv_heads=1, head_dim=16, rope=Rope(rotary_dim=16), scale=0.25)
SPECS = {
    "plain": PLAIN,
    "odd head": replace(PLAIN, head_dim=48, rope=Rope(rotary_dim=48)),
    "partial, gate, norm": Attention(4, 2, 32, Rope(rotary_dim=8), 0.25, output_gate=True, qk_norm=True),
    "interleaved": replace(PLAIN, rope=Rope(rotary_dim=12, interleaved=True), bias=True, qk_norm=True),
    "many blocks of heads": Attention(5, 3, 256, Rope(rotary_dim=8), 0.25, output_gate=True, qk_norm=True),
    "query scale": replace(PLAIN, rope=Rope(rotary_dim=16, original_max=3, query_scale_beta=0.3)),
}  # fmt: skip


@pytest.mark.parametrize("function", [qk_norm_rope_write, qk_norm_rope_write_triton])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("splits", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_the_fused_step(function, name, splits, dtype):
    spec, page, plus_one = SPECS[name], 8, name.startswith("partial")
    generator = torch.Generator().manual_seed(5)
    batch, pages = make_batch([5, 1], [11, 20], page, padding_rows=2)
    cache = poisoned_cache(pages, spec.kv_heads, page, spec.head_dim, dtype)
    before = cache.k.clone()
    width = projection_width(spec)
    y = torch.randn((max(splits, 1), batch.rows, width), generator=generator)
    bias = torch.randn(width, generator=generator) if spec.bias else None
    weights = [torch.randn(spec.head_dim, generator=generator) if spec.qk_norm else None for _ in range(2)]
    table = rope_table(spec.rope, 32, "cpu")
    q, gate = function(
        y if splits else y[0], spec, *weights, bias, 1e-5, plus_one, table, batch, cache, dtype=torch.float32
    )
    wide = y.double().sum(0) + (0 if bias is None else bias.double())
    expected = by_hand(wide, spec, *weights, 1e-5, plus_one, table, batch.positions.tolist())
    assert torch.allclose(q.double(), expected[0], rtol=1e-4, atol=1e-5)
    assert (gate is None) == (expected[1] is None)
    if gate is not None:
        assert torch.allclose(gate.double(), expected[1], rtol=1e-5, atol=1e-5)
    live = batch.slots.long()[:6]
    for stored, scale, wanted in ((cache.k, cache.k_scale, expected[2]), (cache.v, cache.v_scale, expected[3])):
        got = stored[live // page, :, live % page].double()
        tolerance, right = 1e-5, 1.0
        if scale is not None:
            got = got * scale[live // page, :, live % page].double()[..., None]
            tolerance, right = (0.52 / 127, 1.0) if dtype == torch.int8 else (0.04, FP8_RIGHT)
        error = (got - wanted[:6]).abs() / wanted[:6].abs().amax(-1, keepdim=True)
        assert (error < tolerance).double().mean() >= right
    untouched = torch.ones(cache.k.shape[:1] + cache.k.shape[2:3], dtype=torch.bool)
    untouched[live // page, live % page] = False
    untouched[0] = False
    same = cache.k.transpose(1, 2)[untouched].float().nan_to_num(-1) == before.transpose(1, 2)[
        untouched
    ].float().nan_to_num(-1)
    assert same.all()


@pytest.mark.parametrize("function", [qk_norm_rope_write, qk_norm_rope_write_triton])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_head_of_zeros_has_scale_zero_and_reads_back_as_zeros(function, dtype):
    batch, pages = make_batch([1], [1], 4)
    cache = poisoned_cache(pages, 1, 4, 16, dtype)
    y = torch.zeros((1, projection_width(PLAIN)))
    function(y, PLAIN, None, None, None, 1e-5, False, rope_table(PLAIN.rope, 4, "cpu"), batch, cache)
    slot = int(batch.slots[0])
    assert cache.k_scale[slot // 4, 0, slot % 4] == 0.0
    assert (cache.v[slot // 4, 0, slot % 4].float() == 0).all()
