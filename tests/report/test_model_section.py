from __future__ import annotations

from pathlib import Path

import pytest

from arkbench.report import build, data
from arkbench.report.blocks import Counts, Details, Table
from arkbench.report.charts import Bars, Lines
from tests.report import factory

NAMES = ("Llama-3.2-1B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Qwen3.6-35B-A3B")


def section_of(folder: Path, names: tuple[str, ...], variants: tuple[str, ...] = ("best",)) -> list:
    cells = [
        cell
        for index, name in enumerate(names)
        for variant in variants
        for cell in (
            factory.decode("models", variant, name, 1, 100.0 + index, 0.5, context_tokens=128),
            factory.decode("models", variant, name, 64, 3000.0 + index, 0.25, context_tokens=128),
            factory.prefill("models", variant, name, 2048, 9000.0 + index, limit_fraction=0.75),
        )
    ]
    starts = {f"{name} {variant}": {"graphs": 2.0, "total": 2.5} for name in names for variant in variants}
    report = build.build(data.load([factory.write_run(folder, cells, start_seconds=starts)]))
    return next(section for section in report.sections if section.key == "scenario-models").blocks


def test_many_models_have_a_row_and_a_group_of_bars_each(tmp_path: Path) -> None:
    blocks = section_of(tmp_path / "a", NAMES)
    table = next(block for block in blocks if isinstance(block, Table))
    assert [column.name for column in table.columns] == ["model", "1 stream", "64 streams", "prompt of 2,048", "start"]
    assert [row[0] for row in table.rows] == list(NAMES)
    assert [(figure.value, figure.limit) for figure in table.rows[1][1:4]] == [
        (101.0, pytest.approx(0.5)), (3001.0, pytest.approx(0.25)), (9001.0, pytest.approx(0.75)),
    ]  # fmt: skip
    assert table.rows[1][4] == 2.5
    chart = next(block for block in blocks if isinstance(block, Bars) and block.key == "models-models")
    assert chart.panels[0].groups == list(NAMES)
    assert [series.values[0] for series in chart.panels[0].series] == pytest.approx([0.5, 0.25, 0.75])
    assert not any(isinstance(block, Lines) for block in blocks)
    assert isinstance(blocks[-1], Details)


def test_several_variants_have_a_row_each(tmp_path: Path) -> None:
    blocks = section_of(tmp_path / "a", NAMES, ("plain", "other"))
    table = next(block for block in blocks if isinstance(block, Table))
    assert [row[:2] for row in table.rows[:2]] == [["Llama-3.2-1B", "plain"], ["Llama-3.2-1B", "other"]]


def test_few_models_keep_their_columns(tmp_path: Path) -> None:
    tables = [block for block in section_of(tmp_path / "a", NAMES[:2]) if isinstance(block, Table)]
    assert "models-models" not in [table.key for table in tables]


def test_a_run_that_tests_no_claim_counts_none(tmp_path: Path) -> None:
    folder = factory.write_run(tmp_path / "a", [factory.decode("mine", "best", "Qwen3-8B", 1, 100.0, 0.5)])
    verdicts = next(s for s in build.build(data.load([folder])).sections if s.key == "verdicts")
    assert not any(isinstance(block, Counts) for block in verdicts.blocks)
    assert [type(block) for block in verdicts.blocks] == [Details]
