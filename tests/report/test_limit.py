"""Figures above what the hardware was measured to allow."""

from __future__ import annotations

from pathlib import Path

from tests.report import factory
from tests.report.test_tables import report_of, table


def test_a_figure_above_its_limit_is_marked(tmp_path: Path) -> None:
    shares = (("standard", 1, 0.4), ("standard", 8, 0.9), ("fused", 1, 0.5), ("fused", 8, 1.04))
    cells = [factory.decode("fused-kernels", v, "Qwen3-8B", streams, 90.0, share) for v, streams, share in shares]
    report = report_of(factory.write_run(tmp_path / "a", cells, repetitions=1))
    remark = "above the measured limit: the limit was measured too low"
    assert table(report, "marked").rows == [["decode-s8-c1000", "fused", "Qwen3-8B", "fused-kernels", remark, 1]]
    marks = {(row[1], row[2]): row[3].mark for row in table(report, "limit").rows}
    assert marks == {
        ("decode-s1-c1000", "standard"): "", ("decode-s8-c1000", "standard"): "", ("decode-s1-c1000", "fused"): "",
        ("decode-s8-c1000", "fused"): remark,
    }  # fmt: skip
    section = next(section for section in report.sections if section.key == "limit")
    assert section.blocks[0].text.startswith("The nearest to its limit: 90 % (Qwen3-8B, standard, 8 streams, 1,000")
    assert section.blocks[0].text.endswith(f" Marked (!), 1 of 4: {remark}.")
    assert list(section.blocks[1].panels[0].groups) == ["1 stream", "8 streams (!)"]
