"""What is stored of a request, a cell and a run, and the readers and writers of those files.

The names of files, keys and columns are a contract (docs/contracts.md); nothing here computes a figure.

A run folder grows line by line: every line is flushed to the disk as it is written, so that a process that is killed
loses none that was complete. The last line of a killed run may be torn; readers leave it out.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from arkbench.errors import UserError

Status = Literal["ok", "failed", "refused", "timeout", "cancelled"]

REQUEST_KEYS = (
    "scenario", "variant", "cell", "repetition", "request", "scheduled_s", "sent_s", "first_token_s", "last_token_s",
    "token_times_s", "token_counts", "prompt_tokens", "cached_tokens", "output_tokens", "status", "error",
)  # fmt: skip

CELL_COLUMNS = (
    "scenario", "variant", "workload", "model", "cell", "repetition", "status", "streams", "context_tokens", "at_once",
    "prompt_tokens", "output_tokens", "requests_ok", "requests_failed", "requests_refused", "requests_timeout",
    "decode_tok_s", "stream_tok_s", "prefill_tok_s", "ttft_p50_s", "ttft_max_s", "tpot_p50_s", "itl_p50_s",
    "itl_p99_s", "cached_tokens", "energy_j", "wh_per_1k_tokens", "idle_w", "limit_tok_s", "limit_fraction",
    "output_hash", "valid", "reason", "duration_s",
)  # fmt: skip

IDENTITY_COLUMNS = (
    "scenario", "variant", "workload", "model", "cell", "streams", "context_tokens", "at_once", "prompt_tokens",
    "output_tokens",
)  # fmt: skip

COUNT_COLUMNS = ("requests_ok", "requests_failed", "requests_refused", "requests_timeout")

FIGURE_COLUMNS = (
    "decode_tok_s", "stream_tok_s", "prefill_tok_s", "ttft_p50_s", "ttft_max_s", "tpot_p50_s", "itl_p50_s",
    "itl_p99_s", "cached_tokens", "energy_j", "wh_per_1k_tokens", "idle_w", "limit_tok_s", "limit_fraction",
    "duration_s",
)  # fmt: skip

SUMMARY_COLUMNS = (
    *IDENTITY_COLUMNS,
    "repetitions",
    *COUNT_COLUMNS,
    *(name for column in FIGURE_COLUMNS for name in (column, f"{column}_spread")),
    "valid",
    "reason",
)

VERDICT_COLUMNS = ("id", "note", "statement", "published", "unit", "measured", "spread", "verdict", "reason")


@dataclass
class RequestRecord:
    """One line of requests.jsonl. Times are seconds on one monotonic clock since the run began.

    `token_times_s[i]` is when the i-th piece arrived, `token_counts[i]` how many tokens it held. None: not known
    (an endpoint that does not report cached tokens) or did not happen (no first token).
    """

    scenario: str
    variant: str
    cell: str
    repetition: int
    request: int
    scheduled_s: float
    sent_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    status: Status = "ok"
    error: str | None = None


Row = dict[str, Any]


# ---------------------------------------------------------------------------------------------------- writing


class LineWriter:
    """Appends lines to a file, each flushed and synced before `write` returns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", newline="")

    def write(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def request_line(record: RequestRecord) -> str:
    """One line of requests.jsonl; times are rounded to a microsecond."""
    plain = asdict(record)
    for key, value in plain.items():
        if isinstance(value, float):
            plain[key] = round(value, 6)
    plain["token_times_s"] = [round(time, 6) for time in record.token_times_s]
    return json.dumps({key: plain[key] for key in REQUEST_KEYS}, separators=(",", ":"))


def csv_line(row: Row, columns: Sequence[str]) -> str:
    """One CSV line; None is an empty field, a bool is true or false."""
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow([_csv_value(row.get(column)) for column in columns])
    return out.getvalue()


def _csv_value(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else value


def write_csv(path: Path, rows: Iterable[Row], columns: Sequence[str]) -> None:
    """Writes a whole CSV file in one move: a reader sees the old or the new file, never a part."""
    write_text(path, "".join(f"{line}\n" for line in [",".join(columns), *(csv_line(row, columns) for row in rows)]))


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file in one move."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a text file in one move."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", newline="", dir=path.parent, delete=False) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).chmod(0o644)
    os.replace(file.name, path)


# ---------------------------------------------------------------------------------------------------- reading


def _lines(path: Path) -> list[str]:
    """The complete lines of a text file, or of its gzipped form `<path>.gz`; none where neither exists."""
    zipped = path.with_name(path.name + ".gz")
    if path.exists():
        data = path.read_bytes()
    elif zipped.exists():
        data = gzip.decompress(zipped.read_bytes())
    else:
        return []
    complete = data[: data.rfind(b"\n") + 1]
    return complete.decode("utf-8").splitlines()


def read_requests(run_dir: Path) -> list[RequestRecord]:
    """Every complete line of requests.jsonl(.gz); raises UserError naming a line that is none of this format."""
    records = []
    for number, line in enumerate(_lines(run_dir / "requests.jsonl"), start=1):
        try:
            records.append(RequestRecord(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise UserError(f"{run_dir}/requests.jsonl: line {number} is no request record ({error})") from None
    return records


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file as text, '' where a field is empty; none where there is no such file."""
    return list(csv.DictReader(_lines(path)))


def read_details(run_dir: Path) -> list[dict[str, Any]]:
    """Every complete line of details.jsonl(.gz)."""
    return [json.loads(line) for line in _lines(run_dir / "details.jsonl")]


def read_run(run_dir: Path) -> dict[str, Any]:
    """run.json; raises UserError where the folder is no run folder."""
    path = run_dir / "run.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{run_dir}: is no run folder (it has no readable run.json)") from None
    except ValueError as error:
        raise UserError(f"{path}: is not valid JSON ({error})") from None


def number(text: str | None) -> float | None:
    """A field of a CSV row as a number; None where it is empty."""
    return float(text) if text else None
