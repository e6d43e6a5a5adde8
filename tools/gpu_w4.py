"""Checks, tunes and times the 4-bit product on a GPU: one call, a short table, full rows and the tuned plans in files.

Timing and references are those of engine/kernels/bench.py. Limits are those of one H200.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from engine.kernels import w4
from engine.kernels.bench import dense_forms, random_weight, references, sets_for, timed, tinygemm_forms
from engine.kernels.w4 import Plan
from engine.quant import QuantWeight, dequantize

PEERS = [(34816, 5120), (5120, 17408), (14336, 5120), (5120, 6144), (24576, 4096), (4096, 12288)]
MODELS = [
    (3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048),
    (6144, 4096), (4096, 4096), (151936, 4096),
    (10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600), (151936, 5120),
]  # fmt: skip
BANDWIDTH = 4.3e12
PROCESSORS = 132


def product(x: torch.Tensor, w: QuantWeight, p: Plan) -> torch.Tensor:
    y = w4.launch_plan(x, w, p)
    return y if y.dim() == 2 else w4.sum_partials(y, x.dtype)


def candidates(n: int, k: int, rows: int) -> Iterator[Plan]:
    """The plans worth timing: equal shares for one to four programs a processor, few slices of K, whole blocks."""
    groups, tiles = k // 128, -(-n // 64)
    blocks = [block for block in (64, 128) if tiles * 64 % block == 0]
    if rows <= 16:
        for block, resident in itertools.product(blocks, (2, 3, 4)):
            whole = [s for s in range(1, 25) if (s - 1) * -(-groups // s) < groups]
            fitting = [s for s in whole if stream_bytes(groups, s, rows, block) * resident < 227_000]
            even = [s for s in fitting if groups % s == 0] or fitting
            for splits in even[:2]:
                programs = PROCESSORS * resident // splits
                if programs * splits * 4 <= -(-n // block) * groups:
                    yield Plan("stream", rows, block, splits, 3, programs=programs, parts=False)
        for resident in (2, 3, 4):
            yield Plan("tile", rows, blocks[-1], 1, 4, programs=PROCESSORS * resident, parts=False)
        return
    shapes = {32: ((32, 64, 4), (32, 128, 4)), 64: ((64, 64, 4), (64, 128, 4), (64, 128, 8))}
    for program_rows, block, warps in shapes.get(rows, ((128, 64, 4), (128, 128, 8), (64, 128, 4))):
        if block not in blocks:
            continue
        for resident in (1, 2, 3, 4):
            bytes_needed = 3 * (program_rows * 256 + block * 66) + 1024
            programs = PROCESSORS * resident * program_rows // rows
            if bytes_needed * resident < 227_000 and resident * warps <= 16 and programs >= 64:
                yield Plan("tile", program_rows, block, 1, 3, warps, programs=programs, parts=False)


def stream_bytes(groups: int, splits: int, rows: int, block: int) -> int:
    """Shared memory of a stream program with three stages, and what the driver keeps."""
    return -(-groups // splits) * rows * 256 + 3 * block * 66 + 1024


def compile_plan(job: tuple[int, int, int, Plan]) -> str | None:
    n, k, rows, p = job
    try:
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        product(x, random_weight(min(n, 512), k, 128), p)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{job}: {type(error).__name__} {str(error)[:300]}"
    return None


def compile_key(job: tuple[int, int, int, Plan]) -> tuple:
    _, k, rows, p = job
    slice_tiles = -(-(-(-(k // 128) // p.splits) * 2) // 4) if p.kind == "stream" else 0
    return p.kind, p.rows, p.block, p.stages, p.warps, p.hands_over, p.splits == 1, slice_tiles, rows == 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="8,16,32,64,128,256")
    parser.add_argument("--shapes", default="peers", choices=["peers", "models", "all"])
    parser.add_argument("--tune", action="store_true", help="time every candidate, not only the plan in use")
    parser.add_argument("--references", action="store_true")
    parser.add_argument("--out", default=".", type=Path)
    parser.add_argument("--seconds", type=float, default=200)
    args = parser.parse_args()
    start = time.time()
    shapes = {"peers": PEERS, "models": MODELS, "all": PEERS + MODELS}[args.shapes]
    row_counts = [int(r) for r in args.rows.split(",")]
    gpu, processors = w4.gpu_name(0), torch.cuda.get_device_properties(0).multi_processor_count

    def plans(n: int, k: int, m: int) -> list[Plan]:
        in_use = w4.plan(-(-n // 64), k // 64, 2, w4.row_bucket(m), gpu, processors)
        return list({in_use: None, **dict.fromkeys(candidates(n, k, m) if args.tune else ())})

    jobs = [(n, k, m, p) for n, k in shapes for m in row_counts for p in plans(n, k, m)]
    unique = list({compile_key(job): job for job in jobs}.values())
    with multiprocessing.get_context("spawn").Pool(15) as pool:
        failures = [f for f in pool.map(compile_plan, unique, chunksize=2) if f]
    print(f"compiled {len(unique)} kernels in {time.time() - start:.0f} s, {len(failures)} failed")
    for failure in failures[:3]:
        print("  ", failure)
    tuned, table, every = {}, [], []
    for n, k in shapes:
        nbytes = random_weight(n, k, 128).nbytes
        weights = [random_weight(n, k, 128) for _ in range(sets_for(nbytes))]
        for m in row_counts:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            truth = x.double() @ dequantize(weights[0], torch.bfloat16 if n > 100_000 else torch.float64).double().T
            results = []
            for _, _, _, p in [j for j in jobs if j[:3] == (n, k, m)]:
                if time.time() - start > args.seconds:
                    continue
                try:
                    got = product(x, weights[0], p).double()
                    error = ((got - truth).norm() / truth.norm()).item()
                    same = torch.equal(got, product(x, weights[0], p).double())
                    if not (error < 4e-3 and same):
                        print(f"WRONG {n}x{k} m={m} {p} error {error:.1e} repeatable {same}")
                        continue
                    results.append((timed([lambda w=w, x=x, p=p: product(x, w, p) for w in weights]), error, p))
                except Exception as problem:
                    print("failed", (n, k, m, p), str(problem)[:200])
            if not results:
                continue
            every += [{"n": n, "k": k, "rows": m, "us": u, "plan": asdict(p)} for u, _, p in results]
            us, error, best = min(results, key=lambda r: r[0])
            tuned[f"{-(-n // 64)}x{k // 64}x2:{w4.row_bucket(m)}"] = asdict(best)
            limit = nbytes / BANDWIDTH * 1e6
            row = {"n": n, "k": k, "rows": m, "us": us, "error": error, "limit_us": limit, "plan": asdict(best)}
            if args.references:
                row |= references(x, weights, dense_forms(weights), tinygemm_forms(weights))
            table.append(row)
            keys = ("cublas_bf16_us", "dequantize_us", "standard_us", "tinygemm_us")
            more = " ".join(f"{key} {row[key]:.1f}" for key in keys if row.get(key))
            print(f"{n}x{k} m={m} {us:.1f} us (in use {results[0][0]:.1f}) {row['limit_us'] / us:.0%} | "
                  f"{best.kind} r{best.rows} b{best.block} "
                  f"s{best.splits} n{best.programs} g{best.stages} w{best.warps} p{best.parts:d} | {more}")  # fmt: skip
        del weights
    (args.out / "w4.json").write_text(json.dumps(table))
    (args.out / "candidates.json").write_text(json.dumps(every))
    (args.out / "tuned.json").write_text(json.dumps({"w4": tuned}, indent=0))
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
