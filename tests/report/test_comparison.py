"""Two runs side by side on the terminal."""

from pathlib import Path

from rich.console import Console

from arkbench import comparison
from tests.report import factory


def printed(a: Path, b: Path) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        comparison.show(a, b, console)
    return captured.get()


def lines(a: Path, b: Path) -> list[list[str]]:
    return [[part.strip() for part in line.split("│")[1:-1]] for line in printed(a, b).splitlines() if "│" in line]


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


def test_answers_of_other_lengths_are_named(tmp_path: Path) -> None:
    def run(name: str, tokens: int) -> Path:
        cells = [
            factory.decode("quick", "fused", "m", 1, 100.0, 0.2, output_tokens=tokens),
            factory.decode("quick", "fused", "m", 8, 400.0, 0.2, output_tokens=24),
        ]
        return factory.write_run(tmp_path / name, cells)

    a, b = run("a", 24), run("b", 8)
    assert "not alike: answers of 24 tokens in A and of 8 in B: decode-s1-c1000\n" in printed(a, b)
    assert "not alike" not in printed(a, a)
