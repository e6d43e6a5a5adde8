"""The rows of cells.csv and summary.csv: what the metrics say about the records of a cell."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from arkbench import metrics
from arkbench.metrics import Machine, StepCost, Window
from arkbench.records import COUNT_COLUMNS, FIGURE_COLUMNS, IDENTITY_COLUMNS, RequestRecord, Row, number
from arkbench.scenario import Cell


@dataclass(frozen=True)
class Energy:
    """What was measured of the energy of a window: joules, the idle machine's watts, and why it may not be trusted."""

    energy_j: float | None = None
    idle_w: float | None = None
    invalid_reason: str = ""


def identity(cell: Cell) -> Row:
    """The columns that say which cell a row is about."""
    return {
        "scenario": cell.scenario,
        "variant": cell.variant,
        "workload": cell.workload,
        "model": cell.model,
        "cell": cell.id,
        "streams": cell.streams,
        "context_tokens": cell.context_tokens,
        "at_once": cell.at_once,
        "prompt_tokens": cell.prompt_tokens,
        "output_tokens": cell.output_tokens,
    }


def energy_window(cell: Cell, records: Sequence[RequestRecord]) -> tuple[float, float, int] | None:
    """The window whose energy is a cell's, and the tokens it is shared among; None where nothing was made.

    For streams: their steady window and the tokens made in it. Else: from the release to the last first token, and
    the prompt tokens read in it.
    """
    if cell.workload in ("decode", "sustained"):
        window, _ = metrics.steady_window(records, cell.streams or 1)
        return None if window is None else (window.start_s, window.end_s, window.tokens)
    answered = [r for r in records if r.status == "ok" and r.first_token_s is not None and r.sent_s is not None]
    if not answered:
        return None
    start = min(r.sent_s for r in answered if r.sent_s is not None)
    end = max(r.first_token_s for r in answered if r.first_token_s is not None)
    return start, end, sum(r.prompt_tokens or 0 for r in answered)


def cell_row(
    cell: Cell,
    repetition: int,
    records: Sequence[RequestRecord],
    machine: Machine,
    cost: StepCost,
    energy: Energy,
    output_hash: str | None,
    duration_s: float,
) -> Row:
    """One line of cells.csv for a cell whose load ran to its end."""
    ok = [r for r in records if r.status == "ok"]
    first_tokens = [t for r in ok if (t := _ttft(cell, r)) is not None]
    gaps = [gap for r in ok for gap in metrics.token_gaps(r)]
    cached = [r.cached_tokens for r in ok if r.cached_tokens is not None]
    row = identity(cell) | {
        "repetition": repetition,
        "status": "complete",
        "ttft_p50_s": metrics.median(first_tokens),
        "ttft_max_s": max(first_tokens, default=None),
        "tpot_p50_s": metrics.median([t for r in ok if (t := metrics.tpot(r)) is not None]),
        "itl_p50_s": metrics.quantile(gaps, 0.5),
        "itl_p99_s": metrics.quantile(gaps, 0.99),
        "cached_tokens": sum(cached) if cached else None,
        "output_hash": output_hash,
        "duration_s": duration_s,
    }
    row |= _counts(records)
    reasons = _problems(cell, records)
    row |= _speed(cell, records, machine, cost, reasons)
    row |= _energy_columns(cell, records, energy, reasons)
    return row | {"valid": not reasons, "reason": "; ".join(reasons)}


def _ttft(cell: Cell, record: RequestRecord) -> float | None:
    return metrics.ttft_from_schedule(record) if cell.workload == "open" else metrics.ttft(record)


def _counts(records: Sequence[RequestRecord]) -> Row:
    by_status = {status: sum(r.status == status for r in records) for status in ("ok", "refused", "timeout")}
    return {
        "requests_ok": by_status["ok"],
        "requests_failed": sum(r.status in ("failed", "cancelled") for r in records),
        "requests_refused": by_status["refused"],
        "requests_timeout": by_status["timeout"],
    }


def _problems(cell: Cell, records: Sequence[RequestRecord]) -> list[str]:
    """Why a cell's figures may not be trusted. Refusals and time-outs are what a burst is there to count."""
    reasons = []
    failed = [r for r in records if r.status == "failed"]
    if failed:
        reasons.append(f"{len(failed)} of {len(records)} requests failed: {failed[0].error or 'no reason given'}")
    if cell.workload != "burst":
        late = sum(r.status in ("refused", "timeout") for r in records)
        if late:
            reasons.append(f"{late} of {len(records)} requests were refused or got no first token in time")
    cut = sum(r.status == "cancelled" for r in records)
    if cut:
        reasons.append(f"{cut} requests still ran after the grace time and were cut")
    short = [r for r in records if r.status == "ok" and r.output_tokens != cell.output_tokens]
    if short and cell.output_tokens is not None:
        reasons.append(f"{len(short)} answers have {short[0].output_tokens} tokens instead of {cell.output_tokens}")
    reasons += _prompt_problems(cell, records)
    return reasons


