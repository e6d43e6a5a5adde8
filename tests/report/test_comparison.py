"""Two runs side by side on the terminal."""

from pathlib import Path

from rich.console import Console

from arkbench import comparison
from tests.report import factory


def lines(a: Path, b: Path) -> list[list[str]]:
    console = Console(width=200)
    with console.capture() as captured:
        comparison.show(a, b, console)
    return [[part.strip() for part in line.split("│")[1:-1]] for line in captured.get().splitlines() if "│" in line]


def test_each_cell_stands_with_its_ratio(tmp_path: Path) -> None:
    a = factory.fused_kernels(tmp_path / "a")
    b = factory.fused_kernels(tmp_path / "b", speed=1.1)
    rows = lines(a, b)
    assert [
        "Qwen3.8-27B",
        "fused",
        "decode-s16-c1000",
        "decode, tok/s",
        "1,704 (2.1%)",
        "1,874 (2.1%)",
        "1.100",
    ] in rows


def test_a_cell_of_one_run_only_has_a_gap(tmp_path: Path) -> None:
    a = factory.fused_kernels(tmp_path / "a")
    extra = factory.decode("fused-kernels", "fused", "Qwen3.8-27B", 128, 9000.0, 0.2)
    b = factory.write_run(tmp_path / "b", [extra])
    row = next(row for row in lines(a, b) if row[2:4] == ["decode-s128-c1000", "decode, tok/s"])
    assert row[4:] == ["", "9,000 (2.1%)", ""]
