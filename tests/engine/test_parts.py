"""Parts on their own: synthetic weights, CPU products, memory plans, packed step inputs, rings."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig, EngineError, Switches
from engine.engine import Engine
from engine.graphs import buckets_up_to
from engine.inputs import StepInputs, StepShape
from engine.kernels import w4_cpu
from engine.layers.linear import Linear
from engine.memory import MemoryPlan, largest_matrix, model_weights, plan_memory
from engine.models import catalogue_entries, model_config
from engine.order import fill, plan_shape
from engine.pages import PagePool
from engine.quant import dequantize, quantize
from engine.request import Request, SamplingParams
from engine.scheduler import Piece, StepPlan, Track
from engine.weights.synthetic import SyntheticSource

CPU = torch.device("cpu")


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 150), k=st.integers(1, 200), rows=st.integers(1, 5), kernels=st.sampled_from(["standard", "fused"])
)
def test_cpu_products_equal_the_reference_dequantization(n, k, rows, kernels):
    torch.manual_seed(n * 1000 + k)
    weight = quantize(torch.randn(n, k) * k**-0.5)
    x = torch.randn(rows, k)
    expected = x @ dequantize(weight).t()
    found = Linear(weight, None, kernels)(x)
    exact = isinstance(w4_cpu.store(weight, kernels), w4_cpu.PlainWeight)
    assert found.shape == (rows, n)
    assert (found - expected).abs().max() <= (1e-5 if exact else 2e-2) * max(expected.abs().max().item(), 1.0)


def test_the_fused_cpu_form_is_torchs_own_and_as_small():
    weight = quantize(torch.randn(128, 256))
    fused, standard = Linear(weight, None, "fused"), Linear(weight, None, "standard")
    assert isinstance(fused.weight, w4_cpu.TorchWeight)
    assert fused.nbytes == 128 * 256 // 2 + 128 * 2 * 2 * 2
    assert standard.nbytes == 128 * 256 // 2 + 128 * 2 * 2 * 4


def test_a_linear_layer_adds_its_bias():
    weight, bias = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([10.0, 20.0])
    layer = Linear(weight, bias, "fused")
    assert layer(torch.tensor([[1.0, 1.0]])).tolist() == [[13.0, 27.0]]
    assert layer.partials(torch.tensor([[1.0, 1.0]])).tolist() == [[13.0, 27.0]]


def test_synthetic_weights_depend_on_seed_and_name_alone():
    config = model_config("SmolLM2-135M@layers=1")
    one, two = (SyntheticSource(config, "int4", CPU, torch.float32, seed) for seed in (0, 1))
    a = one.linear(["x.q_proj", "x.k_proj"], [64, 32], 128)
    one.linear(["something.else"], [64], 64)
    b = one.linear(["x.q_proj", "x.k_proj"], [64, 32], 128)
    assert torch.equal(a.packed, b.packed) and torch.equal(a.scales, b.scales)
    assert not torch.equal(a.packed, two.linear(["x.q_proj", "x.k_proj"], [64, 32], 128).packed)


@pytest.mark.parametrize("weights_dtype", ["int4", "bf16", "fp32"])
def test_synthetic_matrices_keep_the_size_of_what_they_multiply(weights_dtype):
    config = model_config("SmolLM2-135M@layers=1")
    weight = SyntheticSource(config, weights_dtype, CPU, torch.float32, 0).linear(["m"], [512], 576)
    dense = dequantize(weight) if weights_dtype == "int4" else weight.float()
    assert dense.shape == (512, 576)
    assert dense.std().item() == pytest.approx(576**-0.5, rel=0.05)
    assert abs(dense.mean().item()) < 0.05 * 576**-0.5


def test_what_keep_16bit_names_stays_dense():
    config = replace(model_config("SmolLM2-135M@layers=1"), keep_16bit=("self_attn", "lm_head"))
    source = SyntheticSource(config, "int4", CPU, torch.float32, 0)
    assert isinstance(source.linear(["model.layers.0.self_attn.q_proj"], [64], 64), torch.Tensor)
    assert isinstance(source.linear(["lm_head"], [64], 64), torch.Tensor)
    assert not isinstance(source.linear(["model.layers.0.mlp.up_proj"], [64], 64), torch.Tensor)


def test_logits_of_a_deep_synthetic_model_are_finite_and_not_all_alike():
    config = model_config("Qwen3-0.6B")
    shallow = replace(
        config,
        hidden=128,
        vocab=500,
        layers=tuple(
            replace(spec, mixer=replace(spec.mixer, heads=4, kv_heads=2), ffn=replace(spec.ffn, intermediate=256))
            for spec in config.layers * 3
        )[:64],
    )
    from engine.layers.build import Build
    from engine.models.decoder import Decoder
    from tests.engine.helpers import prompt_of

    source = SyntheticSource(shallow, "int4", CPU, torch.float32, 0)
    with torch.inference_mode():
        decoder = Decoder(Build(shallow, source, CPU, torch.float32, "standard", 64))
    engine = Engine.__new__(Engine)
    from engine.cache import Cache

    cache = Cache.allocate([s.mixer for s in shallow.layers], 4, 16, 1, 4, torch.float32, torch.float32, CPU)
    engine.stage = type("Stage", (), {"decoder": decoder, "cache": cache})
    engine.pool, engine.config = PagePool(4), EngineConfig("x", page_size=16)
    from tests.engine.helpers import logits_of

    logits = logits_of(engine, prompt_of(20, 1), [20])
    assert torch.isfinite(logits).all()
    assert 0.2 < logits.std().item() < 5
    assert logits.argmax(-1).unique().numel() > 5


@pytest.mark.parametrize("name", sorted(n for n, e in catalogue_entries().items() if e["family"] in ("llama", "qwen3")))
def test_weights_counted_from_the_geometry_are_the_published_parameters(name):
    config = model_config(name)
    matrices, table = model_weights(config)
    counted = matrices if config.tied_embeddings else matrices + table
    published = catalogue_entries()[name]["parameters"]
    assert 0 <= published - counted < 1e-3 * published


def test_a_model_that_does_not_fit_is_refused_with_what_would():
    model, gib = model_config("Qwen3-32B"), 1 << 30
    config = EngineConfig("Qwen3-32B", device="cuda", max_streams=8, max_model_len=4096)
    plan = plan_memory(model, config, torch.bfloat16, 140 * gib)
    assert plan.pages == 8 * 64 + 1
    assert plan.weights == pytest.approx(16_492_863_488 + 2 * 151936 * 5120, rel=0.01)
    with pytest.raises(EngineError, match=r"^Qwen3-32B does not fit cuda: .* 12.0 GiB are free; models of up to"):
        plan_memory(model, config, torch.bfloat16, 12 * gib)
    dense = replace(config, switches=Switches(weights_dtype="bf16"))
    with pytest.raises(EngineError, match="take weights_dtype=int4"):
        plan_memory(model, dense, torch.bfloat16, 40 * gib)
    greedy = replace(config, cache_tokens=1_000_000)
    with pytest.raises(EngineError, match=r"about [\d,]+ tokens of cache fit here"):
        plan_memory(model, greedy, torch.bfloat16, 100 * gib)
    small = plan_memory(model, replace(config, max_streams=64), torch.bfloat16, 24 * gib)
    assert 65 <= small.pages < 64 * 64


@pytest.mark.parametrize(
    ("free", "stages", "streams", "pages"),
    [(16, 1, 64, 1456), (16, 2, 64, 728), (16, 1, 4, 513), (1, 1, 64, 129), (64, 1, 64, 5825)],
    ids=["a quarter", "shared by stages", "all that streams need", "one stream at least", "more"],
)
def test_a_cpu_cache_takes_a_quarter_of_the_free_memory_unasked(free, stages, streams, pages):
    """A page of SmolLM2-135M in float32: 30 layers of 3 heads of 64, keys and values, 64 tokens: 2,949,120 bytes."""
    model = model_config("SmolLM2-135M")
    config = EngineConfig("SmolLM2-135M", max_streams=streams, max_model_len=8192, stages=stages)
    assert plan_memory(model, config, torch.float32, free * 2**30).pages == pages
    asked = replace(config, cache_tokens=64 * 2000)
    assert plan_memory(model, asked, torch.float32, 16 * 2**30).pages == 2001


def test_unpacked_matrices_are_held_where_the_cache_hardly_misses_them():
    model, gib = model_config("Qwen3-32B"), 1 << 30
    config = EngineConfig("Qwen3-32B", device="cuda", max_streams=64, max_model_len=8192)
    weights, unpacked = plan_memory(model, config, torch.bfloat16, 200 * gib).weights, 2 * 2 * 51200 * 5120
    enough = weights + gib + 16 * unpacked
    roomy, tight = (plan_memory(model, config, torch.bfloat16, free) for free in (enough, enough - 1))
    assert roomy.ahead and not tight.ahead
    assert (tight.pages - roomy.pages) * roomy.cache // roomy.pages == pytest.approx(unpacked, rel=0.02)
    wanted = replace(config, cache_tokens=(enough - weights - gib) // (64 * 8 * 128 * 2 * 2) - 128)
    assert not plan_memory(model, wanted, torch.bfloat16, enough).ahead
    dense = replace(config, switches=Switches(weights_dtype="bf16"))
    assert not plan_memory(model, dense, torch.bfloat16, 200 * gib).ahead
    assert not plan_memory(model, replace(config, device="cpu"), torch.bfloat16, 200 * gib).ahead


@pytest.mark.parametrize("ahead", [False, True])
def test_all_but_the_head_is_unpacked_ahead_where_the_plan_has_room(ahead, checkpoints, monkeypatch):
    given = []
    monkeypatch.setattr("engine.assemble.unpack_ahead", lambda layers, dtype, device: given.append(layers))
    monkeypatch.setattr("engine.assemble.plan_memory", lambda *_: MemoryPlan(0, 0, 0, 8, ahead))
    config = EngineConfig("", weights=str(checkpoints["llama"]), max_streams=1, max_model_len=64)
    decoder = Engine.load(config).stage.decoder
    linears = list(decoder.linears.values())
    assert linears[-1] is decoder.head
    assert given == ([linears[:-1]] if ahead else [])


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("Qwen3-32B", 2 * 25600 * 5120),
        ("Qwen3.6-35B-A3B", 2048 * (2 * 2048 + 2 * 4096 + 2 * 32)),
        ("GLM-4.7-Flash", 2 * 10240 * 2048),
    ],
)
def test_the_largest_matrix_that_is_unpacked(name, elements):
    assert largest_matrix(model_config(name)) == elements


def track(name, prompt, slot, pages, tokens=()):
    request = Request(name, prompt, SamplingParams(temperature=0.5, top_k=3, top_p=0.9))
    return Track(request, [*prompt, *tokens], len(prompt) + len(tokens), seed=77, slot=slot, pages=pages)


def arrays_for(plan, shape=None):
    shape = shape or plan_shape(plan)
    buffer = torch.full((StepInputs.nbytes(shape),), 255, dtype=torch.uint8)
    fill(StepInputs.over(buffer, shape).numpy(), plan, 3, page_size=4)
    return {name: getattr(StepInputs.over(buffer, shape), name).tolist() for name in StepInputs.sizes(shape)}


def test_a_prompt_step_is_packed_row_by_row():
    a, b = track("a", [11, 12, 13, 14, 15, 16], 2, [7, 9]), track("b", [21, 22, 23], 1, [5])
    plan = StepPlan(6, (Piece(a, 2, 2, 4, True), Piece(b, 1, 0, 2, False)), False, (), ())
    packed = arrays_for(plan)
    assert packed["tokens"] == [13, 14, 15, 16, 21, 22]
    assert packed["positions"] == [2, 3, 4, 5, 0, 1]
    assert packed["slots"] == [30, 31, 36, 37, 20, 21]
    assert packed["query_start"] == [0, 4, 6]
    assert packed["kv_len"] == [6, 2]
    assert packed["state_slots"] == [2, 1]
    assert (packed["sample_rows"], packed["sample_slots"], packed["sample_positions"]) == ([3], [2], [6])
    assert (packed["seeds"], packed["top_k"], packed["temperature"]) == ([77], [3], [0.5])
    assert packed["ring"] == [3]


def test_a_decode_step_in_a_larger_bucket_is_padded_with_null_rows():
    a = track("a", [1, 2, 3, 4, 5], 3, [7, 9], tokens=[6])
    plan = StepPlan(6, (Piece(a, 3, 5, 1, True),), True, (), ())
    packed = arrays_for(plan, StepShape(4, 4, 4))
    assert packed["slots"] == [37, 0, 0, 0]
    assert packed["kv_len"] == [6, 0, 0, 0]
    assert packed["state_slots"] == [3, 0, 0, 0]
    assert packed["sample_slots"] == [3, 0, 0, 0]
    assert packed["query_start"] == [0, 1, 2, 3, 4]
    assert packed["positions"] == [5, 0, 0, 0]


def test_buckets_cover_every_batch_size():
    assert buckets_up_to(1) == (1,)
    assert buckets_up_to(5) == (1, 2, 4, 8)
    assert buckets_up_to(64) == (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
    assert buckets_up_to(100)[-3:] == (64, 96, 128)


def test_shared_pages_are_free_when_their_last_owner_lets_go():
    freed = []
    pool = PagePool(4, freed.extend)
    pages = pool.take(2)
    assert pages == [1, 2] and pool.take(2) is None
    pool.share(pages[:1])
    pool.release(pages, after=5)
    assert (pool.free, pool.fenced) == (1, 1)
    pool.completed(4)
    assert freed == []
    pool.completed(5)
    assert freed == [2]
    pool.release([1], after=6)
    pool.completed(6)
    assert freed == [2, 1] and pool.free == 3


def test_8bit_caches_stay_close_to_the_16bit_one(tmp_path):
    from tests.engine.conftest import reference
    from tests.engine.helpers import load, logits_of, prompt_of

    reference("qwen3").save_pretrained(tmp_path)
    tokens = prompt_of(40, 2)
    expected = logits_of(load(str(tmp_path)), tokens, [20] + [1] * 20)
    for cache_dtype, bound in (("int8", 0.02), ("fp8", 0.08)):
        engine = load(str(tmp_path), switches={"cache_dtype": cache_dtype})
        found = logits_of(engine, tokens, [20] + [1] * 20)
        error = (found - expected).norm() / expected.norm()
        assert 0 < error < bound
        assert engine.info.cache_bytes_per_token == 2 * 2 * (2 * 32 + 2 * 4)
    assert math.isfinite(float(error))
