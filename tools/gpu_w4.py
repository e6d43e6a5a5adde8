"""Checks and times variants of the 4-bit product on a GPU: one call, a short table, full rows in a JSON file.

Timing: a CUDA graph of one launch a weight over weights that together exceed the L2 four times, replayed; median.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from pathlib import Path

import torch

SHAPES = [(34816, 5120), (5120, 17408), (14336, 5120), (5120, 6144), (24576, 4096), (4096, 12288)]
BANDWIDTH = 4.3e12


def random_weight(n: int, k: int):
    from engine.quant import QuantWeight

    packed = torch.randint(0, 256, (-(-n // 64), -(-k // 64), 2048), dtype=torch.uint8, device="cuda")
    scales = torch.rand((-(-n // 64), k // 128, 64), device="cuda").mul_(0.02).add_(0.001).to(torch.bfloat16)
    return QuantWeight(packed, scales, None, n, k, 128)


WORK = {}


def workspace():
    if not WORK:
        WORK["parts"] = torch.full((1 << 26,), float("nan"), device="cuda")
        WORK["arrived"] = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
    return WORK["parts"], WORK["arrived"]


def stream(x, w, v, out):
    from engine.kernels.w4_gluon import w4_stream_kernel

    m = max(8, 1 << (x.shape[0] - 1).bit_length())
    per_slice = -(-(w.k_tiles // 2) // v["splits"]) * 2
    bucket = next(b for b in (8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 136, 272) if b >= per_slice)
    return w4_stream_kernel[(v["blocks"] * v["splits"],)](
        x, w.packed.view(torch.int32), w.scales, out, *workspace(), x.shape[0], w.n, w.k, x.stride(0), w.n // v["bn"],
        w.k_tiles, per_slice, v["splits"],
        M=m, BN=v["bn"], SLICE=bucket, GROUP_TILES=2, STAGES=v["stages"], PDL=v["pdl"],
        num_warps=4, launch_pdl=v["pdl"],
    )  # fmt: skip


def tile(x, w, v, out):
    from engine.kernels.w4_gluon import w4_tile_kernel

    grid = (-(-x.shape[0] // v["m"]), -(-w.n // v["bn"]), v["splits"])
    per_slice = -(-(w.k_tiles // 2) // v["splits"]) * 2
    return w4_tile_kernel[grid](
        x, w.packed.view(torch.int32), w.scales, out, *workspace(), x.shape[0], w.n, w.k, x.stride(0), w.n_tiles,
        w.k_tiles, per_slice,
        M=v["m"], BN=v["bn"], WARPS=v["warps"], GROUP_TILES=2, STAGES=v["stages"], PDL=v["pdl"],
        num_warps=v["warps"], launch_pdl=v["pdl"],
    )  # fmt: skip


def timed(launches, replays=9) -> float:
    """Microseconds of one launch: median over replays of a graph that holds all of them."""
    stream_ = torch.cuda.Stream()
    with torch.cuda.stream(stream_):
        for launch in launches:
            launch()
        stream_.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream_):
            for launch in launches:
                launch()
        times = []
        for _ in range(replays + 1):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record(stream_)
            graph.replay()
            b.record(stream_)
            stream_.synchronize()
            times.append(a.elapsed_time(b) * 1e3 / len(launches))
    return sorted(times[1:])[replays // 2]


KINDS = [dict(bn=64, stages=4), dict(bn=64, stages=6), dict(bn=128, stages=3), dict(bn=128, stages=4)]


def stream_variants(n, k, m):
    groups = k // 128
    for kind, splits, steps in itertools.product(KINDS, (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16), (1, 2, 3, 4, 5, 6, 8, 12)):
        n_blocks = n // kind["bn"]
        slice_groups = -(-groups // splits)
        smem = slice_groups * 2 * max(8, m) * 128 + kind["stages"] * kind["bn"] * 66 + kind["bn"] * max(m, 8) * 4
        blocks = -(-n_blocks // steps)
        ctas = blocks * splits
        if smem > 110_000 or not 120 < ctas < 1200 or m > 32 or (m > 16 and kind["bn"] == 128):
            continue
        if splits * m * 8 > k or (splits - 1) * slice_groups >= groups:
            continue
        yield dict(kind, splits=splits, blocks=blocks, pdl=True)


def tile_variants(n, k, m):
    for bm, bn, warps, stages, splits in itertools.product(
        (32, 64, 128, 256), (64, 128, 256), (4, 8), (3, 4, 6), (1, 2, 3, 4, 6, 8)
    ):
        if bm > max(32, m) or bm < min(m, 128) or bn * bm // warps > 4096 or bn // warps < 16 or bn * bm // warps < 512:
            continue
        smem = stages * (bm * 128 + bn * 34) + bm * bn * (4 if splits > 1 else 2)
        ctas = -(-m // bm) * -(-n // bn) * splits
        if smem > 225_000 or not 100 < ctas < 1200 or (splits > 1 and splits * m * n > 1 << 26):
            continue
        yield dict(m=bm, bn=bn, warps=warps, stages=stages, splits=splits, pdl=True)


def reference(x, w):
    from engine.quant import dequantize

    return x.double() @ dequantize(w, torch.float64).T


def compile_one(job):
    kind, n, k, m, v = job
    try:
        torch.cuda.set_device(0)
        w = random_weight(n if n < 1024 else 1024, k)
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(m, w.n, device="cuda", dtype=x.dtype)
        (stream if kind == "stream" else tile)(x, w, dict(v, blocks=4), out)
        torch.cuda.synchronize()
        return None
    except Exception as error:
        return f"{job}: {type(error).__name__} {str(error)[:300]}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="1,16,64")
    parser.add_argument("--tile-rows", default="128,256")
    parser.add_argument("--shapes", default="0,1,2,3,4,5")
    parser.add_argument("--out", default="w4.json")
    parser.add_argument("--show", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=240)
    args = parser.parse_args()
    start = time.time()
    shapes = [SHAPES[int(i)] for i in args.shapes.split(",")]
    jobs = []
    for n, k in shapes:
        for m in [int(r) for r in args.rows.split(",") if r]:
            jobs += [("stream", n, k, m, v) for v in stream_variants(n, k, m)]
        for m in [int(r) for r in args.tile_rows.split(",") if r]:
            jobs += [("tile", n, k, m, v) for v in tile_variants(n, k, m)]
    seen, unique = set(), []
    for kind, n, k, m, v in jobs:
        key = (kind, k if kind == "stream" else 0, max(8, m) if kind == "stream" else 0,
               tuple(sorted((a, b) for a, b in v.items() if a != "blocks")))  # fmt: skip
        if key not in seen:
            seen.add(key)
            unique.append((kind, n, k, m, v))
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        failures = [f for f in pool.map(compile_one, unique, chunksize=4) if f]
    print(f"compiled {len(unique)} kernels in {time.time() - start:.0f} s; failed: {len(failures)}")
    for f in failures[:5]:
        print("  ", f)
    rows = []
    for n, k in shapes:
        one = random_weight(n, k)
        copies = max(2, int(260e6 // one.nbytes) + 1)
        weights = [random_weight(n, k) for _ in range(copies)]
        for m in sorted({j[3] for j in jobs}):
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            truth = reference(x, weights[0])
            results = []
            for job in [j for j in jobs if (j[1], j[2], j[3]) == (n, k, m)]:
                v = job[4]
                if time.time() - start > args.seconds:
                    break
                try:
                    out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
                    launch = stream if job[0] == "stream" else tile
                    run = lambda w: launch(x, w, v, out)  # noqa: B023, E731
                    run(weights[0])
                    error = ((out.double() - truth).norm() / truth.norm()).item()
                    us = timed([lambda w=w: run(w) for w in weights])
                    results.append(dict(n=n, k=k, rows=m, kind=job[0], **v, error=error, us=us))
                except Exception as problem:
                    print("failed", job, str(problem)[:200])
            results.sort(key=lambda r: r["us"])
            rows += results
            limit = one.nbytes / BANDWIDTH * 1e6
            for r in results[: args.show]:
                show = " ".join(f"{a}={b}" for a, b in r.items() if a not in ("n", "k", "rows", "us", "error", "pdl"))
                print(f"{n}x{k} m={m} {r['us']:.1f} us ({limit / r['us']:.0%} of {limit:.1f}) err {r['error']:.1e} {show}")
        del weights
    Path(args.out).write_text(json.dumps(rows))
    print(f"{time.time() - start:.0f} s in all")


if __name__ == "__main__":
    main()
