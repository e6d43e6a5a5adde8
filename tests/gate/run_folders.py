"""Writes run folders for the gate's tests."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arkbench.records import CELL_COLUMNS

H200 = "NVIDIA H200"


def cell_row(cell: str = "decode-s8", repetition: int = 0, **fields: Any) -> dict[str, Any]:
    """A valid line of cells.csv with plausible figures; `fields` replace any of them."""
    plain = {
        "scenario": "quick",
        "variant": "best",
        "workload": "decode",
        "model": "Llama-3.2-1B",
        "cell": cell,
        "repetition": repetition,
        "status": "complete",
        "streams": 8,
        "context_tokens": 1000,
        "output_tokens": 128,
        "requests_ok": 8,
        "requests_failed": 0,
        "requests_refused": 0,
        "requests_timeout": 0,
        "decode_tok_s": 1000.0,
        "tpot_p50_s": 0.008,
        "output_hash": f"hash-{cell}-{repetition}",
        "valid": "true",
    }
    return plain | fields


def request_lines(rows: Sequence[dict[str, Any]], output_tokens: int = 128) -> str:
    """Two answered requests for every line of cells.csv."""
    keys = ("scenario", "variant", "cell", "repetition")
    lines = [
        {k: row[k] for k in keys}
        | {"request": i, "status": "ok", "prompt_tokens": 1000, "output_tokens": output_tokens}
        for row in rows
        for i in range(2)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def write_run(
    path: Path,
    rows: Sequence[dict[str, Any]],
    gpus: Sequence[str] = (H200,),
    scenario_hash: str = "abc",
    columns: Sequence[str] = CELL_COLUMNS,
    newline: str = "\n",
    zipped: bool = False,
    output_tokens: int = 128,
    peak_memory: int | None = None,
    energy_notes: Sequence[str] = (),
    **meta: Any,
) -> Path:
    """A complete run folder; `meta` replaces or adds keys of run.json."""
    path.mkdir(parents=True)
    run = {
        "status": "complete",
        "seed": 1,
        "gpus": [{"name": g} for g in gpus],
        "scenarios": [{"name": "quick", "hash": scenario_hash}],
    }
    (path / "run.json").write_text(json.dumps(run | meta))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator=newline, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    (path / "cells.csv").write_bytes(text.getvalue().encode())
    requests = request_lines(rows, output_tokens).encode()
    if peak_memory is not None or energy_notes:
        keys = ("scenario", "variant", "model", "cell", "repetition")
        details = [
            {k: row[k] for k in keys} | {"peak_memory_bytes": peak_memory, "energy_notes": list(energy_notes)}
            for row in rows
        ]
        (path / "details.jsonl").write_text("".join(json.dumps(d) + "\n" for d in details))
    if zipped:
        (path / "requests.jsonl.gz").write_bytes(gzip.compress(requests))
    else:
        (path / "requests.jsonl").write_bytes(requests)
    return path
