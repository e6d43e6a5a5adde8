"""The end of a report: how it was measured, what the words mean, on what, and what is missing or marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from arkbench import answers
from arkbench.report.blocks import Block, Bullets, Column, Definitions, Details, Paragraph, Section, Table
from arkbench.report.data import CELL_KEY, Run, scenario_entries
from arkbench.report.figures import number, significant, text

DEFINITIONS = (
    (
        "TTFT",
        "From the moment a request is sent to its first generated token on any channel (text, reasoning, tool call); "
        "a role-only or empty piece is no token. For a burst, a request is sent at the shared release time.",
    ),
    (
        "TPOT of a request",
        "(last token time − first piece time) / (output tokens − tokens in the first piece).",
    ),
    ("ITL", "The gaps between tokens; a piece of n tokens counts as n gaps of gap/n."),
    (
        "Decode throughput of N streams",
        "Tokens made by all streams inside the steady window (from the moment the last stream has its first token "
        "until the first stream ends) / its length. Per stream: that / N. The published scaling run defines total = "
        "per-stream speed × streams: reported beside it.",
    ),
    ("Prefill throughput", "Prompt tokens / TTFT, for one prompt."),
    (
        "Combined prefill rate of a burst",
        "Prompt tokens of all answered requests / (time from release until the last of them got its first token).",
    ),
    (
        "Wh per 1,000 tokens",
        "Energy of the window / tokens made in it. Gross is the published definition; net of idle stands beside it. "
        "GPU energy from the NVML energy counter where the GPU has one, else integrated samples; CPU energy from RAPL "
        "where the machine shows it, else empty and named as missing.",
    ),
    (
        "Limit",
        "The tokens per second that the memory bus allows: tokens of a step × measured copy bandwidth / bytes that the "
        "step must read (weights once, plus the cache of every stream); or what the measured matrix rate allows, where "
        "that is the smaller. Fraction of the limit = measured / limit. Both rates are measured once, at the start: "
        "more than 100 % says that the machine was slower then, and is marked (!).",
    ),
    (
        "Median and spread",
        "Figures are medians over repetitions, never a mean over pooled requests of several repetitions. Spread = "
        "(largest − smallest) / median. A claim's spread is that of its ratio, also where the claim is a change in "
        "percent: +32 % with a spread of 5 % is a ratio of 1.32 whose repetitions lie within 0.07 of each other.",
    ),
    (
        "A published figure's own fraction of the limit",
        "Streams × 1,792 GB/s (the RTX 5090's data sheet) / the bytes of 4-bit weights that one token needs. GPUs that "
        "hold parts of a model take turns on a token, so their number does not raise it. The cache is not counted, nor "
        "the further experts that a batch of a mixture-of-experts model reads: there the fraction is a floor (≥).",
    ),
)

METHOD = (
    "A cell is one workload at one setting: so many streams, so long a context or prompt. Every cell is warmed up, "
    "then measured in each repetition; warm-up is in no figure. Every prompt differs from its first token on.",
    "Variants differ by switches and by nothing else. The same cell and repetition has the same prompts in each "
    "variant, so that greedy answers can be compared. A switch that adds in another order or stores in another format "
    "(kernels, weights_dtype, cache_dtype) may round to another token; every other switch must not change one, but "
    f"where two tokens are all but equal: where two answers part, both tokens lie within {answers.NEAR_TIE:.1%} of the "
    "best logit (of its height above the mean of all), or it is a fault.",
    "A ratio carries over to other GPUs. An absolute figure is compared only on the same GPU model and count; "
    "otherwise the verdict is “not comparable”, as it is for a claim about GPUs that was measured on a CPU. The spread "
    "of the repetitions decides whether a difference is one. A claim needs all of its cells.",
    "A cell that was throttled, limited by the client, partly failed, or faster than its limit is marked (!), and its "
    "reason is listed below.",
)

ENVIRONMENT = (
    ("arkbench", "arkbench_version"), ("commit", "commit"), ("command", "command"), ("status", "status"),
    ("GPU driver", "driver"), ("CUDA", "cuda"), ("torch", "torch"), ("triton", "triton"), ("clocks", "clocks"),
    ("power limit, W", "power_limit_w"), ("CPU", "cpu"), ("host", "host"), ("seed", "seed"), ("start", "start_utc"),
    ("end", "end_utc"), ("time spent, s", "seconds"),
)  # fmt: skip


RESULTS = ("decode_tok_s", "prefill_tok_s", "ttft_max_s", "limit_fraction", "duration_s")
REQUEST_WORDS = (
    ("requests_failed", "failed"),
    ("requests_refused", "refused"),
    ("requests_timeout", "without a first token in time"),
)


def method() -> Section:
    return Section("method", "Method", [Bullets(METHOD)])


def definitions() -> Section:
    return Section("definitions", "Definitions", [Definitions(DEFINITIONS)])


def environment(runs: Sequence[Run]) -> Section:
    """What each run ran on, the switches of each variant, the model's geometry."""
    rows: list[list[Any]] = [["hardware", *[run.hardware for run in runs]]]
    rows += [[name, *[written(run.meta.get(key)) for run in runs]] for name, key in ENVIRONMENT]
    rows.insert(-3, ["copy bandwidth, GB/s", *[_gigabytes(run.meta.get("bandwidth_bytes_s")) for run in runs]])
    columns = [Column("what"), *[Column(run.label or "value") for run in runs]]
    shown = [row for row in rows if any(row[1:])]
    blocks: list[Block] = [Table("environment", "What the runs ran on", columns, shown)]
    blocks += _switch_tables(runs)
    blocks += _start_table(runs)
    for run in runs:
        for entry in scenario_entries(run):
            if text(entry.get("text")):
                name = f"Scenario {text(entry.get('name'))}, {run.label} (hash {text(entry.get('hash'))[:12]})"
                blocks.append(Details(name, [Paragraph(f"```\n{text(entry['text']).strip()}\n```")]))
    blocks += _geometry_table(runs)
    return Section("environment", "Environment", blocks)


