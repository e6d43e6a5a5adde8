"""Checks and times the expert, DeltaNet and latent-attention kernels at the true shapes of the published models.

    python tools/gpu_moe.py [FILTER] [--sweep]

Each row: what, tokens, microseconds a call (replayed in a CUDA graph, inputs rotated so that the weights do not stay in
the L2 cache), bytes that the call must read, fraction of 4.3 TB/s, and the largest error against the float32 reference
relative to the largest value of the result. The expert layer is checked first: choice and grouping exactly, and 50
replays bit for bit. `--sweep` tries other launch options of the expert kernels; with the filter `deltanet` other shapes
of its serial pass.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from engine.batch import Batch, LayerCache, StateCache
from engine.config import Attention, DeltaNet, LatentAttention, ModelConfig, MoeFfn
from engine.kernels import deltanet, deltanet_triton, mla, moe
from engine.kernels.norm import add_rms_norm
from engine.kernels.rope import rope_table
from engine.models import model_config
from engine.weights.experts import read_experts
from engine.weights.synthetic import SyntheticSource

BANDWIDTH = 4.3e12
MODELS = ("Qwen3.6-35B-A3B", "gpt-oss-20b", "Qwen3.5-122B-A10B", "Qwen3-Coder-30B", "GLM-4.7-Flash")
CALLS = 12
DEVICE = torch.device("cuda")


def microseconds(calls: list[Callable[[], object]]) -> float:
    """Mean time of one of `calls`, replayed together in one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times)[2]


def report(what: str, tokens: int, us: float, bytes_read: float, error: float | None = None) -> None:
    shown = "" if error is None else f"  error {error:.1e}"
    share = bytes_read / us / 1e-6 / BANDWIDTH
    print(f"{what:44s} {tokens:6d}  {us:9.1f} us  {bytes_read / 1e6:8.1f} MB  {share:5.2f}{shown}", flush=True)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.float() - expected.float()).abs().max() / expected.float().abs().max()).item()


def source_for(config: ModelConfig) -> SyntheticSource:
    return SyntheticSource(config, "int4", DEVICE, torch.bfloat16, 0)


