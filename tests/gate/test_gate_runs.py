"""Run folders as the gate reads them: awkward ones, broken ones, and comparisons of stored runs."""

from __future__ import annotations

import csv
import gzip
import math
from pathlib import Path

import pytest
from run_folders import H200, cell_row, write_run

from arkbench.errors import UserError
from arkbench.gate import CellKey
from arkbench.gate_compare import check_stored
from arkbench.gate_runs import load_run
from arkbench.records import CELL_COLUMNS

KEY = CellKey("quick", "best", "Llama-3.2-1B", "decode-s8")


def rows(speed: float = 1000.0, repetitions: int = 3, **fields):
    return [
        cell_row(repetition=i, decode_tok_s=speed * (1 + 0.002 * i), tpot_p50_s=8 / speed, **fields)
        for i in range(repetitions)
    ]


def states(base: Path, head: Path, **options):
    result = check_stored(load_run(base), load_run(head), **options)
    return {(row.cell.cell, row.check): row.state for row in result.rows}, result


@pytest.fixture
def base(tmp_path):
    return write_run(tmp_path / "base", rows())


def test_same_run_passes(base, tmp_path):
    found, result = states(base, write_run(tmp_path / "head", rows(990.0)))
    assert result.exit_code == 0 and result.notes == ()
    assert found == {
        ("decode-s8", check): "pass"
        for check in ("failed requests", "outputs", "token counts", "decode_tok_s", "tpot_p50_s")
    }


def test_slow_run_is_a_regression(base, tmp_path):
    found, result = states(base, write_run(tmp_path / "head", rows(800.0)))
    assert result.exit_code == 1
    assert found["decode-s8", "decode_tok_s"] == found["decode-s8", "tpot_p50_s"] == "regression"


@pytest.mark.parametrize(
    "shape",
    [{"zipped": True}, {"newline": "\r\n"}, {"columns": sorted(CELL_COLUMNS)}, {"columns": (*CELL_COLUMNS, "x")}],
)
def test_other_shapes_of_the_same_data(base, tmp_path, shape):
    _, result = states(base, write_run(tmp_path / "head", rows(), **shape))
    assert result.exit_code == 0 and result.notes == ()
    _, result = states(base, write_run(tmp_path / "slow", rows(700.0), **shape))
    assert result.exit_code == 1


def test_byte_order_mark_is_no_column(base, tmp_path):
    head = write_run(tmp_path / "head", rows())
    file = head / "cells.csv"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert states(base, head)[1].exit_code == 0


def test_one_repetition(tmp_path):
    old = write_run(tmp_path / "old", rows(repetitions=1))
    assert states(old, write_run(tmp_path / "same", rows(repetitions=1)))[1].exit_code == 0
    assert states(old, write_run(tmp_path / "slow", rows(700.0, 1)))[1].exit_code == 1
    assert states(old, write_run(tmp_path / "doubt", rows(905.0, 1)))[1].exit_code == 2


@pytest.mark.parametrize("side", ["base", "head"])
def test_missing_cell_is_no_pass(tmp_path, side):
    both = [*rows(), *rows(cell="decode-s1")]
    runs = {s: write_run(tmp_path / s, rows() if s == side else both) for s in ("base", "head")}
    found, result = states(runs["base"], runs["head"])
    assert found["decode-s1", "cell"] == "invalid" and result.exit_code == 2
    assert any(f"missing in {side}" in r.reason for r in result.rows)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "0", "-3"])
def test_figure_that_is_none_is_no_pass(base, tmp_path, value):
    head = write_run(tmp_path / "head", [*rows()[:2], cell_row(repetition=2, decode_tok_s=value)])
    found, result = states(base, head)
    assert result.exit_code == 2 and found == {("decode-s8", "cell"): "invalid"}
    assert "decode_tok_s is not a positive number" in result.rows[0].reason


def test_empty_figure_where_base_has_one_is_no_pass(base, tmp_path):
    head = write_run(tmp_path / "head", [r | {"tpot_p50_s": ""} for r in rows()])
    found, result = states(base, head)
    assert found["decode-s8", "tpot_p50_s"] == "invalid" and result.exit_code == 2


def test_cell_without_any_figure_is_no_pass(tmp_path):
    empty = [r | {"tpot_p50_s": "", "decode_tok_s": ""} for r in rows()]
    found, result = states(write_run(tmp_path / "a", empty), write_run(tmp_path / "b", empty))
    assert found["decode-s8", "cell"] == "invalid" and result.exit_code == 2


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"valid": "false", "reason": "GPU 0 throttled"}, "GPU 0 throttled"),
        ({"valid": ""}, "marked invalid"),
        ({"status": "failed", "reason": "out of memory"}, "out of memory"),
        ({"status": "partial"}, "status partial"),
    ],
)
def test_invalid_repetition_is_no_pass(base, tmp_path, fields, reason):
    head = write_run(tmp_path / "head", [*rows()[:2], cell_row(repetition=2, **fields)])
    found, result = states(base, head)
    assert found == {("decode-s8", "cell"): "invalid"} and result.exit_code == 2
    assert result.rows[0].reason == f"head, repetition 2: {reason}"


def test_failed_requests_are_a_regression_though_the_cell_is_invalid(base, tmp_path):
    fields = {"requests_ok": 7, "requests_failed": 1, "valid": "false", "reason": "1 of 8 requests failed"}
    found, result = states(base, write_run(tmp_path / "head", rows(**fields)))
    assert found == {("decode-s8", "failed requests"): "regression"} and result.exit_code == 1
    assert result.rows[0].reason == "3 failed requests, base 0"


def test_other_outputs_are_a_regression_unless_accepted(base, tmp_path):
    head = write_run(tmp_path / "head", [r | {"output_hash": "other"} for r in rows()])
    found, result = states(base, head)
    assert found["decode-s8", "outputs"] == "regression" and result.exit_code == 1
    assert states(base, head, accept_outputs=True)[1].exit_code == 0


def test_lost_output_hash_is_no_pass(base, tmp_path):
    _, result = states(base, write_run(tmp_path / "head", [r | {"output_hash": ""} for r in rows()]))
    assert result.exit_code == 2
    partly = [rows()[0], *(r | {"output_hash": ""} for r in rows()[1:])]
    assert states(base, write_run(tmp_path / "partly", partly))[1].exit_code == 2


def test_outputs_of_other_seeds_are_not_compared(base, tmp_path):
    head = write_run(tmp_path / "head", [r | {"output_hash": "other"} for r in rows()], seed=2)
    found, result = states(base, head)
    assert ("decode-s8", "outputs") not in found and result.exit_code == 0
    assert result.notes == ("outputs were not compared: the runs have different seeds",)


def test_other_token_counts_are_a_regression(base, tmp_path):
    found, result = states(base, write_run(tmp_path / "head", rows(), output_tokens=127))
    assert found["decode-s8", "token counts"] == "regression" and result.exit_code == 1


def test_energy_of_a_short_window_is_not_judged(tmp_path):
    def energy(wh: float):
        return [r | {"wh_per_1k_tokens": wh} for r in rows()]

    old = write_run(tmp_path / "old", energy(0.10))
    found, result = states(old, write_run(tmp_path / "more", energy(0.15)))
    assert found["decode-s8", "wh_per_1k_tokens"] == "regression"
    short = "nvml 0: the window is short for the energy counter's resolution"
    found, result = states(old, write_run(tmp_path / "short", energy(0.15), energy_notes=[short]))
    assert ("decode-s8", "wh_per_1k_tokens") not in found and result.exit_code == 0
    assert result.notes == (f"energy of {KEY} was not compared: its window is short for the counter",)


def test_peak_memory(tmp_path):
    old = write_run(tmp_path / "old", rows(), peak_memory=10 * 2**30)
    same = write_run(tmp_path / "same", rows(), peak_memory=10 * 2**30 + 1000)
    more = write_run(tmp_path / "more", rows(), peak_memory=12 * 2**30)
    assert states(old, same)[0]["decode-s8", "peak memory"] == "pass"
    found, result = states(old, more)
    assert found["decode-s8", "peak memory"] == "regression" and result.exit_code == 1
    assert ("decode-s8", "peak memory") not in states(write_run(tmp_path / "unknown", rows()), more)[0]


@pytest.mark.parametrize("field", ["streams", "context_tokens", "output_tokens"])
def test_other_settings_do_not_compare(base, tmp_path, field):
    found, result = states(base, write_run(tmp_path / "head", rows(**{field: 7})))
    assert found == {("decode-s8", "cell"): "invalid"} and "different settings" in result.rows[0].reason


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (
            {"gpus": ["NVIDIA GeForce RTX 5090"]},
            "different GPUs: base 1 x NVIDIA H200, head 1 x NVIDIA GeForce RTX 5090",
        ),
        ({"gpus": [H200, H200]}, "different GPUs: base 1 x NVIDIA H200, head 2 x NVIDIA H200"),
        ({"gpus": []}, "head 1 x CPU of unknown name"),
        ({"device": "cpu", "cpu": "Some Xeon"}, "head 1 x CPU Some Xeon"),
        ({"scenario_hash": "def"}, "different scenarios: quick"),
    ],
)
def test_what_is_refused(base, tmp_path, shape, why):
    with pytest.raises(UserError, match=why):
        states(base, write_run(tmp_path / "head", rows(), **shape))