def written(value: Any) -> str:
    """A value of run.json on one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {written(inner)}" for key, inner in value.items() if inner not in (None, "", []))
    if isinstance(value, list | tuple):
        return ", ".join(dict.fromkeys(written(inner) for inner in value))
    if isinstance(value, float):
        return f"{value:g}"
    return text(value)


def _gigabytes(value: Any) -> str:
    amount = number(value)
    return "" if amount is None else significant(amount / 1e9, 4)


def _switch_tables(runs: Sequence[Run]) -> list[Block]:
    columns: list[tuple[str, Mapping[str, Any]]] = []
    for run in runs:
        switches = run.meta.get("switches") or {}
        for variant, held in switches.items():
            if isinstance(held, Mapping):
                columns.append((f"{variant}, {run.label}" if len(runs) > 1 else variant, held))
    names = list(dict.fromkeys(name for _, held in columns for name in held))
    if not names:
        return []
    rows = [[name, *[written(held.get(name)) for _, held in columns]] for name in names]
    return [Table("switches", "Switches of each variant", [Column("switch"), *[Column(n) for n, _ in columns]], rows)]


def _start_table(runs: Sequence[Run]) -> list[Block]:
    rows = []
    for run in runs:
        for variant, parts in (run.meta.get("start_seconds") or {}).items():
            held = parts if isinstance(parts, Mapping) else {"total": parts}
            rows += [[run.label, variant, part, number(seconds)] for part, seconds in held.items()]
    if not rows:
        return []
    columns = [Column("run"), Column("variant"), Column("part"), Column("time", "number", "", "s")]
    return [Table("start-up", "What start-up cost", columns, rows)]


def _geometry_table(runs: Sequence[Run]) -> list[Block]:
    """Each model once, by part: what holds for all of it, then each kind of layer and how many there are."""
    rows: dict[tuple[str, str], str] = {}
    for run in runs:
        for model, geometry in (run.meta.get("geometry") or {}).items():
            if not geometry:  # an endpoint does not say what its model is made of
                continue
            layers = Counter(written(layer) for layer in geometry.get("layers") or [])
            rows[(model, "whole model")] = written({k: v for k, v in geometry.items() if k not in ("name", "layers")})
            rows |= {(model, f"{count} of {layers.total()} layers"): layer for layer, count in layers.items()}
    if not rows:
        return []
    columns = [Column("model"), Column("part"), Column("values")]
    table = Table("geometry", "Model geometry", columns, [[*key, values] for key, values in rows.items()])
    return [Details("Model geometry", [table])]


def marked(runs: Sequence[Run]) -> Section:
    """Everything marked, missing, partial or invalid."""
    lines = [line for run in runs for line in _run_lines(run)]
    rows = [row for run in runs for row in _cell_rows(run, len(runs) > 1)]
    blocks: list[Block] = []
    if lines:
        blocks.append(Bullets(lines))
    if rows:
        columns = [Column("cell"), Column("variant"), Column("model"), Column("scenario")]
        columns += [Column("run")] if len(runs) > 1 else []
        columns += [Column("what"), Column("repetitions", "integer")]
        blocks.append(Table("marked", "Cells that are marked or incomplete", columns, rows))
    if not blocks:
        blocks.append(Paragraph("Nothing: every cell ran, every request was answered, and no figure was marked."))
    return Section("marked", "Marked, missing, partial, invalid", blocks)


def _run_lines(run: Run) -> list[str]:
    lines = []
    if run.status != "complete":
        lines.append(f"{run.label}: the run is {run.status}; what it did not measure is missing above.")
    if run.absent:
        lines.append(f"{run.label}: the run folder has no {', '.join(run.absent)}.")
    bad = {status: count for status, count in run.request_statuses.items() if status != "ok"}
    if bad:
        total = sum(run.request_statuses.values())
        parts = ", ".join(f"{count} {status or 'without a status'}" for status, count in sorted(bad.items()))
        lines.append(f"{run.label}: of {total:,} requests {parts}.")
    missing = run.meta.get("energy_missing") or []
    lines += [f"{run.label}: {text(reason)}" for reason in missing]
    if len(run.summary) and not run.summary["wh_per_1k_tokens"].notna().any():
        lines.append(f"{run.label}: no energy was measured.")
    lines += _answer_lines(run)
    notes = run.meta.get("notes") or []
    lines += [f"{run.label}: {text(note)}" for note in ([notes] if isinstance(notes, str) else notes)]
    return lines


WHY_DIFFERENT = {
    "fault": "a fault: these switches must not change a token",
    "tie": "no fault: they part where two tokens are all but equal, and rounding decides",
    "bounded": "these switches may round",
}


def _answer_lines(run: Run) -> list[str]:
    """Which variants gave different tokens where the run compared them: a line a pair, with its cells."""
    places: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for entry in (run.meta.get("answers") or {}).get("different") or []:
        variants = " and ".join(sorted(text(name) for name in entry.get("variants") or []))
        pair = (variants, ", ".join(entry.get("switches") or []), answers.kind(entry))
        repetitions = places.setdefault(pair, {}).setdefault(text(entry.get("cell")), [])
        repetitions.append(text(entry.get("repetition")))
    lines = []
    for (variants, switches, kind), cells in places.items():
        where = "; ".join(f"{cell}, repetition {', '.join(dict.fromkeys(held))}" for cell, held in cells.items())
        why = WHY_DIFFERENT[kind]
        lines.append(f"{run.label}: {variants} gave different tokens (switches: {switches}; {why}) in {where}.")
    return lines


def _cell_rows(run: Run, several: bool) -> list[list[Any]]:
    """A line for each reason of each cell, for requests without an answer, and for repetitions that are missing."""
    expected = run.cells.groupby(CELL_KEY, sort=False).size()
    most = int(expected.max()) if len(expected) else 0
    rows = []
    for row in run.summary.to_dict("records"):
        found: list[tuple[str, int | None]] = list(run.marks(row))
        held = int(expected.get(tuple(row[column] for column in CELL_KEY), 0))
        if held < most:
            found.append((f"{most - held} of {most} repetitions missing", most - held))
        for column, word in REQUEST_WORDS:
            count = _requests(run, row, column)
            if count:
                found.append((f"{count:.0f} requests {word}", None))
        if all(number(row[column]) is None for column in RESULTS):
            found.append(("no figure", None))
        where = [row["cell"], row["variant"], row["model"], row["scenario"], *([run.label] if several else [])]
        rows += [[*where, reason, count] for reason, count in found]
    return rows


def _requests(run: Run, row: Mapping[str, Any], column: str) -> float:
    same = run.cells
    for name in CELL_KEY:
        same = same[same[name] == row[name]]
    return float(same[column].sum())
