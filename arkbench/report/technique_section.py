"""What a technique without published figures brings: its variants side by side, and the same in plain words."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from arkbench.report.blocks import Block, Bullets, Column, Table
from arkbench.report.data import Run, setting
from arkbench.report.figures import Figure, number, show

RESIDENT = "resident_requests"


@dataclass(frozen=True)
class Effect:
    """One figure of the cells of some workloads. `less`: smaller is better."""

    workloads: tuple[str, ...]
    column: str
    name: str
    unit: str = ""
    less: bool = False


@dataclass(frozen=True)
class Technique:
    """`base`: the variant without the technique; `new`: those with it."""

    base: str
    new: tuple[str, ...]
    effects: tuple[Effect, ...]


DECODE = Effect(("decode",), "decode_tok_s", "decode throughput", "tok/s")
TTFT = Effect(("decode",), "ttft_p50_s", "median TTFT", "s", less=True)
COMBINED = Effect(("burst",), "prefill_tok_s", "combined prefill rate", "tok/s")

TECHNIQUES: dict[str, Technique] = {
    "api-cost": Technique("in-process", ("http",), (DECODE, TTFT)),
    "paged-attention": Technique(
        "contiguous",
        ("paged",),
        (DECODE, Effect(("burst",), RESIDENT, "requests that the full cache holds")),
    ),
    "quantized-attention": Technique("bf16", ("fp8", "int8"), (DECODE,)),
    "prefill-batching": Technique(
        "off", ("on",), (COMBINED, Effect(("burst",), "ttft_max_s", "slowest TTFT", "s", less=True))
    ),
    "prompt-caching": Technique(
        "off",
        ("on",),
        (
            Effect(("conversation",), "ttft_p50_s", "median TTFT", "s", less=True),
            Effect(("conversation",), "cached_tokens", "prompt tokens from the cache"),
            COMBINED,
        ),
    ),
}


def technique_blocks(scenario: str, runs: Sequence[Run]) -> list[Block]:
    """The table and its sentences; empty for any other scenario and where there is nothing to compare."""
    technique = TECHNIQUES.get(scenario)
    if technique is None:
        return []
    blocks: list[Block] = []
    for run in runs:
        rows, sentences = _lines(technique, scenario, run)
        if rows:
            key = f"{scenario}-effect" if len(runs) == 1 else f"{scenario}-effect-{runs.index(run) + 1}"
            blocks += [Bullets(sentences), _table(key, technique, run, rows)]
    return blocks


def _table(key: str, technique: Technique, run: Run, rows: list[list[Any]]) -> Table:
    columns = [Column("model"), Column("cell"), Column("figure"), Column(technique.base, "number")]
    columns += [Column("with it"), Column("figure with it", "number"), Column("gain", "ratio")]
    return Table(key, f"What it brings on {run.label or run.hardware}", columns, rows)


def _lines(technique: Technique, scenario: str, run: Run) -> tuple[list[list[Any]], list[str]]:
    rows: list[list[Any]] = []
    sentences: list[str] = []
    cells = run.summary[run.summary["scenario"] == scenario]
    for effect in technique.effects:
        for variant in technique.new:
            found = _pairs(effect, technique.base, variant, cells, run)
            rows += [[*words, base, variant, new, _gain(effect, base, new)] for words, base, new in found]
            gains = [gain for _, base, new in found if (gain := _gain(effect, base, new)) is not None]
            if gains:
                sentences.append(_sentence(effect, technique.base, variant, gains))
    return rows, sentences


def _pairs(
    effect: Effect, base: str, variant: str, cells: pd.DataFrame, run: Run
) -> list[tuple[tuple[str, str, str], Figure, Figure]]:
    """((model, cell, figure), without, with) of every cell that both variants have a figure for."""
    by_variant = [
        {(row["model"], row["cell"]): row for row in cells[cells["variant"] == name].to_dict("records")}
        for name in (base, variant)
    ]
    pairs = []
    unit = f", {effect.unit}" if effect.unit else ""
    for key, row in by_variant[0].items():
        other = by_variant[1].get(key)
        if other is None or row["workload"] not in effect.workloads:
            continue
        figures = [_figure(effect, r, run) for r in (row, other)]
        if all(figure.value is not None for figure in figures):
            pairs.append(((row["model"], setting(row), f"{effect.name}{unit}"), *figures))
    return pairs


def _figure(effect: Effect, row: Mapping[str, Any], run: Run) -> Figure:
    if effect.column != RESIDENT:
        return run.figure(row, effect.column)
    same = ("scenario", "variant", "model", "cell")
    held = [
        value
        for detail in run.details
        if all(detail.get(name) == row[name] for name in same) and (value := number(detail.get(RESIDENT))) is not None
    ]
    return Figure(statistics.median(held) if held else None, mark=run.mark(row))


def _gain(effect: Effect, base: Figure, new: Figure) -> float | None:
    """How many times better; None where a side is nothing."""
    over, under = (base.value, new.value) if effect.less else (new.value, base.value)
    return over / under if over and under else None


def _sentence(effect: Effect, base: str, variant: str, gains: Sequence[float]) -> str:
    """`on against off: median TTFT is 7.9× better (2 cells: 5.1× to 8.4×).`"""
    middle = statistics.median(gains)
    if abs(middle - 1) < 0.1:
        change = 100 * (middle - 1)
        verdict = f"{abs(change):.1f} % {'better' if change >= 0 else 'worse'}"
    else:
        verdict = f"{show(middle if middle > 1 else 1 / middle, 'ratio')} {'better' if middle > 1 else 'worse'}"
    spread = ""
    if len(gains) > 1:
        spread = f" (median of {len(gains)} cells, from {show(min(gains), 'ratio')} to {show(max(gains), 'ratio')})"
    return f"{variant} against {base}: {effect.name} {verdict}{spread}."
