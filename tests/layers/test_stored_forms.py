"""Stored forms of experts: rows permuted, tiles padded, MXFP4 values, a shared expert in another precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_oracle import our_config, reference_model

from engine.config import DeltaNet
from engine.kernels.moe import choose_experts
from engine.layers.build import Build
from engine.layers.deltanet import interleaved_order
from engine.layers.moe import MoeLayer
from engine.quant import (
    dequantize,
    dequantize_expert,
    pack_mxfp4,
    pad_tiles,
    permute_rows,
    quantize,
    stack_experts,
)
from engine.weights.synthetic import SyntheticSource


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 150), k=st.sampled_from([32, 64, 96, 256]), seed=st.integers(0, 99))
def test_rows_permuted_and_tiles_padded(n, k, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = quantize(torch.randn(n, k, generator=generator))
    order = torch.randperm(n, generator=generator)
    assert torch.equal(dequantize(permute_rows(weight, order)), dequantize(weight)[order])
    padded = dequantize(pad_tiles(weight, weight.n_tiles + 1, weight.k_tiles + 2))
    assert torch.equal(padded[:n, :k], dequantize(weight))
    assert padded.abs().sum() == dequantize(weight).abs().sum()


def test_mxfp4_literal_values():
    """The sixteen codes at scale 2^(128 - 127): even inputs in the low nibbles."""
    codes = torch.arange(32) % 16
    blocks = (codes[0::2] | (codes[1::2] << 4)).to(torch.uint8).reshape(1, 1, 16)
    experts = stack_experts([pack_mxfp4(blocks, torch.tensor([[128]], dtype=torch.uint8))], "mxfp4")
    positive = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0]
    assert dequantize_expert(experts, 0)[0].tolist() == (positive + [-v for v in positive]) * 2


def test_interleaved_projection_of_a_known_case():
    """Two key heads of one column, two value heads each of one column: q k v v z z by key head, then b b a a."""
    order = interleaved_order(DeltaNet(key_heads=2, value_heads=4, key_dim=1, value_dim=1))
    assert order.tolist() == [0, 6, 1, 7, 2, 3, 8, 9, 4, 5, 10, 11, 12, 13, 16, 17, 14, 15, 18, 19]


@pytest.mark.parametrize("name", ["qwen3_5_moe", "glm4_moe_lite"])
def test_shared_expert_of_another_precision(name):
    config = replace(our_config(reference_model(name), name), keep_16bit=("shared_expert",))
    source = SyntheticSource(config, "int4", torch.device("cpu"), torch.float32, 0)
    spec = config.layers[-1].ffn
    build = Build(config, source, torch.device("cpu"), torch.float32, "fused", 16)
    layer = MoeLayer(spec, build, "model.layers.1")
    assert not layer.experts.shared
    x = torch.randn(5, config.hidden)
    routed = MoeLayer(replace(spec, shared=0, shared_gate=False), build, "model.layers.1")
    expert = "model.layers.1.mlp.shared_expert"
    gate, up = (source.linear([f"{expert}.{p}_proj"], [spec.shared], config.hidden) for p in ("gate", "up"))
    shared = (F.silu(x @ gate.T) * (x @ up.T)) @ source.linear([f"{expert}.down_proj"], [config.hidden], spec.shared).T
    if spec.shared_gate:
        shared *= torch.sigmoid(x @ source.tensor(f"{expert}_gate.weight", (1, config.hidden)).T)
    torch.testing.assert_close(layer(x, None), routed(x, None) + shared, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe_lite", "gpt_oss"])
def test_synthetic_routers_use_every_expert(name):
    """Of 400 random tokens every one of the experts gets at least a third of its even share."""
    config = our_config(reference_model(name), name)
    source = SyntheticSource(config, "fp32", torch.device("cpu"), torch.float32, 0)
    layer = MoeLayer(config.layers[-1].ffn, Build(config, source, torch.device("cpu"), torch.float32, "fused", 16), "m")
    spec = layer.spec
    x = torch.randn(400, config.hidden)
    _, ids, _ = choose_experts(x, layer.router, spec, layer.router_bias, layer.selection_bias, False)
    counts = ids.flatten().bincount(minlength=spec.experts)
    assert counts.min() > 400 * spec.top_k / spec.experts / 3
