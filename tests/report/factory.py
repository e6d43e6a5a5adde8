"""Run folders as the harness writes them, made up: the figures are plausible, not measured."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from arkbench.records import CELL_COLUMNS, VERDICT_COLUMNS
from arkbench.report import published

FIGURES = (
    "decode_tok_s", "stream_tok_s", "prefill_tok_s", "ttft_p50_s", "ttft_max_s", "tpot_p50_s", "itl_p50_s",
    "itl_p99_s", "cached_tokens", "energy_j", "wh_per_1k_tokens", "idle_w", "limit_tok_s", "limit_fraction",
    "duration_s",
)  # fmt: skip
JITTER = (1.0, 1.012, 0.991)


def cell(scenario: str, variant: str, workload: str, model: str, name: str, **values: Any) -> dict[str, Any]:
    """One cell; what is not given is empty."""
    row = dict.fromkeys(CELL_COLUMNS, "")
    row |= {"scenario": scenario, "variant": variant, "workload": workload, "model": model, "cell": name}
    row |= {"status": "complete", "requests_ok": 8, "requests_failed": 0, "requests_refused": 0, "requests_timeout": 0}
    return row | {"valid": "true", "duration_s": 10.0} | values


def write_run(
    folder: Path,
    cells: Sequence[Mapping[str, Any]],
    verdicts: Sequence[Mapping[str, Any]] | None = None,
    timeline: Sequence[Mapping[str, Any]] = (),
    repetitions: int = 3,
    without: Sequence[str] = (),
    **meta: Any,
) -> Path:
    """Writes a run folder; each cell is repeated with a little jitter, the summary holds the first (the median)."""
    folder.mkdir(parents=True, exist_ok=True)
    jitter = JITTER[:repetitions]
    repeated = [
        {**row, "repetition": index, **{c: row[c] * by for c in FIGURES if isinstance(row[c], float)}}
        for row in cells
        for index, by in enumerate(jitter)
    ]
    _csv(folder / "cells.csv", CELL_COLUMNS, repeated)
    columns = [c for c in CELL_COLUMNS if c not in ("repetition", "status", "output_hash")]
    spread = {f"{column}_spread": round(max(jitter) - min(jitter), 6) for column in FIGURES}
    summary = [{**row, **{k: v for k, v in spread.items() if row[k.removesuffix("_spread")] != ""}} for row in cells]
    _csv(folder / "summary.csv", [*columns, *spread], summary)
    _csv(folder / "verdicts.csv", VERDICT_COLUMNS, claims() if verdicts is None else verdicts)
    names = list(dict.fromkeys(row["scenario"] for row in cells))
    (folder / "run.json").write_text(json.dumps(run_json(names, cells, meta)), encoding="utf-8")
    with (folder / "requests.jsonl").open("w", encoding="utf-8") as file:
        for row in repeated:
            for status in ("ok", "failed", "refused", "timeout"):
                for index in range(int(row[f"requests_{status}"] or 0)):
                    file.write(json.dumps({"cell": row["cell"], "request": index, "status": status}) + "\n")
    if timeline:
        lines = "".join(json.dumps(line) + "\n" for line in timeline)
        (folder / "timeline.jsonl").write_text(lines, encoding="utf-8")
    for name in without:
        (folder / name).unlink()
    return folder


def run_json(names: Sequence[str], cells: Sequence[Mapping[str, Any]], meta: Mapping[str, Any]) -> dict[str, Any]:
    variants = list(dict.fromkeys(row["variant"] for row in cells))
    scenarios = [
        {"name": n, "title": n.replace("-", " ").capitalize(), "text": f'name = "{n}"\n', "hash": "5f0c"} for n in names
    ]
    made = {
        "arkbench_version": "0.1.0",
        "commit": "58b6e2d9c0aa",
        "command": f"arkbench run {' '.join(names)}",
        "scenario": scenarios[0] if scenarios else None,
        "scenarios": scenarios,
        "switches": {v: {"kernels": "standard" if v == "standard" else "fused", "loop": "inverted"} for v in variants},
        "model": {"name": cells[0]["model"], "layers": 64, "hidden_size": 5120} if cells else {},
        "gpus": ["NVIDIA H200"],
        "driver": "580.95", "cuda": "13.0", "torch": "2.11.0", "triton": "3.6.0", "clocks": "1980 MHz",
        "power_limit_w": 700, "cpu": "Xeon Platinum 8480C", "seed": 1, "host": "node-7",
        "start_utc": "2026-11-30T21:04:11Z", "end_utc": "2026-11-30T21:31:02Z", "status": "complete",
        "bandwidth_bytes_s": 4.21e12,
        "start_seconds": {v: {"weights": 6.2, "tuning": 3.1} for v in variants},
    }  # fmt: skip
    return made | dict(meta)


def claims(tested: Mapping[str, tuple[Any, Any, str, str]] | None = None) -> list[dict[str, Any]]:
    """verdicts.csv: every published claim, those in `tested` with (measured, spread, verdict, reason)."""
    rows = []
    for claim in published.table("claims.csv").to_dict("records"):
        measured, spread, verdict, reason = (tested or {}).get(
            claim["id"], ("", "", "not run", f"needs scenario {claim['note']}")
        )
        row = {key: claim[key] for key in ("id", "note", "statement", "published")}
        unit = claim["unit"] if isinstance(claim["unit"], str) else ""
        rows.append(row | {"unit": unit, "measured": measured, "spread": spread, "verdict": verdict, "reason": reason})
    return rows


def _csv(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


# One run for each note


def decode(scenario: str, variant: str, model: str, streams: int, rate: float | str, limit: float, **more: Any) -> dict:
    """A decode cell: rate in tok/s of all streams, limit the fraction it reaches."""
    each = rate / streams if isinstance(rate, float) else ""
    context = more.pop("context_tokens", 1000)
    known = isinstance(rate, float)
    values = {
        "streams": streams, "context_tokens": context, "output_tokens": 256, "decode_tok_s": rate,
        "stream_tok_s": each, "tpot_p50_s": 1 / each if each else "", "ttft_p50_s": 0.11 * streams**0.5,
        "limit_tok_s": rate / limit if known else "", "limit_fraction": limit if known else "",
        "energy_j": 6200.0, "wh_per_1k_tokens": 520 / rate / 3.6 if known else "", "idle_w": 74.0,
    }  # fmt: skip
    return cell(scenario, variant, "decode", model, f"decode-s{streams}-c{context}", **(values | more))


def prefill(scenario: str, variant: str, model: str, tokens: int, rate: float | str, **more: Any) -> dict:
    known = isinstance(rate, float)
    values = {
        "prompt_tokens": tokens, "prefill_tok_s": rate, "ttft_p50_s": tokens / rate if known else "",
        "limit_fraction": rate / 16000 if known else "", "limit_tok_s": 16000.0,
    }  # fmt: skip
    return cell(scenario, variant, "prefill", model, f"prefill-p{tokens}", **(values | more))


def fused_kernels(folder: Path, model: str = "Qwen3.8-27B", speed: float = 1.0, **meta: Any) -> Path:
    name = "fused-kernels"
    cells = []
    rates = {"standard": (118.0, 540.0, 690.0, 2300.0), "fused": (121.0, 905.0, 1704.0, 5310.0)}
    limits = {"standard": (0.39, 0.23, 0.15, 0.13), "fused": (0.4, 0.38, 0.37, 0.31)}
    prompts = {"standard": (6100.0, 10200.0, 11900.0, 12100.0), "fused": (9000.0, 11700.0, 12600.0, 12300.0)}
    for variant in ("standard", "fused"):
        for streams, rate, limit in zip((1, 8, 16, 64), rates[variant], limits[variant], strict=True):
            cells.append(decode(name, variant, model, streams, rate * speed, limit * speed))
        for tokens, rate in zip((256, 1024, 2048, 8192), prompts[variant], strict=True):
            cells.append(prefill(name, variant, model, tokens, rate * speed))
    tested = {
        "fused-decode-16": (2.47, 0.021, "reproduced", "ratio, within the spread of the repetitions of 2.6"),
        "fused-decode-64": (2.31, 0.018, "reproduced", "ratio, within 1 % of 2.3"),
        "fused-decode-8": (1.68, 0.02, "exceeded", "ratio, above 1.5 by more than the spread"),
        "fused-decode-1": (1.03, 0.011, "exceeded", "ratio, one request gains where the note loses 4 %"),
        "standard-stalls-8-16": (
            1.28,
            0.02,
            "not reproduced",
            "standard goes on to scale: 1.28",
        ),
        "fused-prefill-256": (47.5, 0.03, "reproduced", "change, within the spread"),
        "fused-prefill-8192": (1.7, 0.02, "reproduced", "change, within the spread"),
        "fused-start-up": (9.3, "", "not comparable", "measured with another model than the note's"),
    }
    return write_run(folder, cells, claims(tested), **meta)


def with_gaps(folder: Path) -> Path:
    """A run that was cut: an invalid cell, a failed one, one that never ran, one with fewer repetitions."""
    name, model = "fused-kernels", "Qwen3-32B"
    cells = [
        decode(name, "standard", model, 1, 108.0, 0.42),
        decode(name, "standard", model, 8, 500.0, 0.25, valid="false", reason="GPU throttled: power cap"),
        decode(name, "standard", model, 16, "", 0.2, status="failed", reason="out of memory")
        | {"requests_ok": 0, "requests_failed": 16},
        decode(name, "fused", model, 1, 140.0, 0.55),
        decode(name, "fused", model, 8, float("nan"), 0.5),
        decode(name, "fused", model, 16, 1950.0, 0.48, requests_timeout=1, requests_refused=2),
        prefill(name, "standard", model, 256, 6000.0),
    ]  # fmt: skip
    folder = write_run(folder, cells, status="partial", notes=["CPU energy not available: RAPL cannot be read"])
    lines = (folder / "cells.csv").read_text(encoding="utf-8").splitlines()
    (folder / "cells.csv").write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    with (folder / "requests.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"cell": "decode-s1-c1000", "req')
    return folder


def inverted_loops(folder: Path, **meta: Any) -> Path:
    cells = []
    for row in published.table("inverted_loops.csv").to_dict("records"):
        if row["model"] in ("GLM-4.7-Flash",):
            continue
        model = "Qwen3.6-35B-A3B" if row["model"] == "Qwen3.6-35B" else row["model"]
        driven = row["ark_1_1_tok_s"] * 1.9
        gain = 1 + (row["speed_up"] - 1) * 1.12
        cells.append(decode("inverted-loops", "driven", model, 1, driven, 0.3))
        cells.append(decode("inverted-loops", "inverted", model, 1, driven * gain, 0.3 * gain))
    cells.append(decode("inverted-loops", "driven", "Qwen3-8B", 64, 9000.0, 0.3))
    cells.append(decode("inverted-loops", "inverted", "Qwen3-8B", 64, 9050.0, 0.3))
    tested = {
        "loops-largest": (2.74, 0.01, "exceeded", "Llama-3.2-1B"),
        "loops-smallest": (1.15, 0.01, "reproduced", "Qwen3-32B; every model measured gains"),
    }
    return write_run(folder, cells, claims(tested), **meta)


def decode_batching(folder: Path, **meta: Any) -> Path:
    name = "decode-batching"
    cells = []
    for row in published.table("decode_batching_releases.csv").to_dict("records"):
        for variant, column in (("ark-1.0", "ark_1_0"), ("ark-2.0", "ark_2_0")):
            streams = row[f"{column}_streams"]
            wh = row[f"{column}_wh_per_1k_tokens"] * 0.6
            cells.append(
                decode(name, variant, row["model"], streams, row[f"{column}_tok_s"] * 2.4, 0.2)
                | {
                    "workload": "sustained",
                    "cell": f"sustained-s{streams}",
                    "wh_per_1k_tokens": wh,
                    "context_tokens": "",
                }
            )
    for context, top in ((1000, 4100.0), (4000, 3500.0)):
        for streams in (1, 4, 8, 16, 24, 32, 48, 64):
            rate = top * (streams / 64) ** 0.65
            cells.append(decode(name, "ark-2.0", "Qwen3.6-35B-A3B", streams, rate, 0.22, context_tokens=context))
    return write_run(folder, cells, **meta)


def pipelined_prefill(folder: Path, **meta: Any) -> Path:
    name, model = "pipelined-prefill", "Qwen3.5-122B-A10B"
    cells = []
    for row in published.table("pipelined_prefill.csv").to_dict("records"):
        for variant, column in (("ark-2.0", "ark_2_0"), ("ark-2.1", "ark_2_1")):
            rate = row[f"{column}_tok_s"] * 1.3
            tokens, at_once = row["prompt_tokens"], row["at_once"]
            cells.append(_burst(name, variant, model, tokens, at_once, rate, tokens * at_once / rate))
    answered = {(16000, 64): (20, 64), (64000, 16): (0, 5)}
    for (tokens, at_once), counts in answered.items():
        for variant, ok in zip(("ark-2.0", "ark-2.1"), counts, strict=True):
            cells.append(
                _burst(name, variant, model, tokens, at_once, 14000.0 if ok else "", 71.0 if ok else "")
                | {"requests_ok": ok, "requests_timeout": at_once - ok}
            )
    return write_run(folder, cells, timeline=timeline(), gpus=["NVIDIA H200"] * 4, **meta)


def _burst(name: str, variant: str, model: str, tokens: int, at_once: int, rate: Any, slowest: Any) -> dict:
    return cell(
        name, variant, "burst", model, f"burst-p{tokens}-n{at_once}", prompt_tokens=tokens, at_once=at_once,
        output_tokens=8, prefill_tok_s=rate, ttft_p50_s=slowest and slowest * 0.6, ttft_max_s=slowest,
        cached_tokens=0.0, requests_ok=at_once,
    )  # fmt: skip


def timeline(stages: int = 4, requests: int = 2, pieces: int = 4) -> list[dict[str, Any]]:
    """The same pieces in sequence, and pipelined; then one decode step on each stage."""
    lines = []
    for variant in ("ark-2.0", "ark-2.1"):
        ready = 100.0
        for index in range(requests * pieces):
            start = ready + (index * stages if variant == "ark-2.0" else index) * 0.1
            for stage in range(stages):
                at = start + stage * 0.1
                lines.append(_span(variant, stage, index // pieces, index % pieces, at, at + 0.095, "prefill"))
        end = max(line["end_s"] for line in lines if line["variant"] == variant)
        for stage in range(stages):
            lines.append(_span(variant, stage, 0, None, end + stage * 0.02, end + stage * 0.02 + 0.018, "decode"))
    return lines


def _span(variant: str, stage: int, request: int, piece: int | None, start: float, end: float, kind: str) -> dict:
    return {
        "variant": variant, "stage": stage, "kind": kind, "request": request, "piece": piece, "start_s": start,
        "end_s": end,
    }  # fmt: skip


def models(folder: Path, **meta: Any) -> Path:
    cells = []
    for index, model in enumerate(published.model_names()):
        fraction = 0.2 + 0.03 * index
        cells.append(decode("models", "best", model, 1, 900.0 / (index + 1), fraction))
        cells.append(decode("models", "best", model, 64, 22000.0 / (index + 1), fraction * 0.8))
        cells.append(prefill("models", "best", model, 2048, 30000.0 / (index + 1)))
    return write_run(folder, cells, **meta)


def kernels(folder: Path, **meta: Any) -> Path:
    """Cells of the kernel bench: their figures stand in details.jsonl, one list of rows a repetition."""
    name = "kernels"
    cells = [cell(name, "best", "kernels", "Qwen3-32B", "kernels-products", requests_ok="")]
    write_run(folder, cells, **meta)
    lines = []
    for repetition, by in enumerate(JITTER):
        rows = [
            {"kernel": kernel, "shape": shape, "rows": m, "us": 52.0 * by * m**0.4, "limit_fraction": share * by}
            for kernel, share in (("standard", 0.42), ("fused", 0.81))
            for shape in ("5120x25600", "25600x5120")
            for m in (1, 16, 64)
        ]
        rows.append({"kernel": "tinygemm", "shape": "5120x25600", "rows": 1, "us": None, "limit_fraction": None})
        lines.append({"scenario": name, "cell": "kernels-products", "repetition": repetition, "kernels": rows})
    (folder / "details.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder
