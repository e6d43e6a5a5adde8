from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pandas as pd
import pytest

from arkbench.report import build, data, published
from arkbench.report.blocks import Column, Paragraph, Report, Table
from arkbench.report.figures import Figure, show
from arkbench.report.scenario_section import net_energy
from tests.report import factory


def report_of(*folders: Path) -> Report:
    return build.build(data.load(folders))


def table(report: Report, key: str) -> Table:
    return next(table for table in report.tables() if table.key == key)


def test_fused_decode_has_the_notes_rows_beside_the_measured_ones(tmp_path: Path) -> None:
    rows = table(report_of(factory.fused_kernels(tmp_path / "a")), "fused-kernels-decode").rows
    assert [row[0] for row in rows] == [1, 8, 16, 64]
    assert [(row[1].value, row[2].value) for row in rows] == [(47, 45), (206, 312), (234, 611), (739, 1677)]
    assert [(row[4].value, row[5].value) for row in rows] == [(118, 121), (540, 905), (690, 1704), (2300, 5310)]
    assert rows[2][3] == pytest.approx(611 / 234)
    assert rows[2][6] == pytest.approx(1704 / 690)
    assert rows[2][5].spread == pytest.approx(0.021)
    assert rows[2][5].limit == pytest.approx(0.37)


def test_published_figures_carry_their_own_fraction_of_the_limit() -> None:
    # 1,792 GB/s over 13,216,611,328 bytes is 135.587 steps a second: 45 tokens a second of one stream are 33.19 %.
    assert published.published_limit_fraction("Qwen3.8-27B", 45, 1) == (pytest.approx(0.331891, rel=1e-4), False)
    assert published.published_limit_fraction("Qwen3.8-27B", 1677, 64)[0] == pytest.approx(0.193257, rel=1e-4)
    fraction, floor = published.published_limit_fraction("Qwen3.6-35B-A3B", 2687, 64)
    assert fraction == pytest.approx(2687 / 64 * 1520974336 / 1792e9)
    assert floor
    assert published.published_limit_fraction("Qwen3.6-35B", 87, 1)[1] is False
    assert published.published_limit_fraction("no such model", 87, 1) == (None, False)
    assert published.published_limit_fraction("Qwen3-8B", None, 1) == (None, False)


def test_published_figures_stand_under_the_gpus_that_they_were_measured_on(tmp_path: Path) -> None:
    one, four = report_of(factory.fused_kernels(tmp_path / "a")), report_of(factory.pipelined_prefill(tmp_path / "b"))
    loops = report_of(factory.inverted_loops(tmp_path / "c"))
    assert table(one, "fused-kernels-decode").columns[1].group == "published (RTX 5090, Qwen3.8-27B)"
    assert table(four, "pipelined-prefill").columns[2].group == "published (4 × RTX 5090, Qwen3.5-122B-A10B)"
    assert table(four, "pipelined-prefill-in-time").columns[2].group == "published (4 × RTX 5090)"
    assert table(loops, "inverted-loops").columns[1].group == "published (4 × RTX 5090)"
    assert table(one, "limit").columns[6].full_name == "published, RTX 5090: rate (tok/s)"
    assert table(loops, "limit").columns[6].full_name == "published, 4 × RTX 5090: rate (tok/s)"


def test_published_gains_are_shown_as_they_were_printed(tmp_path: Path) -> None:
    """Of 6,298 to 8,156 the note prints 1.29, of 118.3 to 172.5 it prints 1.46, of 3,354 to 3,633 it prints 8 %."""
    prefill = table(report_of(factory.pipelined_prefill(tmp_path / "a")), "pipelined-prefill")
    gains = [row[4] for row in prefill.rows if row[0] == 4000]
    assert [show(gain, prefill.columns[4].kind) for gain in gains] == [
        "1.29×", "1.48×", "1.39×", "1.23×", "1.20×", "1.16×", "1.14×",
    ]  # fmt: skip
    assert gains[0] == 1.29
    releases = table(report_of(factory.decode_batching(tmp_path / "b")), "decode-batching-releases")
    assert [show(row[3], "ratio") for row in releases.rows[4:7]] == ["11.4×", "9.9×", "9.5×"]
    reading = table(report_of(factory.fused_kernels(tmp_path / "c")), "fused-kernels-prefill")
    assert [show(row[3], "change") for row in reading.rows] == ["+45 %", "+14 %", "+8 %", "+2 %"]
    assert show(prefill.rows[0][7], "ratio") == "1.30×", "what is measured is computed"


def test_prompt_reading_is_compared_in_percent(tmp_path: Path) -> None:
    rows = table(report_of(factory.fused_kernels(tmp_path / "a")), "fused-kernels-prefill").rows
    assert [row[0] for row in rows] == [256, 1024, 2048, 8192]
    assert rows[0][3] == 45
    assert rows[0][6] == pytest.approx(100 * (9000 / 6100 - 1))


def test_loops_leave_out_the_row_of_a_model_that_was_not_measured(tmp_path: Path) -> None:
    report = report_of(factory.inverted_loops(tmp_path / "a"))
    rows = table(report, "inverted-loops").rows
    models = list(published.table("inverted_loops.csv")["model"])
    assert [row[0] for row in rows] == [model for model in models if model != "GLM-4.7-Flash"]
    assert Paragraph("1 of 16 published rows were not measured and are left out.") in report.walk()
    by_model = {row[0]: row for row in rows}
    # Measured under its other name; the cell of 64 streams is no row of the table.
    assert by_model["Qwen3.6-35B"][4].value == pytest.approx(65.7 * 1.9)
    assert by_model["Qwen3-8B"][4].value == pytest.approx(118.3 * 1.9)


def test_releases_compare_12_streams_with_64_and_10_where_the_note_does(tmp_path: Path) -> None:
    report = report_of(factory.decode_batching(tmp_path / "a"))
    rows = {row[0]: row for row in table(report, "decode-batching-releases").rows}
    assert len(rows) == 15
    assert rows["Qwen3.5-4B"][4].value == pytest.approx(306 * 2.4)
    assert rows["Qwen3.6-35B"][5].value == pytest.approx(2687 * 2.4)
    energy = {row[0]: row for row in table(report, "decode-batching-releases-energy").rows}
    assert energy["Llama-3.3-70B"][3] == pytest.approx(100 * (0.34 / 4.78 - 1))
    assert energy["Llama-3.3-70B"][4].value == pytest.approx(4.78 * 0.6)


def test_scaling_prints_the_published_definition_of_the_total_too(tmp_path: Path) -> None:
    scaling = table(report_of(factory.decode_batching(tmp_path / "a")), "decode-batching-scaling")
    rows = {(row[0], row[1]): row for row in scaling.rows}
    assert len(rows) == 16
    assert rows[4000, 64][2] == 20.9 and rows[4000, 64][3].value == 1341
    assert rows[4000, 32][3].value is None and rows[1000, 64][2] is None
    assert rows[4000, 64][6] == pytest.approx(3500)
    assert scaling.columns[6].full_name.endswith("per stream × streams (tok/s)")


def test_bursts_and_the_90_seconds(tmp_path: Path) -> None:
    report = report_of(factory.pipelined_prefill(tmp_path / "a"))
    rows = {(row[0], row[1]): row for row in table(report, "pipelined-prefill").rows}
    assert rows[16000, 32][2].value == 9980 and rows[16000, 32][6].value == pytest.approx(15607 * 1.3)
    assert rows[64000, 16][2].value is None and rows[64000, 16][5].value is None
    first = {(row[0], row[1]): row for row in table(report, "pipelined-prefill-slowest-first-token").rows}
    assert first[64000, 1][4] == pytest.approx(8.4 / 4.7)
    in_time = {(row[0], row[1]): row for row in table(report, "pipelined-prefill-in-time").rows}
    assert in_time[16000, 64][2:] == ["50 of 192", "191 of 192", 1, "60 of 192", "192 of 192", 0]
    assert in_time[64000, 16][5:] == ["0 of 48", "15 of 48", 0]


def test_a_small_run_of_bursts_shows_what_it_measured(tmp_path: Path) -> None:
    """Of 17 published bursts two, none of the two at the limit, and one of 250 tokens that was not published."""
    cells = [
        factory._burst("pipelined-prefill", variant, "Qwen3-8B", tokens, at_once, rate, 0.7)
        for variant in ("ark-2.0", "ark-2.1")
        for tokens, at_once, rate in ((4000, 1, 9000.0), (4000, 4, 9500.0), (64000, 1, ""), (250, 2, 700.0))
    ]
    report = report_of(factory.write_run(tmp_path / "a", cells))
    rates = table(report, "pipelined-prefill")
    assert [row[:2] for row in rates.rows] == [[4000, 1], [4000, 4], [64000, 1], [250, 2]]
    left_out = [block.text for block in report.walk() if isinstance(block, Paragraph) and "left out" in block.text]
    assert left_out == ["14 of 17 published rows were not measured and are left out."]
    chart = next(chart for chart in report.charts() if chart.key == "pipelined-prefill")
    assert [(panel.title, list(panel.groups)) for panel in chart.panels] == [
        ("4,000 tokens · Published", ["1", "4"]), ("4,000 tokens · Measured", ["1", "4"]),
        ("250 tokens · Measured", ["2"]),
    ]  # fmt: skip


def test_invalid_missing_and_partial_cells_are_listed_with_their_reasons(tmp_path: Path) -> None:
    report = report_of(factory.with_gaps(tmp_path / "a"))
    rows = {(row[0], row[1], row[4]): row[5] for row in table(report, "marked").rows}
    assert rows["decode-s8-c1000", "standard", "GPU throttled: power cap"] == 3
    assert rows["decode-s16-c1000", "standard", "out of memory"] == 3
    assert rows["decode-s16-c1000", "standard", "48 requests failed"] is None
    assert rows["decode-s16-c1000", "fused", "3 requests without a first token in time"] is None
    assert rows["prefill-p256", "standard", "1 of 3 repetitions missing"] == 1
    decode = {row[0]: row for row in table(report, "fused-kernels-decode").rows}
    assert decode[8][4].mark == "GPU throttled: power cap" and decode[8][4].value == 500
    assert decode[16][4].value is None and decode[16][4].mark == "out of memory"
    assert decode[8][5].value is None, "NaN is no figure"
    assert set(decode) == {1, 8, 16}, "a row of the note that was not run is counted, not shown"
    assert Paragraph("1 of 4 published rows were not measured and are left out.") in report.walk()
    assert report.warning.startswith("This run is partial")


def test_the_lead_and_the_counts(tmp_path: Path) -> None:
    report = report_of(factory.fused_kernels(tmp_path / "a"))
    assert report.lead == (
        "6 of 7 comparable claims hold here (2 exceeded), 1 does not, 1 cannot be compared, 30 were not run."
    )
    verdicts = report.sections[0].blocks[0]
    assert list(verdicts.items) == [
        ("exceeded", 2), ("reproduced", 4), ("not reproduced", 1), ("not comparable", 1), ("not run", 30),
    ]  # fmt: skip
    row = next(row for row in table(report, "verdicts").rows if row[0].startswith("Fused over standard decode"))
    assert row[1:5] == ["1.5×", "1.68×", 0.02, "exceeded"]
    assert [len(t.rows) for t in report.tables() if t.key in ("verdicts", "claims-not-run")] == [8, 30]


def test_the_lead_where_nothing_compares(tmp_path: Path) -> None:
    claims = factory.claims({"fused-decode-8": (3.1, 0.1, "not comparable", "measured on a CPU")})
    cells = [factory.decode("quick", "fused", "SmolLM2-135M", 8, 37.0, 0.1)]
    report = report_of(factory.write_run(tmp_path / "a", cells, claims, gpus=[]))
    assert report.title == "ARK's published claims, measured on CPU"
    assert report.lead == "Measured here: 1 of the 38 published claims; none can be compared with its figure."


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    a = factory.fused_kernels(tmp_path / "a")
    b = factory.fused_kernels(tmp_path / "b", speed=0.4, gpus=["NVIDIA GeForce RTX 5090"])
    report = report_of(a, b)
    decode = table(report, "fused-kernels-decode")
    assert [column.group for column in decode.columns[4::3]] == [
        "measured (Qwen3.8-27B, H200)", "measured (Qwen3.8-27B, GeForce RTX 5090)",
    ]  # fmt: skip
    assert decode.rows[3][5].value == 5310 and decode.rows[3][8].value == pytest.approx(5310 * 0.4)
    verdicts = table(report, "verdicts")
    assert len(verdicts.rows) == 16 and {row[2] for row in verdicts.rows} == {"H200", "GeForce RTX 5090"}


