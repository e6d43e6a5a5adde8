"""The opening of a report: the verdicts, counted and claim by claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from arkbench import answers
from arkbench.published import with_unit
from arkbench.report.blocks import Block, Column, Counts, Details, Paragraph, Section, Table
from arkbench.report.data import Run
from arkbench.report.figures import MISSING, number, text

VERDICTS = ("exceeded", "reproduced", "not reproduced", "not comparable", "not run")


def claim_rows(runs: Sequence[Run]) -> list[tuple[Run | None, Mapping[str, Any]]]:
    """For every claim, each run that tested it; a claim that none tested stands once, as not run."""
    by_claim: dict[str, list[tuple[Run, Mapping[str, Any]]]] = {}
    for run in runs:
        for row in run.verdicts.to_dict("records"):
            by_claim.setdefault(row["id"], []).append((run, row))
    found: list[tuple[Run | None, Mapping[str, Any]]] = []
    for entries in by_claim.values():
        tested = [(run, row) for run, row in entries if row["verdict"] != "not run"]
        found += tested or [(None, entries[0][1])]
    return found


def counts(runs: Sequence[Run]) -> list[tuple[str, int]]:
    """How often each verdict was reached, in the order a report shows them; a verdict of another name is kept."""
    tally = dict.fromkeys(VERDICTS, 0)
    for _, row in claim_rows(runs):
        tally[row["verdict"]] = tally.get(row["verdict"], 0) + 1
    return list(tally.items())


def lead(runs: Sequence[Run]) -> str:
    """The result in one sentence."""
    tally = dict(counts(runs))
    total = sum(tally.values())
    if not total:
        return "No claim was tested."
    tested = total - tally["not run"]
    if not tested:
        return f"None of the {total} published claims was tested in this run."
    hold, comparable = tally["reproduced"] + tally["exceeded"], tested - tally["not comparable"]
    if not comparable:
        return f"Measured here: {tested} of the {total} published claims; none can be compared with its figure."
    parts = [f"{hold} of {comparable} comparable claims hold here"]
    parts[0] += f" ({tally['exceeded']} exceeded)" if tally["exceeded"] else ""
    if tally["not reproduced"]:
        parts.append(f"{tally['not reproduced']} {'does' if tally['not reproduced'] == 1 else 'do'} not")
    if tally["not comparable"]:
        parts.append(f"{tally['not comparable']} cannot be compared")
    if tally["not run"]:
        parts.append(f"{tally['not run']} {'was' if tally['not run'] == 1 else 'were'} not run")
    return ", ".join(parts) + "."


def claim_value(value: Any, unit: str) -> str:
    """A claim's figure with its unit; a dash for one that is missing."""
    return with_unit(text(value), unit) or MISSING


def sentence(statement: str) -> str:
    """A statement with a capital, unless it begins with a name."""
    return statement[:1].upper() + statement[1:]


def section(runs: Sequence[Run]) -> Section:
    """Counts, the tested claims, and the others behind a line."""
    rows = claim_rows(runs)
    if not rows:
        return Section("verdicts", "Verdicts", [Paragraph("This run holds no verdicts: no claim was evaluated.")])
    tested = [(run, row) for run, row in rows if row["verdict"] != "not run"]
    waiting = [row for _, row in rows if row["verdict"] == "not run"]
    blocks: list[Block] = [Counts(counts(runs)), _tested_table(tested, len(runs) > 1)] if tested else []
    if waiting:
        table = Table(
            "claims-not-run",
            "Claims that were not run",
            [Column("claim"), Column("note"), Column("published"), Column("reason")],
            [
                [sentence(r["statement"]), r["note"], claim_value(r["published"], r["unit"]), r["reason"]]
                for r in waiting
            ],
        )
        blocks.append(Details(f"{len(waiting)} claims were not run", [table]))
    blocks += [Paragraph(line) for line in _answers(runs)]
    return Section("verdicts", "Verdicts", blocks)


def _answers(runs: Sequence[Run]) -> list[str]:
    """Speed counts only where the answers are the same: how many comparisons of the variants' tokens agreed."""
    lines = []
    for run in runs:
        compared = run.meta.get("answers") or {}
        if compared.get("compared"):
            place = f"{run.label}: the" if len(runs) > 1 else "The"
            bounded = [d for d in compared.get("different", []) if answers.kind(d) == "bounded"]
            names = sorted({name for d in bounded for name in d["switches"]})
            why = f", and {len(bounded)} differ in switches that may round differently ({', '.join(names)})"
            why = why if bounded else ""
            ties = sum(answers.kind(d) == "tie" for d in compared.get("different", []))
            why += f", and {ties} part where two tokens are all but equal" if ties else ""
            lines.append(
                f"{place} variants' answers were compared {compared['compared']} times; "
                f"the tokens were identical in {compared.get('identical', 0)}{why}."
            )
    return lines


def _tested_table(tested: Sequence[tuple[Run | None, Mapping[str, Any]]], several: bool) -> Table:
    names = ("claim", "published", "measured", "spread", "verdict", "reason")
    columns = [Column(name, {"verdict": "verdict", "spread": "percent"}.get(name, "text")) for name in names]
    if several:
        columns.insert(2, Column("run"))
    rows = []
    for run, row in tested:
        cells: list[Any] = [
            sentence(row["statement"]),
            claim_value(row["published"], row["unit"]),
            claim_value(row["measured"], row["unit"]),
            number(row["spread"]),
            row["verdict"],
            row["reason"],
        ]
        if several:
            cells.insert(2, run.label if run else "")
        rows.append(cells)
    return Table("verdicts", "Claims and verdicts", columns, rows)
