"""Checks and times the expert, DeltaNet and latent-attention kernels at the true shapes of the published models.

    python tools/gpu_moe.py [FILTER] [--sweep]

Each row: what, tokens, microseconds a call (replayed in a CUDA graph, inputs rotated so that the weights do not stay in
the L2 cache), bytes that the call must read, fraction of 4.3 TB/s, and the largest error against the float32 reference
relative to the largest value of the result. `--sweep` tries other launch options of the expert kernels; with the filter
`deltanet` other shapes of its serial pass.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from engine.batch import Batch, LayerCache, StateCache
from engine.config import Attention, DeltaNet, LatentAttention, ModelConfig, MoeFfn
from engine.kernels import deltanet, deltanet_triton, mla, moe
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


def time_experts(name: str, tokens_list: tuple[int, ...]) -> None:
    config = model_config(name)
    spec = config.layers[-1].ffn
    assert isinstance(spec, MoeFfn)
    read = read_experts(source_for(config), "model.layers.1.mlp", spec, config.hidden)
    experts = moe.Experts(read.gate_up, read.down, read.gate_up_bias, read.down_bias, shared=spec.shared > 0)
    rows = spec.experts + spec.shared_gate
    router = torch.randn(rows, config.hidden, device=DEVICE, dtype=torch.bfloat16) * config.hidden**-0.5
    each = experts.nbytes / experts.count
    for tokens in tokens_list:
        inputs = [torch.randn(tokens, config.hidden, device=DEVICE, dtype=torch.bfloat16) for _ in range(CALLS)]

        def routed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return moe.route(moe.router_logits(x, router), spec, None, None, experts.shared)

        choices = [routed(x) for x in inputs]
        visited = sum(len(ids.unique()) for ids, _ in choices) / CALLS
        error = None
        if tokens <= 64:
            x, (ids, weights) = inputs[0], choices[0]
            logits = moe.router_logits_reference(x, router)
            expected_ids, expected_weights = moe.route_reference(logits, spec, None, None, experts.shared)
            assert (ids.sort(1).values == expected_ids.sort(1).values).float().mean() > 0.99
            assert abs(weights.sum() - expected_weights.sum()) < 1e-2 * tokens
            got = moe.moe_experts(x, ids, weights, experts, spec)
            again = moe.moe_experts(x, ids, weights, experts, spec)
            assert torch.equal(got, again), "two runs differ"
            error = relative_error(got.sum(0), moe.moe_experts_reference(x, ids, weights, experts, spec))
            assert error < 2e-2, error
        us = microseconds([lambda x=x: routed(x) for x in inputs])
        report(f"{name} router", tokens, us, router.numel() * 2)
        pairs = zip(inputs, choices, strict=True)
        us = microseconds([partial(moe.moe_experts, x, *c, experts, spec) for x, c in pairs])
        report(f"{name} experts", tokens, us, visited * each, error)
        if 1 < tokens <= 64:
            pairs = zip(inputs, choices, strict=True)
            us = microseconds([partial(moe.moe_experts, x, *c, experts, spec, False) for x, c in pairs])
            report(f"{name} experts, one token at a time", tokens, us, visited * each)


def sweep_experts(name: str) -> None:
    original = moe._launch_options
    for warps, stages in ((1, 4), (2, 2), (2, 3), (2, 4), (2, 5), (4, 2), (4, 3), (4, 4)):
        moe._launch_options = lambda size, activates=False, w=warps, s=stages: {
            "num_warps": w, "num_stages": 2 if activates else s
        }  # fmt: skip
        print(f"-- warps {warps}, stages {stages}")
        time_experts(name, (1, 16, 64, 512))
    moe._launch_options = original


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
        got = mla.latent_attention(q_latent, q_rope, spec, table, batch, cache)
        expected = mla.latent_attention_reference(q_latent, q_rope, spec, table, batch, cache)
        error = relative_error(got, expected)
        assert error < 2e-2, error
        us = microseconds([partial(mla.latent_attention, q_latent, q_rope, spec, table, batch, cache)] * CALLS)
        read = requests * context * (spec.kv_rank + spec.rope_dim) * 2
        report(f"{name} latent attention ({requests} x {rows} of {context})", requests * rows, us, read, error)


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    wanted = words[0] if words else ""
    start = time.monotonic()
    parts = [(f"experts {name}", lambda n=name: time_experts(n, (1, 4, 16, 64, 512, 2048))) for name in MODELS]
    sweep = "--sweep" in sys.argv
    for name in (MODELS[0], "Qwen3.8-27B"):
        parts += [(f"deltanet {name}", lambda n=name: time_deltanet(n)),
                  (f"deltanet kernels {name}", lambda n=name: time_deltanet_kernels(n, sweep))]  # fmt: skip
    parts += [("latent GLM-4.7-Flash", lambda: time_latent("GLM-4.7-Flash"))]
    if sweep and not wanted.startswith("deltanet"):
        parts = [(f"sweep {name}", lambda n=name: sweep_experts(n)) for name in MODELS[:3]]
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
