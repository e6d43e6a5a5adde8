"""A check's outcome in words: a table on the terminal, Markdown for a pull request, JUnit XML."""

from __future__ import annotations

import math
from collections.abc import Iterable
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table
from rich.text import Text

from arkbench.gate import METRICS, CellKey, GateResult, Row

MARKER = "<!-- arkbench check -->"
"""First line of the Markdown: a workflow finds its earlier comment by it."""
ORDER = ("regression", "invalid", "inconclusive", "pass")
STYLE = {"pass": "green", "regression": "bold red", "inconclusive": "yellow", "invalid": "magenta"}
UNITS = {
    "decode_tok_s": "tok/s", "prefill_tok_s": "tok/s", "tpot_p50_s": "s", "ttft_p50_s": "s",
    "wh_per_1k_tokens": "Wh/1k",
}  # fmt: skip
HEADER = ("cell", "check", "base", "head", "change", "floor", "p", "pairs", "state")
RISES = {m.column: m.higher_is_better for m in METRICS}


def headline(result: GateResult) -> str:
    """One line: the state and how many of each."""
    if result.problem:
        return f"{result.state}: {result.problem}"
    counted = ", ".join(f"{result.counts[s]} {s}" for s in ORDER if result.counts[s])
    return f"{result.state}: {counted or 'nothing was compared'}"


def worst_first(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda r: (ORDER.index(r.state), -(r.worsening or 0.0)))


def cells_of(row: Row) -> tuple[str, ...]:
    """The table's fields of a row; what is not known is empty."""
    unit = UNITS.get(row.check, "")
    return (
        str(row.cell),
        row.check,
        _figure(row.base, unit),
        _figure(row.head, unit),
        _change(row),
        f"{row.floor:.1%}" if row.floor is not None else "",
        _p(row.p_value),
        str(row.pairs) if row.pairs else "",
        row.state + (f": {row.reason}" if row.reason else ""),
    )


def _figure(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.4g} {unit}".strip()


def _change(row: Row) -> str:
    """The figure's own change with its sign, and whether that is better or worse."""
    if row.worsening is None:
        return ""
    change = math.expm1(-row.worsening if RISES.get(row.check) else row.worsening)
    word = "worse" if row.worsening > 0 else "better"
    return f"{change:+.1%} {word}" if abs(change) >= 0.0005 else "0.0%"


def _p(value: float | None) -> str:
    if value is None:
        return ""
    return "<0.0001" if value < 0.0001 else f"{value:.4f}"


def short_names(cells: Iterable[CellKey]) -> dict[CellKey, str]:
    """Names of cells without the parts that are the same for all of them; the cell's own name always stands."""
    known = list(dict.fromkeys(cells))
    vary = [i for i in range(3) if len({key[i] for key in known}) > 1]
    return {key: " ".join(key[i] for i in (*vary, 3)) for key in known}


def print_table(result: GateResult, console: Console) -> None:
    """A table that fits a narrow terminal: what all cells share stands in no row, reasons stand below it."""
    names = short_names(row.cell for row in result.rows)
    rows = worst_first(result.rows)
    shown = HEADER[1:-1] if console.width >= 110 else HEADER[1:-3]
    table = Table(title=result.title, title_justify="left", padding=(0, 1) if console.width >= 110 else (0, 0))
    table.add_column("state", no_wrap=True)
    table.add_column("cell", overflow="fold")
    for name in shown:
        table.add_column(name, no_wrap=True, justify="left" if name == "check" else "right")
    for row in rows:
        fields = dict(zip(HEADER, cells_of(row), strict=True))
        plain = [names[row.cell], *(fields[name] for name in shown)]
        table.add_row(Text(row.state, style=STYLE[row.state]), *map(Text, plain))
    if rows:
        console.print(table)
    reasons = [f"{row.state}: {names[row.cell]}, {row.check}: {row.reason}" for row in rows if row.reason]
    for line in (*reasons, *(f"note: {note}" for note in result.notes)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(headline(result), style=STYLE[result.state], markup=False, highlight=False, soft_wrap=True)


def markdown(result: GateResult) -> str:
    """Markdown that GitHub renders; cells that passed are folded away."""
    lines = [MARKER, f"### arkbench check: {headline(result)}", "", _escape(result.title), ""]
    worse = [r for r in worst_first(result.rows) if r.state != "pass"]
    passed = [r for r in worst_first(result.rows) if r.state == "pass"]
    lines += _markdown_table(worse)
    if passed:
        lines += ["<details><summary>", f"{len(passed)} passed", "</summary>", "", *_markdown_table(passed)]
        lines += ["</details>", ""]
    lines += [f"- {_escape(note)}" for note in result.notes]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_table(rows: Iterable[Row]) -> list[str]:
    body = ["| " + " | ".join(_escape(f) for f in cells_of(row)) + " |" for row in rows]
    if not body:
        return []
    return ["| " + " | ".join(HEADER) + " |", "|" + " --- |" * len(HEADER), *body, ""]


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def junit(result: GateResult) -> str:
    """JUnit XML: a regression is a failure, an invalid cell an error, an inconclusive one skipped with its reason."""
    rows = worst_first(result.rows)
    suite = ElementTree.Element(
        "testsuite",
        name="arkbench check",
        tests=str(len(rows) or 1),
        failures=str(result.counts["regression"]),
        errors=str(result.counts["invalid"] if rows else 1),
        skipped=str(result.counts["inconclusive"]),
    )
    for row in rows:
        case = ElementTree.SubElement(suite, "testcase", classname=".".join(row.cell), name=row.check)
        kind = {"regression": "failure", "invalid": "error", "inconclusive": "skipped"}.get(row.state)
        if kind:
            message = " ".join(f for f in cells_of(row)[2:] if f)
            ElementTree.SubElement(case, kind, message=_xml(message))
    if not rows:
        case = ElementTree.SubElement(suite, "testcase", classname="arkbench", name="check")
        ElementTree.SubElement(case, "error", message=_xml(result.problem or "nothing was compared"))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _xml(text: str) -> str:
    """Without the control characters that XML cannot hold."""
    return "".join(c if c >= " " or c in "\t\n" else " " for c in text)
