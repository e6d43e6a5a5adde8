"""Times the engine as a whole on a GPU: decode at 1, 8, 16 and 64 streams and one prompt of four lengths.

    python -m tools.gpu_engine Llama-3.2-1B Qwen3-8B [--profile --streams 1 64 --prompts 2048]

Synthetic 4-bit weights, prompts of 128 tokens, 160 tokens made. Decode throughput is that of the steady window.
`--profile` prints the kernels of decode steps and of prompts instead: how often each runs in a step and how long.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request, SamplingParams

STREAMS = (1, 8, 16, 64)
PROMPTS = (256, 1024, 2048, 8192)
BANDWIDTH = 4.3e12


def generate(engine: Engine, streams: int, tokens: int, prompt: int) -> tuple[float, float]:
    """(tokens per second of the steady window, seconds to the last stream's first token)."""
    begin = time.monotonic()
    for i in range(streams):
        ids = [random.randrange(1000, 30000) for _ in range(prompt)]
        engine.add(Request(str(i), ids, SamplingParams(max_tokens=tokens, ignore_eos=True)))
    pieces = defaultdict(list)
    while engine.has_work():
        for event in engine.step():
            if event.tokens:
                pieces[event.request_id].append((event.time_s, len(event.tokens)))
    start = max(seen[0][0] for seen in pieces.values())
    end = min(seen[-1][0] for seen in pieces.values())
    made = sum(count for seen in pieces.values() for when, count in seen if start < when <= end)
    return (made / (end - start) if end > start else 0.0), start - begin


def measure(model: str) -> None:
    begin = time.monotonic()
    engine = Engine.load(EngineConfig(model, device="cuda", max_streams=64, max_model_len=9000, cache_tokens=40_000))
    print(f"{model}: ready in {time.monotonic() - begin:.1f} s {engine.info.start_seconds}")
    for streams in STREAMS:
        generate(engine, streams, 4, 128)
        rate, _ = generate(engine, streams, 160, 128)
        fraction = rate / streams * engine.info.step_weight_bytes / BANDWIDTH
        print(f"{model}: {streams} streams {rate:.0f} tok/s, weights alone at {fraction:.0%} of the memory limit")
    for prompt in PROMPTS:
        generate(engine, 1, 2, prompt)
        first = min(generate(engine, 1, 2, prompt)[1] for _ in range(3))
        print(f"{model}: prompt of {prompt}: {prompt / first:.0f} tok/s")
    print(f"{model}: most memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    engine.close()


def profile(model: str, streams: tuple[int, ...], prompts: tuple[int, ...], steps: int = 8) -> None:
    """Prints the kernels of a decode step at each number of streams and of reading one prompt of each length."""
    config = EngineConfig(
        model, device="cuda", max_streams=max(streams, default=1), max_model_len=9000, cache_tokens=40_000
    )
    engine = Engine.load(config)
    for count in streams:
        for i in range(count):
            engine.add(Request(str(i), list(range(100 + i, 228 + i)), SamplingParams(max_tokens=60, ignore_eos=True)))
        for _ in range(30):
            engine.step()
        print_kernels(f"{model}, {count} streams", engine, steps)
        while engine.has_work():
            engine.step()
    for length in prompts:
        generate(engine, 1, 1, length)
        engine.add(Request("0", list(range(100, 100 + length)), SamplingParams(max_tokens=1, ignore_eos=True)))
        print_kernels(f"{model}, prompt of {length}", engine, 1)
        while engine.has_work():
            engine.step()
    engine.close()


def print_kernels(title: str, engine: Engine, steps: int) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    times = defaultdict(list)
    spans = [e.time_range for e in recorded.events() if e.device_type.name == "CUDA"]
    for event in recorded.events():
        if event.device_type.name == "CUDA":
            times[event.name[:60]].append(event.time_range.end - event.time_range.start)
    span = (max(s.end for s in spans) - min(s.start for s in spans)) / steps
    print(f"{title}: {span:.0f} us a step, {sum(map(sum, times.values())) / steps:.0f} us of kernels")
    for name, found in sorted(times.items(), key=lambda item: -sum(item[1]))[:14]:
        print(f"  {name:60} {len(found) / steps:6.1f} x {sum(found) / len(found):7.2f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--streams", type=int, nargs="*", default=[1], help="decode steps to profile")
    parser.add_argument("--prompts", type=int, nargs="*", default=[], help="prompts to profile")
    options = parser.parse_args()
    for model in options.models:
        if options.profile:
            profile(model, tuple(options.streams), tuple(options.prompts))
        else:
            measure(model)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