def test_runs_that_test_different_claims_add_up(tmp_path: Path) -> None:
    runs = data.load([factory.fused_kernels(tmp_path / "a"), factory.inverted_loops(tmp_path / "b")])
    assert len({run.label for run in runs}) == 2
    report = build.build(runs)
    assert report.lead.startswith("8 of 9 comparable claims hold here (3 exceeded)")
    assert len(table(report, "claims-not-run").rows) == 28


@pytest.mark.parametrize(
    ("device", "used", "gpus", "hardware"),
    [
        ("cuda", 1, ["NVIDIA H200"] * 8, "H200"),
        ("cuda", 2, ["NVIDIA H200"] * 8, "2 × H200"),
        ("cpu", None, ["NVIDIA H200"], "CPU"),
        ("cpu", None, [], "CPU"),
        ("endpoint", None, ["NVIDIA H200"], "an endpoint"),
        ("endpoint", None, [], "an endpoint"),
    ],
)
def test_hardware_is_what_the_engine_ran_on(
    device: str, used: int | None, gpus: list[str], hardware: str, tmp_path: Path
) -> None:
    meta = {"device": device, "devices_used": used, "gpus": [{"name": name} for name in gpus]}
    (run,) = data.load([factory.write_run(tmp_path / "a", [], **meta)])
    assert run.hardware == hardware


def test_runs_that_nothing_tells_apart_get_their_folders_names(tmp_path: Path) -> None:
    runs = data.load([factory.fused_kernels(tmp_path / name) for name in ("one", "two")])
    assert [run.label for run in runs] == ["H200 · one", "H200 · two"]


def test_different_answers_are_listed(tmp_path: Path) -> None:
    different = {"cell": "decode-s1-c1000", "repetition": 0, "variants": ["driven", "inverted"], "switches": ["loop"]}
    answers = {"compared": 9, "identical": 8, "different": [different | {"fault": True}]}
    report = report_of(factory.fused_kernels(tmp_path / "a", answers=answers))
    rounding = {"compared": 2, "identical": 1, "different": [different | {"switches": ["kernels"], "fault": False}]}
    bounded = report_of(factory.fused_kernels(tmp_path / "b", answers=rounding))
    assert "identical in 1, and 1 differ in switches that may round differently (kernels)." in str(bounded.sections[0])
    tie = {"compared": 1, "identical": 0, "different": [different | {"fault": False, "near_tie": True, "gap": 0.01}]}
    tied = " ".join(str(section) for section in report_of(factory.fused_kernels(tmp_path / "c", answers=tie)).sections)
    assert "identical in 0, and 1 part where two tokens are all but equal." in tied
    assert "(switches: loop; no fault: they part where two tokens are all but equal, and rounding decides)" in tied
    text = " ".join(str(block) for section in report.sections for block in section.blocks)
    assert "compared 9 times; the tokens were identical in 8" in text
    assert "driven and inverted gave different tokens (switches: loop; a fault: these switches must not" in text
    assert "change a token) in decode-s1-c1000, repetition 0." in text


def test_different_answers_of_one_pair_are_one_line(tmp_path: Path) -> None:
    places = [
        ("decode-s1-c64", 0, "ab"),
        ("decode-s1-c64", 1, "ba"),
        ("prefill-p256", 1, "ab"),
        ("prefill-p256", 1, "ac"),
    ]
    different = [
        {"cell": cell, "repetition": repetition, "variants": list(pair), "switches": ["kernels"], "fault": False}
        for cell, repetition, pair in places
    ]
    report = report_of(factory.fused_kernels(tmp_path / "a", answers={"compared": 4, "different": different}))
    lines = [line for line in report.sections[-1].blocks[0].items if "different tokens" in line]
    rounds = "gave different tokens (switches: kernels; these switches may round) in"
    assert lines == [
        f"H200: a and b {rounds} decode-s1-c64, repetition 0, 1; prefill-p256, repetition 1.",
        f"H200: a and c {rounds} prefill-p256, repetition 1.",
    ]


