"""What a report is made of, before it is Markdown or HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from arkbench.report.charts import Chart
from arkbench.report.figures import Figure


@dataclass(frozen=True)
class Column:
    """One column. `kind`: text, verdict, or a kind of `figures.show`. `group` stands above columns that share it."""

    name: str
    kind: str = "text"
    group: str = ""
    unit: str = ""

    @property
    def header(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name

    @property
    def full_name(self) -> str:
        return f"{self.group}: {self.header}" if self.group else self.header


@dataclass(frozen=True)
class Table:
    """A table; `key` names its CSV file. A value is a string, a number, a Figure, or None where nothing applies."""

    key: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]

    def flat(self) -> tuple[list[str], list[list[Any]]]:
        """Header and rows for CSV: a Figure's spread, limit and mark become columns where any row has them."""
        names: list[str] = []
        values: list[list[Any]] = [[] for _ in self.rows]
        for index, column in enumerate(self.columns):
            cells = [row[index] for row in self.rows]
            names.append(column.full_name)
            for row, cell in zip(values, cells, strict=True):
                row.append(cell.value if isinstance(cell, Figure) else cell)
            for attribute, suffix in (("spread", "spread"), ("limit", "fraction of limit"), ("mark", "mark")):
                aside = [getattr(cell, attribute) if isinstance(cell, Figure) else None for cell in cells]
                if any(value not in (None, "") for value in aside):
                    names.append(f"{column.full_name}: {suffix}")
                    for row, value in zip(values, aside, strict=True):
                        row.append(value)
        return names, values


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Bullets:
    items: Sequence[str]


@dataclass(frozen=True)
class Definitions:
    items: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Counts:
    """How many claims have which verdict, in the order shown."""

    items: Sequence[tuple[str, int]]


@dataclass(frozen=True)
class Details:
    """Blocks behind a line that opens them."""

    summary: str
    blocks: Sequence[Block]


Block: TypeAlias = "Table | Chart | Paragraph | Bullets | Definitions | Counts | Details"


@dataclass(frozen=True)
class Section:
    key: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Report:
    """`lead`: the sentence under the title; `facts`: name and value pairs under it; `warning`: partial or failed."""

    title: str
    lead: str
    facts: Sequence[tuple[str, str]]
    warning: str
    sections: Sequence[Section] = field(default_factory=tuple)

    def walk(self) -> list[Block]:
        """Every block, those inside Details too, in reading order."""

        def inner(blocks: Sequence[Block]) -> list[Block]:
            found: list[Block] = []
            for block in blocks:
                found.append(block)
                if isinstance(block, Details):
                    found += inner(block.blocks)
            return found

        return [block for section in self.sections for block in inner(section.blocks)]

    def tables(self) -> list[Table]:
        return [block for block in self.walk() if isinstance(block, Table)]

    def charts(self) -> list[Chart]:
        return [block for block in self.walk() if isinstance(block, Chart)]
