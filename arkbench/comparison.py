"""`arkbench compare`: two runs side by side on the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from arkbench.commands import refresh
from arkbench.records import number, read_rows, read_run

FIGURES = (
    ("decode_tok_s", "decode, tok/s"),
    ("prefill_tok_s", "prefill, tok/s"),
    ("ttft_p50_s", "first token, s"),
    ("tpot_p50_s", "a token, s"),
    ("wh_per_1k_tokens", "Wh per 1,000 tokens"),
)
Key = tuple[str, str, str, str]


def show(first: Path, second: Path, console: Console) -> None:
    """Prints a line for each cell and figure that either run has; a cell of one run only has a gap."""
    sides = [_summary(path) for path in (first, second)]
    for side, path in (("A", first), ("B", second)):
        console.print(f"{side}: {escape(str(path))}", highlight=False, soft_wrap=True)
    table = Table(caption="medians (spread of the repetitions); !: not valid", caption_justify="left")
    for name in ("model", "variant", "cell", "figure"):
        table.add_column(name, overflow="fold")
    for name in ("A", "B", "B / A"):
        table.add_column(name, justify="right")
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        rows = [side.get(key) for side in sides]
        for column, title in FIGURES:
            a, b = (_value(row, column) for row in rows)
            if a is None and b is None:
                continue
            ratio = f"{b / a:.3f}" if a and b is not None else ""
            table.add_row(key[1], key[2], key[3], title, *(_shown(row, column) for row in rows), ratio)
    console.print(table)
    _print_lengths(*sides, console)


def _print_lengths(a: dict[Key, dict[str, str]], b: dict[Key, dict[str, str]], console: Console) -> None:
    """A line for each pair of answer lengths that differ: a cell's name does not tell."""
    cells: dict[tuple[str, str], list[str]] = {}
    for key in a.keys() & b.keys():
        lengths = (a[key]["output_tokens"], b[key]["output_tokens"])
        if lengths[0] != lengths[1]:
            cells.setdefault(lengths, []).append(key[3])
    for (length_a, length_b), names in cells.items():
        where = ", ".join(sorted(set(names)))
        console.print(
            f"[yellow]not alike:[/] answers of {length_a} tokens in A and of {length_b} in B: {escape(where)}",
            highlight=False,
            soft_wrap=True,
        )


def _summary(path: Path) -> dict[Key, dict[str, str]]:
    read_run(path)
    refresh(path)
    rows = read_rows(path / "summary.csv")
    return {(row["scenario"], row["model"], row["variant"], row["cell"]): row for row in rows}


def _value(row: dict[str, str] | None, column: str) -> float | None:
    return None if row is None else number(row[column])


def _shown(row: dict[str, str] | None, column: str) -> str:
    value = _value(row, column)
    if row is None or value is None:
        return ""
    spread = number(row[f"{column}_spread"])
    return f"{value:,.4g}" + ("" if spread is None else f" ({spread:.1%})") + ("" if row["valid"] == "true" else " !")