def test_geometry_counts_the_layers_of_a_kind(tmp_path: Path) -> None:
    layers = [{"mixer": {"kind_of": "DeltaNet", "conv": 4}}] * 3 + [{"mixer": {"kind_of": "Attention", "window": None}}]
    geometry = {"m": {"name": "m", "hidden": 64, "layers": layers, "eos_token_ids": []}, "served": None}
    report = report_of(factory.fused_kernels(tmp_path / "a", geometry=geometry))
    assert table(report, "geometry").rows == [
        ["m", "whole model", "hidden 64"],
        ["m", "3 of 4 layers", "mixer kind_of DeltaNet, conv 4"],
        ["m", "1 of 4 layers", "mixer kind_of Attention"],
    ]


def test_kernel_rows_are_medians(tmp_path: Path) -> None:
    rows = table(report_of(factory.kernels(tmp_path / "a")), "kernels-kernels-products").rows
    assert len(rows) == 13
    assert rows[0][:3] == ["standard", "5120x25600", 1] and rows[0][3] == pytest.approx(52.0)
    assert rows[-1] == ["tinygemm", "5120x25600", 1, None, None]


def test_without_a_summary_it_is_made_from_the_valid_repetitions(tmp_path: Path) -> None:
    folder = factory.fused_kernels(tmp_path / "a")
    (folder / "summary.csv").unlink()
    cells = pd.read_csv(folder / "cells.csv")
    fused = (cells["variant"] == "fused") & (cells["cell"] == "decode-s64-c1000")
    cells.loc[fused & (cells["repetition"] == 1), "valid"] = False
    cells.to_csv(folder / "cells.csv", index=False)
    run = data.load([folder])[0]
    row = run.summary[(run.summary["variant"] == "fused") & (run.summary["cell"] == "decode-s64-c1000")].iloc[0]
    assert row["decode_tok_s"] == pytest.approx(5310 * (1 + 0.991) / 2)
    assert row["decode_tok_s_spread"] == pytest.approx(0.009 / 0.9955)


def test_zipped_requests_are_read_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    folder = factory.with_gaps(tmp_path / "a")
    before = data.load([folder])[0].request_statuses
    text = (folder / "requests.jsonl").read_bytes()
    (folder / "requests.jsonl").unlink()
    (folder / "requests.jsonl.gz").write_bytes(gzip.compress(text))
    run = data.load([folder])[0]
    assert run.request_statuses == before and run.absent == []
    assert before["failed"] == 48 and before["refused"] == 6


def test_a_run_that_ended_before_anything_was_measured(tmp_path: Path) -> None:
    folder = factory.write_run(tmp_path / "a", [], without=("summary.csv", "verdicts.csv"), status="failed")
    report = report_of(folder)
    assert report.warning.startswith("This run is failed")
    assert report.lead == "No claim was tested."


def test_a_folder_that_is_no_run_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"not a run folder .*; name the folder of a run"):
        data.load([tmp_path])


def test_energy_stands_gross_and_net() -> None:
    # 500 W over 100 tokens a second are 5 J a token, 1.3889 Wh per 1,000; 72 W of them at rest are 0.2 Wh.
    row = {"workload": "decode", "wh_per_1k_tokens": 500 / 360, "idle_w": 72.0, "decode_tok_s": 100.0}
    assert net_energy(row) == pytest.approx(1.388889 - 0.2)
    assert net_energy(row | {"idle_w": None}) is None
    assert net_energy(row | {"workload": "prefill", "prefill_tok_s": 1000.0}) == pytest.approx(1.388889 - 0.02)


def test_csv_gives_asides_columns_of_their_own() -> None:
    columns = [Column("streams", "integer"), Column("rate", "number", "measured", "tok/s")]
    names, rows = Table("t", "", columns, [[1, Figure(5.0, 0.1, None, mark="hot")], [2, Figure(None)]]).flat()
    assert names == [
        "streams",
        "measured: rate (tok/s)",
        "measured: rate (tok/s): spread",
        "measured: rate (tok/s): mark",
    ]
    assert rows == [[1, 5.0, 0.1, "hot"], [2, None, None, ""]]


def test_csv_files_hold_every_table(rendered: dict[str, Path]) -> None:
    for folder in rendered.values():
        for shown in report_of(folder).tables():
            with (folder / "tables" / f"{shown.key}.csv").open(newline="", encoding="utf-8") as file:
                assert len(list(csv.reader(file))) == len(shown.rows) + 1
