"""Checks and times the small kernels and attention on a GPU.

    python -m tools.gpu_kernels [FILTER] [--check-only] [--tune] [--no-pdl] [--json FILE]

Every case is compared with float64 mathematics first. Timing is that of engine/kernels/bench.py. Bytes are those that
must move: inputs and outputs once. `--tune` times other tile shapes of the attention kernels beside the ones in use.
The filter "attention" takes decode attention alone, at the loads of served steps and of long contexts.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.batch import Batch, LayerCache
from engine.config import Attention, Rope
from engine.kernels import (
    activation,
    attention_decode,
    attention_library,
    attention_prefill,
    bench,
    norm,
    rope,
    sample,
    start,
)
from engine.kernels._launch import capability, launch_options
from engine.kernels.bench import BF16, DEVICE, FP8, INT8, make_batch, make_cache, random

BANDWIDTH = 4.3e12
MATRIX_RATE = 780e12


@dataclass
class Case:
    """`make(i)` builds the i-th set of inputs as a launch; `check` gives the largest error relative to the bound."""

    name: str
    bytes: float
    make: Callable[[int], Callable[[], object]]
    check: Callable[[], float] | None = None
    flops: float = 0.0


def timed(case: Case) -> float:
    """Microseconds of one launch."""
    return bench.timed([case.make(i) for i in range(3 if case.flops else bench.sets_for(case.bytes))])


def error(out: Tensor, expected: Tensor, bound: float) -> float:
    """Largest |difference| / (bound * (1 + |expected|)): above 1 is a failure."""
    return float(((out.double() - expected.double()).abs() / (bound * (1 + expected.double().abs()))).max())


# ------------------------------------------------------------------------------------------------ small kernels


def norm_cases() -> Iterator[Case]:
    for rows, width, splits in [
        (1, 5120, 4),
        (1, 5120, 16),
        (1, 2048, 8),
        (16, 5120, 4),
        (64, 5120, 4),
        (8192, 5120, 0),
    ]:

        def make(_: int, rows=rows, width=width, splits=splits) -> Callable[[], Tensor]:
            y = random(splits, rows, width, dtype=torch.float32) if splits else random(rows, width)
            residual, weight = random(rows, width), random(width)
            return lambda: norm.add_rms_norm(y, residual, weight, 1e-6)

        def check(rows=rows, width=width, splits=splits) -> float:
            y = random(splits, rows, width, dtype=torch.float32) if splits else random(rows, width)
            residual, weight = random(rows, width), random(width)
            summed = residual.double() + (y.double().sum(0) if splits else y.double())
            out = norm.add_rms_norm(y, residual, weight, 1e-6)
            wide = residual.double()
            expected = wide * (wide.pow(2).mean(1, keepdim=True) + 1e-6).rsqrt() * weight.double()
            return max(error(residual, summed, 0.004), error(out, expected, 0.004))

        moved = rows * width * (4 * splits if splits else 2) + 3 * rows * width * 2
        yield Case(f"add_rms_norm {rows} x {width}, {splits} partials", moved, make, check)


def activation_cases() -> Iterator[Case]:
    for rows, width, splits in [(1, 17408, 2), (16, 17408, 2), (64, 17408, 0), (8192, 17408, 0)]:

        def make(_: int, rows=rows, width=width, splits=splits) -> Callable[[], Tensor]:
            y = random(splits, rows, 2 * width, dtype=torch.float32) if splits else random(rows, 2 * width)
            return lambda: activation.silu_mul(y)

        def check(rows=rows, width=width, splits=splits) -> float:
            y = random(splits, rows, 2 * width, dtype=torch.float32) if splits else random(rows, 2 * width)
            gate, up = (y.double().sum(0) if splits else y.double()).chunk(2, -1)
            swiglu = activation.clamped_swiglu(y, 7.0, 1.702)
            return max(error(activation.silu_mul(y), gate.sigmoid() * gate * up, 0.004),
                       error(swiglu, activation.clamped_swiglu_reference(y, 7.0, 1.702), 0.008))  # fmt: skip

        moved = rows * width * ((8 * splits if splits else 4) + 2)
        yield Case(f"silu_mul {rows} x {width}, {splits} partials", moved, make, check)


QWEN3 = Attention(64, 8, 128, Rope(rotary_dim=128, theta=1e6), 128**-0.5, qk_norm=True)
QWEN3_5 = Attention(16, 2, 256, Rope(rotary_dim=64, theta=1e7), 1 / 16, qk_norm=True, output_gate=True)


def rope_cases() -> Iterator[Case]:
    for spec, rows, splits, dtype in [(QWEN3, 1, 4, BF16), (QWEN3, 64, 4, BF16), (QWEN3, 64, 4, INT8),
                                      (QWEN3, 64, 4, FP8), (QWEN3_5, 16, 2, BF16), (QWEN3, 8192, 0, BF16)]:  # fmt: skip
        width = rope.projection_width(spec)

        def inputs(spec=spec, rows=rows, splits=splits, dtype=dtype, width=width) -> tuple:
            batch, pages = make_batch(1, [100] * rows) if rows <= 64 else make_batch(rows, [rows])
            cache = make_cache(pages, spec.kv_heads, spec.head_dim, dtype)
            y = random(splits, rows, width, dtype=torch.float32) if splits else random(rows, width)
            table = rope.rope_table(spec.rope, max(128, rows), DEVICE)
            weights = [random(spec.head_dim) for _ in range(2)]
            return (y, spec, *weights, None, 1e-6, False, table, batch, cache)

        def make(_: int, inputs=inputs) -> Callable[[], object]:
            arguments = inputs()
            return lambda: rope.qk_norm_rope_write(*arguments, dtype=BF16)

        def check(inputs=inputs) -> float:
            arguments = inputs()
            cache = arguments[-1]
            twin = LayerCache(
                *(None if t is None else t.clone() for t in (cache.k, cache.v, cache.k_scale, cache.v_scale))
            )
            q, gate = rope.qk_norm_rope_write(*arguments, dtype=BF16)
            q2, gate2 = rope.qk_norm_rope_write_reference(*arguments[:-1], twin, dtype=BF16)
            errors = [error(q, q2, 0.008)] + ([] if gate is None else [error(gate, gate2, 0.008)])
            step = {INT8: 1.01, FP8: 33.0}.get(cache.k.dtype)
            for ours, theirs in ((cache.k, twin.k), (cache.v, twin.v)):
                difference = (ours.float() - theirs.float()).abs().max()
                errors.append(float(difference / step) if step else error(ours, theirs, 0.008))
            return max(errors)

        moved = rows * (width * (4 * splits if splits else 2) + width * 2)
        yield Case(
            f"qk_norm_rope {spec.heads}/{spec.kv_heads}x{spec.head_dim} {rows} rows {str(dtype)[6:]}",
            moved,
            make,
            check,
        )


def sample_cases() -> Iterator[Case]:
    kinds = {"greedy": (0.0, 0, 1.0), "temperature": (0.8, 0, 1.0), "top-p": (0.8, 0, 0.95), "top-k": (0.8, 40, 1.0),
             "top-k and top-p": (0.8, 40, 0.95)}  # fmt: skip
    for rows, (kind, (temperature, top_k, top_p)) in itertools.product((1, 64), kinds.items()):

        def inputs(i: int, rows=rows, t=temperature, k=top_k, p=top_p) -> tuple[Tensor, sample.SamplingTensors]:
            def column(value: float, dtype: torch.dtype) -> Tensor:
                return torch.full((rows,), value, dtype=dtype, device=DEVICE)

            seeds, positions = torch.arange(rows, device=DEVICE) + i, torch.arange(rows, device=DEVICE).int()
            columns = column(t, torch.float32), column(k, torch.int32), column(p, torch.float32), seeds, positions
            return random(rows, 248320, dtype=torch.float32) * 3, sample.SamplingTensors(*columns, t == 0)

        def make(i: int, inputs=inputs) -> Callable[[], Tensor]:
            logits, params = inputs(i)
            return lambda: sample.sample(logits, params)

        def check(inputs=inputs) -> float:
            logits, params = inputs(5)
            agree = sample.sample(logits, params) == sample.sample_reference(logits, params)
            return float((~agree).float().mean()) / 0.02

        checked = check if rows == 1 or kind == "top-p" else None
        yield Case(f"sample {rows} x 248320 {kind}", rows * 248320 * 4, make, checked)


def start_cases() -> Iterator[Case]:
    vocab, hidden, pages, slots = 151936, 5120, 640, 65
    embedding = random(vocab, hidden)
    for rows in (1, 64):

        def inputs(i: int, rows=rows) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
            pool = torch.randint(0, vocab, (slots,), dtype=torch.int32, device=DEVICE)
            table = torch.randint(0, 4096, (slots, pages), dtype=torch.int32, device=DEVICE)
            return pool, torch.arange(i % 2, i % 2 + rows, device=DEVICE).int(), table, embedding, 1.5

        def make(i: int, inputs=inputs) -> Callable[[], object]:
            arguments = inputs(i)
            return lambda: start.start_decode(*arguments)

        def check(inputs=inputs) -> float:
            arguments = inputs(1)
            pairs = zip(start.start_decode(*arguments), start.start_decode_reference(*arguments), strict=True)
            return 0.0 if all(torch.equal(ours, theirs) for ours, theirs in pairs) else float("inf")

        yield Case(f"start_decode {rows} x {hidden}, {pages} pages", rows * (4 * hidden + 8 * pages), make, check)


# ---------------------------------------------------------------------------------------------------- attention


def dense(q: Tensor, cache: LayerCache, batch: Batch, spec: Attention, rows: list[tuple[int, int, int]]) -> Tensor:
    """float64 attention of chosen rows (row, request, tokens it sees)."""
    out = []
    for row, request, length in rows:
        pages = batch.page_table[request, : -(-length // 64)]
        k = attention_prefill.cached_rows(cache.k, cache.k_scale, pages, length).double()
        v = attention_prefill.cached_rows(cache.v, cache.v_scale, pages, length).double()
        grouped = q[row].double().reshape(spec.kv_heads, -1, spec.head_dim)
        out.append((torch.softmax(grouped @ k.transpose(1, 2) * spec.scale, -1) @ v).reshape(spec.heads, -1))
    return torch.stack(out)


LOADS = [(1, 170), (8, 170), (16, 170), (64, 170), (64, 1000), (64, 4000), (1, 64000)]
SHORT = [(1, 170), (64, 170)]
LONG = [(64, 4000), (1, 64000)]
DECODES = [
    ((32, 8, 128), None, (BF16,), LOADS),
    ((64, 8, 128), None, (BF16,), SHORT + LONG),
    ((24, 4, 256), None, (BF16,), SHORT),
    ((16, 2, 256), None, (BF16,), SHORT),
    ((64, 8, 64), 128, (BF16,), SHORT),
    ((64, 4, 128), None, (BF16,), LONG),
    ((32, 8, 128), None, (INT8, FP8), LONG),
    ((64, 8, 128), None, (INT8, FP8), LONG),
    ((64, 4, 128), None, (INT8, FP8), LONG),
]
SERVED_TOKENS = 9000
"""Tokens of context that the steps of short requests are captured for."""


def decode_cases(tune: bool) -> Iterator[Case]:
    """Decode attention as the engine calls it; with `tune` other segments and rings too."""
    for (heads, kv_heads, dim), window, dtypes, loads in DECODES:
        spec = Attention(heads, kv_heads, dim, Rope(rotary_dim=dim), dim**-0.5, window=window, sinks=window is not None)
        for dtype, (requests, length) in itertools.product(dtypes, loads):
            yield from decode_case(spec, dtype, requests, length, tune)


def decode_case(spec: Attention, dtype: torch.dtype, requests: int, length: int, tune: bool) -> Iterator[Case]:
    size = torch.empty((), dtype=dtype).element_size()
    seen = min(length, spec.window or length)
    moved = requests * seen * spec.kv_heads * 2 * (spec.head_dim * size + (4 if size == 1 else 0))
    moved += 4 * requests * spec.heads * spec.head_dim
    name = f"attention {requests} x {length}, {spec.heads}/{spec.kv_heads}x{spec.head_dim} {str(dtype)[6:]}"
    sinks = random(spec.heads) if spec.sinks else None

    def inputs() -> tuple[Tensor, LayerCache, Batch]:
        batch, pages = make_batch(1, [length] * requests)
        batch.max_kv = max(length, SERVED_TOKENS)
        return (
            random(requests, spec.heads, spec.head_dim),
            make_cache(pages, spec.kv_heads, spec.head_dim, dtype),
            batch,
        )

    for label, attend in decode_variants(spec, dtype, requests, length, tune):

        def run(arguments: tuple, attend=attend) -> Tensor:
            return attend(*arguments, spec.scale, spec.window, sinks)

        def make(_: int, run=run) -> Callable[[], Tensor]:
            arguments = inputs()
            return lambda: run(arguments)

        def check(run=run) -> float:
            arguments = inputs()
            q, cache, batch = arguments
            out = run(arguments)
            assert torch.equal(out, run(arguments)), "repeated runs differ"
            if spec.window:
                wanted = attention_decode.decode_attention_reference(*arguments, spec.scale, spec.window, sinks)
                return error(out, wanted, 0.01)
            rows = sorted({0, requests - 1})
            return error(out[rows], dense(q, cache, batch, spec, [(row, row, length) for row in rows]), 0.005)

        yield Case(f"{name}{label}", moved, make, check)


def decode_variants(
    spec: Attention, dtype: torch.dtype, requests: int, length: int, tune: bool
) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """(label, function): decode_attention, and with `tune` its forms in other configurations."""
    yield "", attention_decode.decode_attention
    if not tune:
        return
    q, cache = random(1, spec.heads, spec.head_dim), make_cache(1, spec.kv_heads, spec.head_dim, dtype)
    own = attention_decode.segments_for(spec.kv_heads)
    if length <= 1000:
        cuts = [replace(own, shortest=keys) for keys in (64, 128)]
    else:
        cuts = [replace(own, parts=parts) for parts in (own.parts // 2, own.parts * 2)]
    if attention_decode.gluon_serves(q, cache):
        size = cache.k.element_size()
        chosen = attention_decode.gluon_config(spec.kv_heads, spec.head_dim, size, *capability(q))
        rings = [(own, ring) for ring in ((2, 2), (4, 1), (6, 1))]
        for cut, (stages, programs) in [(cut, (chosen.stages, chosen.programs)) for cut in cuts] + rings:
            config = attention_decode.GluonConfig(cut, stages, programs)
            label = f" gluon {cut.parts, cut.shortest} ring {stages, programs}"
            yield label, partial(attention_decode.decode_attention_gluon, config=config)
    else:
        chosen = attention_decode.decode_config(spec.head_dim, cache.k.element_size(), capability(q))
        shapes = [(own, shape) for shape in ((32, 4, 5, 2), (32, 8, 7, 2), (64, 8, 3, 1), (64, 8, 5, 1))]
        for cut, shape in [(cut, tuple(chosen.values())) for cut in cuts] + shapes:
            config = dict(zip(chosen, shape, strict=True))
            label = f" triton {cut.parts, cut.shortest} {shape}"
            yield label, partial(attention_decode.decode_attention_triton, config=config, segments=cut)


PROMPTS = [(32, 8, 128), (64, 8, 128), (32, 8, 64), (24, 4, 256)]
PIECES = [(1, 256, 256), (1, 1024, 1024), (1, 2048, 2048), (1, 8192, 8192), (1, 16384, 16384)]


def prefill_cases(tune: bool) -> Iterator[Case]:
    """Prompts from their start in each geometry; for one geometry also later pieces, short prompts and 8-bit pages."""
    for geometry, load in itertools.product(PROMPTS, PIECES):
        yield from piece_cases(geometry, load, BF16, tune and load[1] in (2048, 8192))
    for load in [(1, 2048, 16384), (1, 8192, 16384), (1, 1000, 1000), (1, 2049, 2049), (16, 512, 512)]:
        yield from piece_cases(PROMPTS[0], load, BF16, False)
    yield from piece_cases(PROMPTS[0], (1, 8192, 8192), FP8, tune)


def piece_cases(
    geometry: tuple[int, int, int], load: tuple[int, int, int], dtype: torch.dtype, tune: bool
) -> Iterator[Case]:
    """`load`: (requests, new tokens, tokens with the context). Our kernel, then PyTorch's over pages and alone."""
    (heads, kv_heads, dim), (requests, query, length) = geometry, load
    spec = Attention(heads, kv_heads, dim, Rope(rotary_dim=dim), dim**-0.5)
    flops = 4 * heads * dim * requests * (query * (length - query) + query * (query + 1) / 2)
    name = f"prefill {requests} x {query} of {length}, {heads}/{kv_heads}x{dim} {str(dtype)[6:]}"

    def inputs() -> tuple[Tensor, LayerCache, Batch]:
        batch, pages = make_batch(query, [length] * requests)
        cache = make_cache(pages, kv_heads, dim, dtype)
        return random(requests * query, heads, dim), cache, batch

    def case(label: str, run: Callable[..., Tensor], checked: bool) -> Case:
        def make(_: int) -> Callable[[], Tensor]:
            arguments = inputs()
            return lambda: run(*arguments)

        def check() -> float:
            q, cache, batch = inputs()
            picks = [(r, r // query, length - query + r % query + 1) for r in (0, 63, query // 2 + 1, len(q) - 1)]
            expected = dense(q, cache, batch, spec, picks)
            return error(run(q, cache, batch)[[row for row, _, _ in picks]], expected, 0.006)

        return Case(f"{name} {label}".rstrip(), 1, make, check if checked else None, flops=flops)

    def ours(config: dict[str, int] | None = None) -> Callable[..., Tensor]:
        return lambda q, cache, batch: attention_prefill.prefill_attention_triton(
            q, cache, batch, spec.scale, config=config
        )

    yield case("", ours(), True)
    if tune:
        for shape in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 5)):
            config = dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), shape, strict=True))
            yield case(str(shape), ours(config), False)
    if requests == 1 and dtype == BF16:
        yield from library_cases(case, geometry, query, length)


