"""Every family with mixtures of experts, DeltaNet or latent attention against transformers, float32 on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layer_oracle import Session, our_config, our_decoder, reference_model

from engine.config import ModelConfig, MoeFfn
from engine.kernels import deltanet
from engine.layers.linear import Linear
from engine.memory import largest_matrix

FAMILIES = ["qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe_lite", "gpt_oss"]
LENGTH = 70


def tolerance(name: str) -> dict[str, float]:
    """DeltaNet divides by the size of its outputs, which may be small: both sides round there."""
    return {"rtol": 0, "atol": 3e-4 if name.startswith("qwen3_5") or name == "qwen3_next" else 1e-5}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    model = reference_model(request.param)
    return request.param, model, our_decoder(model, request.param)


def prompt(count: int = LENGTH, seed: int = 1) -> list[int]:
    return torch.randint(0, 96, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected(model, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def test_prompt(pair):
    name, model, decoder = pair
    tokens = prompt()
    torch.testing.assert_close(Session(decoder).feed({0: tokens})[0], expected(model, tokens), **tolerance(name))


def test_linear_layers_stand_in_the_order_of_their_products(pair, monkeypatch):
    """Unpacking one matrix ahead relies on it, and on the size of the largest."""
    decoder, products, product = pair[2], [], Linear._product
    monkeypatch.setattr(Linear, "_product", lambda layer, x: products.append(layer) or product(layer, x))
    Session(decoder).feed({0: prompt()})
    linears = [layer for layer in decoder.linears.values() if isinstance(layer, Linear)]
    assert products == linears and products[-1] is decoder.head
    assert max(layer.in_features * layer.out_features for layer in linears[:-1]) <= largest_matrix(decoder.config)


def test_cached_decode(pair):
    name, model, decoder = pair
    tokens = prompt()
    session = Session(decoder)
    got = [session.feed({0: tokens[:3]})[0]] + [session.feed({0: [token]})[0] for token in tokens[3:]]
    torch.testing.assert_close(torch.cat(got), expected(model, tokens), **tolerance(name))


@pytest.mark.parametrize("bounds", [(63,), (65,), (1, 63, 64, 65)])
def test_prompt_in_pieces(pair, bounds):
    name, model, decoder = pair
    tokens, session, got = prompt(), Session(decoder), []
    for start, stop in zip((0, *bounds), (*bounds, LENGTH), strict=True):
        got.append(session.feed({0: tokens[start:stop]}, decode=False)[0])
    torch.testing.assert_close(torch.cat(got), expected(model, tokens), **tolerance(name))


def test_mixed_batch_equals_alone(pair):
    name, _, decoder = pair
    prompts = {0: prompt(65, 2), 1: prompt(1, 3), 2: prompt(7, 4), 3: prompt(64, 5)}
    together = Session(decoder)
    first = together.feed(prompts, padding=2)
    steps = [together.feed({r: [5 + r + i] for r in prompts}, padding=3) for i in range(3)]
    for r, tokens in prompts.items():
        alone = Session(decoder)
        torch.testing.assert_close(first[r], alone.feed({r: tokens})[r], **tolerance(name))
        for i, step in enumerate(steps):
            torch.testing.assert_close(step[r], alone.feed({r: [5 + r + i]})[r], **tolerance(name))


def test_padding_touches_only_null_page_and_slot(pair):
    _, _, decoder = pair
    session = Session(decoder)
    session.feed({0: prompt(20), 2: prompt(3)})
    before = [
        {k: t[1:].clone() for k, t in vars(c).items() if isinstance(t, torch.Tensor)} for c in session.cache.layers
    ]
    session.feed({}, padding=5, decode=True)
    session.feed({}, padding=5, decode=False)
    for cache, kept in zip(session.cache.layers, before, strict=True):
        for key, tensor in kept.items():
            torch.testing.assert_close(getattr(cache, key)[1:], tensor, rtol=0, atol=0, equal_nan=True)


def test_snapshot_of_a_state_resumes_exactly(pair):
    _, _, decoder = pair
    if not any(hasattr(cache, "state") for cache in Session(decoder).cache.layers):
        pytest.skip("no recurrent layer")
    tokens, session = prompt(), Session(decoder)
    session.feed({0: tokens[:33]})
    for cache in session.cache.layers:
        if hasattr(cache, "state"):
            deltanet.copy_state(cache, 1, 4)
    first = session.feed({0: tokens[33:]})[0]
    for cache in session.cache.layers:
        if hasattr(cache, "state"):
            deltanet.copy_state(cache, 4, 1)
    session.lengths[0] = 33
    torch.testing.assert_close(session.feed({0: tokens[33:]})[0], first, rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------- mistakes


def each_mixer(**changes):
    def change(config: ModelConfig) -> ModelConfig:
        def mixer(m):
            return replace(m, **changes) if all(hasattr(m, k) for k in changes) else m

        return replace(config, layers=tuple(replace(layer, mixer=mixer(layer.mixer)) for layer in config.layers))

    return change


def each_rope(**changes):
    def change(config: ModelConfig) -> ModelConfig:
        def mixer(m):
            return replace(m, rope=replace(m.rope, **changes)) if hasattr(m, "rope") else m

        return replace(config, layers=tuple(replace(layer, mixer=mixer(layer.mixer)) for layer in config.layers))

    return change


def each_moe(**changes):
    def change(config: ModelConfig) -> ModelConfig:
        def ffn(f):
            return replace(f, **changes) if isinstance(f, MoeFfn) else f

        return replace(config, layers=tuple(replace(layer, ffn=ffn(layer.ffn)) for layer in config.layers))

    return change


def whole(**changes):
    return lambda config: replace(config, **changes)


MISTAKES = [
    ("qwen3_moe", "weights not renormalised", each_moe(renormalize=False)),
    ("qwen3_moe", "no q/k norm", each_mixer(qk_norm=False)),
    ("qwen3_moe", "one expert too few", each_moe(top_k=1)),
    ("qwen3_moe", "default theta", each_rope(theta=1e4)),
    ("qwen3_moe", "wrong eps", whole(norm_eps=1e-5)),
    ("qwen3_5", "norms without 1 +", whole(norm_plus_one=False)),
    ("qwen3_5", "whole rotary", each_rope(rotary_dim=32)),
    ("qwen3_5", "default theta", each_rope(theta=1e4)),
    ("qwen3_5_moe", "shared expert ungated", each_moe(shared_gate=False)),
    ("qwen3_5_moe", "no shared expert", each_moe(shared=0)),
    ("glm4_moe_lite", "latent eps of the model", each_mixer(latent_eps=1e-5)),
    ("glm4_moe_lite", "half-split rotary", each_rope(interleaved=False)),
    ("glm4_moe_lite", "no routed scale", each_moe(routed_scale=1.0)),
    ("glm4_moe_lite", "no selection bias", each_moe(selection_bias=False)),
    ("glm4_moe_lite", "softmax router", each_moe(router="softmax")),
    ("gpt_oss", "no sinks", each_mixer(sinks=False)),
    ("gpt_oss", "window of one token more", None),
    ("gpt_oss", "correction range rounded", each_rope(truncate=True)),
    ("gpt_oss", "no attention factor", each_rope(cos_sin_scale=1.0)),
    ("gpt_oss", "no projection biases", each_mixer(bias=False)),
    ("gpt_oss", "softmax over all experts", each_moe(router="softmax", renormalize=False)),
    ("gpt_oss", "no router bias", each_moe(router_bias=False)),
    ("gpt_oss", "sigmoid without alpha", each_moe(alpha=1.0)),
]


@pytest.fixture(scope="module")
def models():
    return {name: reference_model(name) for name in FAMILIES}


@pytest.mark.parametrize(("name", "what", "change"), MISTAKES, ids=[f"{n}: {w}" for n, w, _ in MISTAKES])
def test_a_mistake_is_seen(models, name, what, change):
    """Each of these would fail the tests above: the logits move by several times their tolerance."""
    model = models[name]
    config = our_config(model, name)
    if what == "window of one token more":
        change = each_mixer(window=9)
        config = replace(config, layers=config.layers[:1] * len(config.layers))
        model = reference_model(name, layer_types=["sliding_attention"] * len(config.layers))
    wrong = our_decoder(model, name, change(config))
    tokens = prompt()
    error = (Session(wrong).feed({0: tokens})[0] - expected(model, tokens)).abs().max()
    assert error > 3 * tolerance(name)["atol"]