@dataclass(frozen=True)
class Layer:
    """The expert layer of a model at its true shape, with made-up weights."""

    spec: MoeFfn
    hidden: int
    experts: moe.Experts
    router: torch.Tensor
    bias: torch.Tensor | None
    selection_bias: torch.Tensor | None

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return moe.choose_experts(x, self.router, self.spec, self.bias, self.selection_bias, self.experts.shared)

    def run(self, x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """The whole layer and the norm that adds its parts, as in a step."""
        _, ids, weights = self.choose(x)
        return add_rms_norm(moe.moe_experts(x, ids, weights, self.experts, self.spec), residual, norm, 1e-6)


def layer_of(name: str) -> Layer:
    config = model_config(name)
    spec = config.layers[-1].ffn
    assert isinstance(spec, MoeFfn)
    read = read_experts(source_for(config), "model.layers.1.mlp", spec, config.hidden)
    experts = moe.Experts(read.gate_up, read.down, read.gate_up_bias, read.down_bias, shared=spec.shared > 0)
    router = torch.randn(spec.experts + spec.shared_gate, config.hidden, device=DEVICE).bfloat16() * config.hidden**-0.5
    bias = torch.randn(spec.experts, device=DEVICE).bfloat16() if spec.router_bias else None
    selection = torch.rand(spec.experts, device=DEVICE) * 0.1 if spec.selection_bias else None
    return Layer(spec, config.hidden, experts, router, bias, selection)


def check_layer(layer: Layer, x: torch.Tensor) -> float:
    """Asserts that router and experts match their references and that replays repeat bit for bit; the error."""
    arguments = (layer.spec, layer.bias, layer.selection_bias, layer.experts.shared)
    logits, ids, weights = layer.choose(x)
    torch.testing.assert_close(logits, moe.router_logits_reference(x, layer.router), rtol=1e-3, atol=1e-3)
    expected_ids, expected_weights = moe.route_reference(logits, *arguments)
    same = ids == expected_ids  # but for scores that differ in their last bits
    assert same.float().mean() > 0.999
    torch.testing.assert_close(weights[same], expected_weights[same], rtol=1e-4, atol=1e-5)
    if len(x) > moe.LAUNCHES.direct_tokens:
        size = moe.block_size(len(x), ids.shape[1], layer.experts.count, layer.experts.codes)
        got, expected = (
            group(ids, layer.experts.count, size) for group in (moe.group_pairs_triton, moe.group_pairs_reference)
        )
        assert torch.equal(got.expert, expected.expert)
        used = (expected.expert >= 0).repeat_interleave(size)
        assert torch.equal(got.order[used], expected.order[used])
    norm = torch.ones(layer.hidden, device=DEVICE, dtype=torch.bfloat16)
    first = layer.run(x, torch.zeros_like(x), norm)
    residual = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = layer.run(x, residual, norm)
    for _ in range(50):
        residual.zero_()
        graph.replay()
        assert torch.equal(first, again), "two runs differ"
    y = moe.moe_experts(x, ids, weights, layer.experts, layer.spec)
    y = y.sum(0) if y.dim() == 3 else y
    error = relative_error(y, moe.moe_experts_reference(x, ids, weights, layer.experts, layer.spec))
    assert error < 2e-2, error
    return error


def time_experts(name: str, tokens_list: tuple[int, ...]) -> None:
    layer = layer_of(name)
    norm = torch.ones(layer.hidden, device=DEVICE, dtype=torch.bfloat16)
    each, router_bytes = layer.experts.nbytes / layer.experts.count, layer.router.numel() * 2
    for tokens in tokens_list:
        inputs = [torch.randn(tokens, layer.hidden, device=DEVICE).bfloat16() for _ in range(CALLS)]
        choices = [layer.choose(x)[1:] for x in inputs]
        visited = sum(len(ids.unique()) for ids, _ in choices) / CALLS
        error = check_layer(layer, inputs[0])
        report(f"{name} router", tokens, microseconds([partial(layer.choose, x) for x in inputs]), router_bytes)
        if tokens > moe.LAUNCHES.direct_tokens:
            size = moe.block_size(tokens, choices[0][0].shape[1], layer.experts.count, layer.experts.codes)
            calls = [partial(moe.group_pairs_triton, ids, layer.experts.count, size) for ids, _ in choices]
            report(f"{name} grouping", tokens, microseconds(calls), choices[0][0].numel() * 8)
        report(f"{name} experts", tokens, time_products(layer, inputs, choices), visited * each, error)
        if 1 < tokens <= moe.DECODE_TOKENS:
            us = time_products(layer, inputs, choices, grouped=False)
            report(f"{name} experts, one token at a time", tokens, us, visited * each)
        residual = torch.zeros_like(inputs[0])
        us = microseconds([partial(layer.run, x, residual, norm) for x in inputs])
        report(f"{name} layer with its norm", tokens, us, visited * each + router_bytes)


def time_products(layer: Layer, inputs: list, choices: list, grouped: bool = True) -> float:
    pairs = zip(inputs, choices, strict=True)
    return microseconds([partial(moe.moe_experts, x, *c, layer.experts, layer.spec, grouped) for x, c in pairs])


SWEEP: tuple[dict[str, object], ...] = (
    {},
    *({"few_gate": (strip,)} for strip in ((16, 4), (16, 8), (16, 16), (32, 4), (32, 8), (64, 4))),
    *({"few_down": (strip,)} for strip in ((16, 4), (16, 8), (32, 4), (32, 8), (64, 4))),
    *({"direct_tokens": n} for n in (1, 8)),
    *({"more": strips, "wide": strips} for strips in (((32, 4), (32, 4)), ((64, 4), (64, 4)), ((16, 4), (32, 4)))),
    *({"wide_blocks": n} for n in (1.0, 100.0)),
)
"""What is changed of Launches, one after the other; the first line is what is in use."""


def sweep_experts(name: str) -> None:
    layer, original = layer_of(name), moe.LAUNCHES
    try:
        for changes in SWEEP:
            moe.LAUNCHES = replace(original, **changes)  # type: ignore[arg-type]
            times = []
            for tokens in (1, 4, 8, 16, 32, 64):
                inputs = [torch.randn(tokens, layer.hidden, device=DEVICE).bfloat16() for _ in range(CALLS)]
                times.append(time_products(layer, inputs, [layer.choose(x)[1:] for x in inputs]))
            shown = " ".join(f"{us:8.1f}" for us in times)
            print(f"{name:18s} 1 4 8 16 32 64 tokens, us: {shown}  {changes}", flush=True)
    finally:
        moe.LAUNCHES = original


def ints(values: object) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=DEVICE)  # type: ignore[call-overload]


