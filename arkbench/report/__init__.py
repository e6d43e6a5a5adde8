"""Reports: run folders in; Markdown, one offline HTML file, charts and CSV tables out."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from arkbench.report.blocks import Table

__all__ = ["render"]


def render(run_dirs: Sequence[Path], out_dir: Path) -> None:
    """Writes report.md, report.html, charts/NAME{.svg,-dark.svg,.png} and tables/NAME.csv under `out_dir`.

    FileNotFoundError: a folder is not a run folder. ValueError: no folder was given.
    """
    # matplotlib takes a second to import: only who renders pays for it.
    from arkbench.report import build, data, draw, html, markdown

    if not run_dirs:
        raise ValueError("no run folder was given: name at least one")
    report = build.build(data.load(run_dirs))
    out_dir.mkdir(parents=True, exist_ok=True)
    drawings = {}
    for chart in report.charts():
        drawings[chart.key] = draw.draw(chart)
        draw.save(chart, drawings[chart.key], out_dir / "charts")
    for table in report.tables():
        _write_csv(table, out_dir / "tables")
    (out_dir / "report.md").write_text(markdown.render(report), encoding="utf-8")
    (out_dir / "report.html").write_text(html.render(report, drawings), encoding="utf-8")


def _write_csv(table: Table, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names, rows = table.flat()
    with (folder / f"{table.key}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(rows)