def test_gpus_that_the_run_did_not_use_do_not_matter(base, tmp_path):
    assert states(base, write_run(tmp_path / "head", rows(), gpus=[H200] * 8, devices_used=1))[1].exit_code == 0


def test_other_models_are_refused(base, tmp_path):
    with pytest.raises(UserError, match="no cell in common"):
        states(base, write_run(tmp_path / "head", rows(model="Other")))


@pytest.mark.parametrize("status", ["partial", "failed", None])
def test_unfinished_run_is_refused(tmp_path, status):
    with pytest.raises(UserError, match="not complete"):
        load_run(write_run(tmp_path / "head", rows(), status=status))


def spoil(file: str, data: bytes | None):
    def apply(run: Path) -> None:
        (run / file).unlink()
        if data is not None:
            (run / file).write_bytes(data)

    return apply


HEADER = (",".join(CELL_COLUMNS) + "\n").encode()


@pytest.mark.parametrize(
    ("file", "data", "why"),
    [
        ("run.json", None, "cannot be read"),
        ("run.json", b"", "not valid JSON"),
        ("run.json", b"[]", "not a JSON object"),
        ("run.json", b'{"status": "complete", "gpus": []}', "does not say which scenario"),
        ("run.json", b'{"status": "complete", "scenarios": [{"name": "quick"}]}', "a file of it cannot be understood"),
        ("cells.csv", None, "cannot be read"),
        ("cells.csv", b"", "lacks the columns"),
        ("cells.csv", b"scenario,variant\nquick,best\n", "lacks the columns model"),
        ("cells.csv", HEADER, "has no cells"),
        ("cells.csv", HEADER + b"quick,best\n", "line 2 cannot be understood"),
        ("cells.csv", b"\xff\xfe\x00", "cannot be read"),
        ("requests.jsonl", b'{"scenario": "qu', "requests.jsonl: cannot be understood"),
        ("requests.jsonl", b"{}\n", "cannot be understood"),
    ],
)
def test_broken_files_are_one_clear_line(tmp_path, file, data, why):
    run = write_run(tmp_path / "run", rows())
    spoil(file, data)(run)
    with pytest.raises(UserError, match=why) as caught:
        load_run(run)
    assert "\n" not in str(caught.value) and str(run) in str(caught.value)


def test_truncated_gzip_is_refused(tmp_path):
    run = write_run(tmp_path / "run", rows(), zipped=True)
    file = run / "requests.jsonl.gz"
    file.write_bytes(gzip.compress(b"{}\n" * 1000)[:-20])
    with pytest.raises(UserError, match=r"requests.jsonl.gz: cannot be understood"):
        load_run(run)


def test_repetition_that_stands_twice_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"repetition 0 of quick best Llama-3\.2-1B decode-s8 stands there twice"):
        load_run(write_run(tmp_path / "run", [cell_row(), cell_row()]))


def test_text_in_a_number_is_refused(tmp_path):
    with pytest.raises(UserError, match="line 2 cannot be understood"):
        load_run(write_run(tmp_path / "run", [cell_row(decode_tok_s="fast")]))


def test_folder_that_is_not_there():
    with pytest.raises(UserError, match="no such run folder"):
        load_run(Path("/nonexistent/run"))


def test_run_without_requests_says_so(base, tmp_path):
    head = write_run(tmp_path / "head", rows())
    (head / "requests.jsonl").unlink()
    found, result = states(base, head)
    assert ("decode-s8", "token counts") not in found
    assert result.notes == ("token counts were not compared: no requests.jsonl in head",)


def test_figures_are_medians_over_repetitions(base, tmp_path):
    _, result = states(base, write_run(tmp_path / "head", rows(500.0)))
    row = next(r for r in result.rows if r.check == "decode_tok_s")
    assert (row.base, row.head) == (1002.0, 501.0) and row.worsening == pytest.approx(math.log(2))


def test_columns_are_those_of_the_records():
    assert set(cell_row()) <= set(CELL_COLUMNS)
    assert csv.DictReader([",".join(CELL_COLUMNS)]).fieldnames == list(CELL_COLUMNS)
