"""The files of a run folder: written to the letter, read in every form that they may have."""

import csv
import gzip
import json

import pytest

from arkbench import figures
from arkbench.errors import UserError
from arkbench.folder import command_line
from arkbench.records import CELL_COLUMNS, RequestRecord, csv_line, read_requests, read_rows, request_line
from arkbench.scenario import Cell

RECORD = RequestRecord("s", "v", "c", 0, 1, 0.5, 0.5, 0.75, 1.0, [0.75, 1.0], [1, 1], 16, None, 2, "ok", None)


def test_plain_and_gzipped_requests_read_alike(tmp_path):
    line = request_line(RECORD) + "\n"
    (tmp_path / "requests.jsonl").write_text(line)
    assert read_requests(tmp_path) == [RECORD]
    (tmp_path / "requests.jsonl").unlink()
    (tmp_path / "requests.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    assert read_requests(tmp_path) == [RECORD]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "requests.jsonl").write_text(f"{request_line(RECORD)}\nnonsense\n{request_line(RECORD)}\n")
    with pytest.raises(UserError, match="line 2 is no request record"):
        read_requests(tmp_path)


def test_what_is_not_known_is_empty_and_never_zero():
    line = csv_line({"scenario": "s", "valid": False, "repetition": 0, "energy_j": None}, CELL_COLUMNS)
    fields = dict(zip(CELL_COLUMNS, line.split(","), strict=True))
    assert (fields["energy_j"], fields["repetition"], fields["valid"]) == ("", "0", "false")
    assert json.loads(request_line(RECORD))["cached_tokens"] is None


def test_reasons_with_commas_and_quotes_survive(tmp_path):
    path = tmp_path / "cells.csv"
    reason = 'a "quoted", comma'
    path.write_text(",".join(CELL_COLUMNS) + "\n" + csv_line({"reason": reason}, CELL_COLUMNS) + "\n")
    assert read_rows(path)[0]["reason"] == reason


def test_the_hash_does_not_depend_on_the_order_of_answers():
    one = figures.output_hash([(0, [1, 2]), (1, [3])])
    assert one == figures.output_hash([(1, [3]), (0, [1, 2])])
    assert one != figures.output_hash([(0, [3]), (1, [1, 2])])
    # printf '0:1,2\n1:3\n' | sha256sum
    assert one == "c1db4e8339ca5e69a7c647936442bfec84454a59dce2ecb81f4e3b2db6219236"


def test_keys_are_not_stored_in_the_command():
    assert command_line(["run", "--api-key", "k", "--seed", "3"]) == "arkbench run --api-key '***' --seed 3"
    assert command_line(["run", "--api-key=k"]) == "arkbench run '--api-key=***'"


def summary(*rows):
    cell = Cell("s", "v", "decode", "m", "decode-s1-c1", streams=1, context_tokens=1, output_tokens=2)
    made = []
    for n, row in enumerate(rows):
        full = figures.identity(cell) | {"repetition": n, "status": "complete", "valid": True, "reason": ""} | row
        (read_back,) = csv.DictReader([",".join(CELL_COLUMNS), csv_line(full, CELL_COLUMNS)])
        made.append(read_back)
    (only,) = figures.summary_rows(made)
    return only


def test_summary_is_the_median_with_its_spread():
    only = summary({"decode_tok_s": 9.0}, {"decode_tok_s": 12.0}, {"decode_tok_s": 10.0})
    assert only["decode_tok_s"] == 10.0
    assert only["decode_tok_s_spread"] == pytest.approx(0.3)
    assert only["repetitions"] == 3
    assert only["prefill_tok_s"] is None
    assert only["valid"] is True


def test_summary_leaves_invalid_repetitions_out_and_says_so():
    bad = {"decode_tok_s": 99.0, "valid": False, "reason": "throttled"}
    only = summary({"decode_tok_s": 9.0}, bad, {"decode_tok_s": 11.0})
    assert only["decode_tok_s"] == 10.0
    assert (only["valid"], only["reason"]) == (True, "1 of 3 repetitions: throttled")
    assert summary(bad, bad, {"decode_tok_s": 9.0})["valid"] is False


def cell_row(cell, records, energy=None):
    from arkbench.metrics import Machine, StepCost

    return figures.cell_row(cell, 0, records, Machine(), StepCost(), energy or figures.Energy(), None, 1.0)


def test_a_throttled_cell_is_invalid_where_no_energy_was_measured_too():
    hot = figures.Energy(None, 60.0, "GPU 0 was slowed down: power cap")
    row = cell_row(BURST, [burst_record(0, "ok", 0.5)], hot)
    assert (row["valid"], row["reason"], row.get("energy_j")) == (False, "GPU 0 was slowed down: power cap", None)


def burst_record(n, status, first=None, prompt=100, cached=0):
    times = [] if first is None else [first]
    last = times[-1] if times else None
    return RequestRecord("s", "v", "c", 0, n, 0.0, 0.0, first, last, times, [1] * len(times), prompt, cached,
                         len(times), status, None if status == "ok" else "why")  # fmt: skip


BURST = Cell("s", "v", "burst", "m", "burst-n3-p100", at_once=3, prompt_tokens=100, output_tokens=1)


def test_a_burst_counts_refused_and_late_ones_apart_and_stays_valid():
    row = cell_row(BURST, [burst_record(0, "ok", 0.5), burst_record(1, "refused"), burst_record(2, "timeout")])
    assert (row["requests_ok"], row["requests_refused"], row["requests_timeout"]) == (1, 1, 1)
    assert row["prefill_tok_s"] == pytest.approx(200.0)
    assert row["valid"] is True


def test_a_failed_request_makes_a_cell_invalid():
    row = cell_row(BURST, [burst_record(0, "ok", 0.5), burst_record(1, "failed"), burst_record(2, "ok", 0.6)])
    assert (row["valid"], row["reason"]) == (False, "1 of 3 requests failed: why")


def test_an_accidental_cache_hit_makes_a_cell_invalid():
    row = cell_row(BURST, [burst_record(n, "ok", 0.5, cached=64 * n) for n in range(2)])
    assert row["cached_tokens"] == 64
    assert row["reason"] == "64 prompt tokens came from a cache although no two prompts share a beginning"


def test_another_prompt_length_than_asked_is_reported():
    row = cell_row(BURST, [burst_record(0, "ok", 0.5, prompt=103)])
    assert row["reason"] == "the target counted prompts of 103 to 103 tokens instead of 100"


def test_all_requests_failing_gives_no_latency_of_zero():
    row = cell_row(BURST, [burst_record(n, "failed") for n in range(3)])
    assert row["ttft_p50_s"] is None
    assert row.get("prefill_tok_s") is None
    assert row["valid"] is False