def _prompt_problems(cell: Cell, records: Sequence[RequestRecord]) -> list[str]:
    reasons = []
    wanted = cell.context_tokens or cell.prompt_tokens
    served = [r.prompt_tokens for r in records if r.status == "ok" and r.prompt_tokens is not None]
    if wanted is not None and any(tokens != wanted for tokens in served):
        reasons.append(f"the target counted prompts of {min(served)} to {max(served)} tokens instead of {wanted}")
    cached = sum(r.cached_tokens or 0 for r in records)
    if cached and cell.workload != "conversation":
        reasons.append(f"{cached} prompt tokens came from a cache although no two prompts share a beginning")
    return reasons


def _speed(cell: Cell, records: Sequence[RequestRecord], machine: Machine, cost: StepCost, reasons: list[str]) -> Row:
    if cell.workload in ("decode", "sustained"):
        streams = cell.streams or 1
        window, why = metrics.steady_window(records, streams)
        if window is None:
            reasons.append(why)
            return {}
        limit = metrics.decode_limit(machine, cost, streams, _mean_context(records, window))
        return {"decode_tok_s": window.tok_s, "stream_tok_s": window.tok_s / streams} | _limit(window.tok_s, limit)
    rate = metrics.combined_prefill_rate(records)
    if rate is None:
        if not any(r.status == "timeout" for r in records):
            reasons.append("no request was answered")
        return {}
    if cell.workload not in ("prefill", "burst"):
        return {}
    read = sum(r.prompt_tokens or 0 for r in records if r.status == "ok")
    return {"prefill_tok_s": rate} | _limit(rate, metrics.prefill_limit(machine, cost, read))


def _limit(measured: float, limit: float | None) -> Row:
    return {} if limit is None else {"limit_tok_s": limit, "limit_fraction": measured / limit}


def _mean_context(records: Sequence[RequestRecord], window: Window) -> float:
    """Tokens that a stream has in its cache, on average over the window: its prompt and what it had made by then."""
    contexts = []
    for record in metrics.made_tokens(records):
        made = 0
        for time, count in zip(record.token_times_s, record.token_counts, strict=True):
            if window.start_s < time <= window.end_s:
                contexts.append((record.prompt_tokens or 0) + made)
            made += count
    return sum(contexts) / len(contexts) if contexts else 0.0


def _energy_columns(cell: Cell, records: Sequence[RequestRecord], energy: Energy, reasons: list[str]) -> Row:
    window = energy_window(cell, records)
    if energy.invalid_reason:
        reasons.append(energy.invalid_reason)
    if window is None or energy.energy_j is None:
        return {"idle_w": energy.idle_w}
    return {
        "energy_j": energy.energy_j,
        "idle_w": energy.idle_w,
        "wh_per_1k_tokens": metrics.wh_per_1k_tokens(energy.energy_j, window[2]),
    }


def empty_row(cell: Cell, repetition: int, status: str, reason: str, records: Sequence[RequestRecord] = ()) -> Row:
    """The line of a cell that was not measured to its end: skipped, failed or partial."""
    counts = _counts(records) if records else {}
    return identity(cell) | counts | {"repetition": repetition, "status": status, "valid": False, "reason": reason}


def output_hash(answers: Iterable[tuple[int, Sequence[int] | str]]) -> str:
    """SHA-256 over (request, its tokens or text), in the order of the requests, whenever each was answered."""
    digest = hashlib.sha256()
    for request, output in sorted(answers, key=lambda answer: answer[0]):
        body = output if isinstance(output, str) else ",".join(map(str, output))
        digest.update(f"{request}:{body}\n".encode())
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------- summary


def summary_rows(rows: Sequence[dict[str, str]]) -> list[Row]:
    """summary.csv from the rows of cells.csv: one line a cell.

    Figures are medians over the valid repetitions, `<figure>_spread` their (largest - smallest) / median; where no
    repetition is valid they are the medians of what there is, and `valid` is false. A cell is valid when more than
    half of its repetitions are.
    """
    grouped: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        grouped.setdefault((row["scenario"], row["variant"], row["model"], row["cell"]), []).append(row)
    return [_summary_row(group) for group in grouped.values()]


def _summary_row(rows: Sequence[dict[str, str]]) -> Row:
    valid = [row for row in rows if row["valid"] == "true"]
    summary: Row = {column: rows[0][column] for column in IDENTITY_COLUMNS}
    summary["repetitions"] = len(rows)
    for column in COUNT_COLUMNS:
        counts = [int(row[column]) for row in rows if row[column]]
        summary[column] = sum(counts) if counts else None
    for column in FIGURE_COLUMNS:
        values = [value for row in valid or rows if (value := number(row[column])) is not None]
        summary[column] = metrics.median(values)
        summary[f"{column}_spread"] = metrics.spread(values)
    reasons = list(dict.fromkeys(row["reason"] for row in rows if row["reason"]))
    if reasons:
        summary["reason"] = f"{len(rows) - len(valid)} of {len(rows)} repetitions: {'; '.join(reasons)}"
    summary["valid"] = 2 * len(valid) > len(rows)
    return summary
