"""The report as Markdown that renders on GitHub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from arkbench.report.blocks import (
    Block,
    Bullets,
    Column,
    Counts,
    Definitions,
    Details,
    Paragraph,
    Report,
    Section,
    Table,
)  # fmt: skip
from arkbench.report.charts import Bars, Chart, Lines, Timeline
from arkbench.report.figures import MISSING, Figure, asides, show, text

VERDICT_SIGNS = {
    "exceeded": "▲", "reproduced": "✔", "not reproduced": "✘", "not comparable": "≠", "not run": "○",
}  # fmt: skip


def render(report: Report) -> str:
    """One Markdown text; charts are read from `charts/` beside it."""
    parts = [f"# {escape(report.title)}", f"**{escape(report.lead)}**"]
    if report.warning:
        parts.append(f"> **{escape(report.warning)}**")
    parts.append(" · ".join(f"{escape(name)}: {escape(value)}" for name, value in report.facts))
    for section in report.sections:
        parts += _section(section)
    return "\n\n".join(parts) + "\n"


def _section(section: Section) -> list[str]:
    return [f"## {escape(section.title)}", *[_block(block) for block in section.blocks]]


def _block(block: Block) -> str:
    if isinstance(block, Table):
        return table(block)
    if isinstance(block, Bars | Lines | Timeline):
        return _chart(block)
    if isinstance(block, Paragraph):
        return block.text if block.text.startswith("```") else escape(block.text)
    if isinstance(block, Bullets):
        return "\n".join(f"- {escape(item)}" for item in block.items)
    if isinstance(block, Definitions):
        return "\n".join(f"- **{escape(term)}**: {escape(meaning)}" for term, meaning in block.items)
    if isinstance(block, Counts):
        return " · ".join(f"{VERDICT_SIGNS.get(name, '')} **{count}** {name}" for name, count in block.items)
    if isinstance(block, Details):
        inner = "\n\n".join(_block(part) for part in block.blocks)
        return f"<details><summary>{escape(block.summary)}</summary>\n\n{inner}\n\n</details>"
    raise TypeError(f"no Markdown for {type(block).__name__}")


def _chart(chart: Chart) -> str:
    alt = re.sub(r"\s+", " ", chart.alt).replace('"', "'").replace("<", "&lt;")
    return (
        f"**{escape(chart.title)}**\n\n<picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="charts/{chart.key}-dark.svg">'
        f'<img alt="{alt}" src="charts/{chart.key}.svg"></picture>'
    )


def table(block: Table) -> str:
    """A Markdown table under its caption."""
    header = [_cell_text(column.full_name) for column in block.columns]
    rule = [":--" if _is_text(column) else "--:" for column in block.columns]
    lines = [_row(header), _row(rule)]
    lines += [_row([_cell(c, v) for c, v in zip(block.columns, row, strict=True)]) for row in block.rows]
    return f"**{escape(block.caption)}**\n\n" + "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _is_text(column: Column) -> bool:
    return column.kind in ("text", "verdict")


def _cell(column: Column, value: Any) -> str:
    if isinstance(value, Figure):
        small = asides(value)
        mark = " **!**" if value.mark else ""
        return show(value.value, column.kind) + mark + (f" <sub>{small}</sub>" if small else "")
    if column.kind == "verdict":
        return f"{VERDICT_SIGNS.get(value, '')} **{_cell_text(text(value))}**".strip()
    if _is_text(column):
        return _cell_text(text(value)) or MISSING
    return show(value, column.kind)


def _cell_text(value: str) -> str:
    return escape(value).replace("|", "\\|").replace("\n", " ")


def escape(value: str) -> str:
    """Text that Markdown and its HTML leave as it is."""
    return re.sub(r"([\\`*_\[\]<>])", r"\\\1", value)