def batch_of(requests: int, rows: int, context: int, page: int = 64) -> Batch:
    """`requests` requests of `rows` new tokens each, the last of `context`."""
    pages = -(-context // page)
    table = 1 + torch.arange(requests * pages, device=DEVICE, dtype=torch.int32).reshape(requests, pages)
    positions = torch.arange(context - rows, context, device=DEVICE, dtype=torch.int32).repeat(requests)
    owner = torch.arange(requests, device=DEVICE).repeat_interleave(rows)
    slots = table[owner, (positions // page).long()] * page + positions % page
    return Batch(
        positions, positions, slots, ints(range(0, requests * rows + 1, rows)), ints([context] * requests), table,
        ints(range(1, requests + 1)), positions, rows == 1, rows, context,
    )  # fmt: skip


def delta_weights(spec: DeltaNet) -> deltanet.DeltaWeights:
    heads = spec.value_heads
    return deltanet.DeltaWeights(
        torch.randn(deltanet.channels(spec), spec.conv, device=DEVICE, dtype=torch.bfloat16),
        torch.randn(heads, device=DEVICE), torch.randn(heads, device=DEVICE),
        torch.ones(spec.value_dim, device=DEVICE, dtype=torch.bfloat16), 1e-6,
    )  # fmt: skip


def delta_cache(spec: DeltaNet, slots: int) -> StateCache:
    conv = torch.zeros(slots, spec.conv, deltanet.channels(spec), device=DEVICE, dtype=torch.bfloat16)
    return StateCache(conv, torch.zeros(slots, spec.value_heads, spec.key_dim, spec.value_dim, device=DEVICE))


def time_deltanet(name: str) -> None:
    config = model_config(name)
    spec = next(layer.mixer for layer in config.layers if isinstance(layer.mixer, DeltaNet))
    weights = delta_weights(spec)
    for requests, rows in ((1, 1), (16, 1), (64, 1), (1, 256), (1, 2048), (4, 2048), (1, 8192)):
        batch = batch_of(requests, rows, max(rows, 500))
        batch.positions = batch.positions - batch.positions[0] if rows > 1 else batch.positions
        y = torch.randn(requests * rows, deltanet.row_width(spec), device=DEVICE, dtype=torch.bfloat16)
        caches = [delta_cache(spec, requests + 1) for _ in range(CALLS if rows == 1 else 2)]
        expected_cache = delta_cache(spec, requests + 1)
        reference = deltanet.delta_step_reference if rows == 1 else deltanet.delta_prefill_reference
        expected = reference(y, spec, weights, batch, expected_cache)
        error = relative_error(deltanet.delta_mix(y, spec, weights, batch, caches[0]), expected)
        state_error = relative_error(caches[0].state, expected_cache.state)
        assert error < 5e-2 and state_error < 5e-2, (error, state_error)
        us = microseconds([partial(deltanet.delta_mix, y, spec, weights, batch, c) for c in caches])
        state = 2 * requests * spec.value_heads * spec.key_dim * spec.value_dim * 4
        report(f"{name} deltanet ({requests} x {rows})", requests * rows, us, state + 2 * y.numel(), error)


def time_deltanet_kernels(name: str, sweep: bool) -> None:
    """Every kernel of one prompt of 2,048 tokens by itself; `sweep`: other shapes of the serial pass."""
    config = model_config(name)
    spec = next(layer.mixer for layer in config.layers if isinstance(layer.mixer, DeltaNet))
    weights, batch = delta_weights(spec), batch_of(1, 2048, 2048)
    y = torch.randn(2048, deltanet.row_width(spec), device=DEVICE, dtype=torch.bfloat16)
    cache = delta_cache(spec, 2)
    own = deltanet_triton.STATE_COLUMNS, deltanet_triton.STATE_STAGES
    shapes = [own, *(itertools.product((16, 32, 64), (1, 2, 3, 4)) if sweep else ())]
    for shape in dict.fromkeys(shapes):
        deltanet_triton.STATE_COLUMNS, deltanet_triton.STATE_STAGES = shape
        deltanet.delta_mix(y, spec, weights, batch, cache)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(CALLS):
                deltanet.delta_mix(y, spec, weights, batch, cache)
            torch.cuda.synchronize()
        for event in profile.key_averages():
            if shape == own or "state_kernel" in event.key:
                us = event.self_device_time_total / CALLS
                print(f"{name} 2048: {event.key[:40]:40s} {us:8.1f} us  {shape}", flush=True)
    deltanet_triton.STATE_COLUMNS, deltanet_triton.STATE_STAGES = own


def time_latent(name: str) -> None:
    config = model_config(name)
    spec = config.layers[0].mixer
    assert isinstance(spec, LatentAttention) and not isinstance(spec, Attention)
    table = rope_table(spec.rope, 8192, DEVICE)
    for requests, rows, context in ((1, 1, 4096), (64, 1, 1000), (64, 1, 4096), (1, 2048, 2048), (1, 1024, 4096)):
        batch = batch_of(requests, rows, context)
        pages = requests * -(-context // 64) + 1
        cache = LayerCache(
            torch.randn(pages, 1, 64, spec.kv_rank, device=DEVICE).bfloat16(),
            torch.randn(pages, 1, 64, spec.rope_dim, device=DEVICE).bfloat16(),
        )
        shape = (requests * rows, spec.heads)
        q_latent = torch.randn(*shape, spec.kv_rank, device=DEVICE).bfloat16() * 0.3
        q_rope = torch.randn(*shape, spec.rope_dim, device=DEVICE).bfloat16()
        value_down = torch.randn(spec.heads, spec.kv_rank, spec.value_dim, device=DEVICE).bfloat16()
        arguments = (q_latent, q_rope, value_down, spec, table, batch, cache)
        mixed = mla.latent_attention_reference(q_latent, q_rope, spec, table, batch, cache)
        expected = torch.einsum("thr,hrv->thv", mixed.float(), value_down.float()).flatten(1)
        error = relative_error(mla.latent_values(*arguments), expected)
        assert error < 2e-2, error
        us = microseconds([partial(mla.latent_values, *arguments)] * CALLS)
        read = requests * context * (spec.kv_rank + spec.rope_dim) * 2
        report(f"{name} latent attention ({requests} x {rows} of {context})", requests * rows, us, read, error)


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    wanted = words[0] if words else ""
    start = time.monotonic()
    tokens = (1, 4, 8, 16, 64, 512, 2048)
    parts = [(f"experts {name}", lambda n=name: time_experts(n, tokens)) for name in MODELS]
    sweep = "--sweep" in sys.argv
    for name in (MODELS[0], "Qwen3.8-27B"):
        parts += [(f"deltanet {name}", lambda n=name: time_deltanet(n)),
                  (f"deltanet kernels {name}", lambda n=name: time_deltanet_kernels(n, sweep))]  # fmt: skip
    parts += [("latent GLM-4.7-Flash", lambda: time_latent("GLM-4.7-Flash"))]
    if sweep and not wanted.startswith("deltanet"):
        parts = [(f"sweep {name}", lambda n=name: sweep_experts(n)) for name in MODELS]
    for name, part in parts:
        if wanted.lower() not in name.lower():
            continue
        try:
            part()
        except Exception as error:
            print(f"{name}: FAILED: {type(error).__name__}: {str(error)[-1500:]}", flush=True)
        torch.cuda.empty_cache()
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