def library_cases(
    case: Callable[[str, Callable[..., Tensor], bool], Case], geometry: tuple[int, int, int], query: int, length: int
) -> Iterator[Case]:
    """PyTorch's kernels as they serve pages, and (alone) on keys that need no gathering."""
    kv_heads, scale = geometry[1], geometry[2] ** -0.5
    for backend in ("cudnn", "flash"):
        fits = attention_library.supported(backend, *geometry, BF16, torch.device(DEVICE))
        if not fits or (backend == "cudnn" and query < length):
            continue

        def library(q: Tensor, cache: LayerCache, batch: Batch, backend=backend) -> Tensor:
            return attention_library.prefill_attention_library(q, cache, batch, scale, backend)

        def alone(q: Tensor, cache: LayerCache, batch: Batch, backend=backend) -> Tensor:
            k, v = (t.reshape(-1, t.shape[-1])[: kv_heads * length] for t in (cache.k, cache.v))
            k, v = (t.reshape(1, kv_heads, length, -1) for t in (k, v))
            return attention_library.causal_attention(q.transpose(0, 1)[None], k, v, scale, backend)

        yield case(backend, library, True)
        if length % 64 == 0:
            yield case(f"{backend} alone", alone, False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("filter", nargs="?", default="")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--no-pdl", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    cases = itertools.chain(norm_cases(), activation_cases(), rope_cases(), sample_cases(), start_cases(),
                            decode_cases(options.tune), prefill_cases(options.tune))  # fmt: skip
    rows = []
    print(f"{'kernel':64} {'error/bound':>11} {'MB':>8} {'us':>9} {'limit us':>9} {'of limit':>8}")
    with launch_options(pdl=not options.no_pdl):
        for case in (c for c in cases if options.filter in c.name):
            try:
                bad = case.check() if case.check else float("nan")
                us = float("nan") if options.check_only else timed(case)
            except Exception as problem:
                print(f"{case.name:64} {type(problem).__name__}: {str(problem)[:200]}", flush=True)
                continue
            limit = case.flops / MATRIX_RATE if case.flops else case.bytes / BANDWIDTH
            rows.append({"name": case.name, "error": bad, "bytes": case.bytes, "us": us, "fraction": limit * 1e6 / us})
            mark = " WRONG" if bad > 1 else ""
            print(
                f"{case.name:64} {bad:11.3f} {case.bytes / 1e6:8.2f} {us:9.2f} {limit * 1e6:9.2f} "
                f"{limit * 1e8 / us:7.1f}%{mark}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
