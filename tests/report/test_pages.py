from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from arkbench.report import build, data, render
from tests.report import factory

VOID = {"meta", "link", "img", "br", "hr", "input", "source", "use", "path", "rect"}
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip


class Page(HTMLParser):
    """Collects elements, and that what is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module", params=["fused", "gaps", "pipelined"])
def folder(request: pytest.FixtureRequest, rendered: dict[str, Path]) -> Path:
    return rendered[request.param]


def html(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


def test_the_page_is_whole_and_loads_nothing(folder: Path) -> None:
    text = html(folder)
    page = Page(text)
    assert page.open == []
    for tag, attributes in page.elements:
        for name in ("src", "href", "xlink:href", "srcset", "action", "poster", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith("#") or value == "data:,", (tag, name, value)
    without_names = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert not re.search(r"(https?:)?//[a-z]", without_names.replace("// A cell", ""))
    assert "@import" not in text and not re.search(r"url\((?!#)", text)


def test_ids_are_unique_and_links_lead_somewhere(folder: Path) -> None:
    page = Page(html(folder))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = [a["href"][1:] for _, a in page.elements if (a.get("href") or "").startswith("#")]
    targets += re.findall(r"url\(#([^)]+)\)", html(folder))
    assert set(targets) <= set(ids)


def test_every_table_and_chart_of_the_report_is_on_the_page(folder: Path) -> None:
    report = build.build(data.load([folder]))
    page = Page(html(folder))
    assert [table["id"] for table in page.all("table")] == [f"table-{table.key}" for table in report.tables()]
    assert len(page.all("caption")) == len(report.tables())
    assert len(page.all("figcaption")) == len(report.charts())
    pictures = [svg for svg in page.all("svg") if svg.get("role") == "img"]
    assert len(pictures) == 2 * len(report.charts()) and all(svg["aria-label"] for svg in pictures)
    assert len(page.all("tr")) >= sum(len(table.rows) + 1 for table in report.tables())


def test_sections_come_in_the_order_of_a_reader_with_two_minutes(folder: Path) -> None:
    ids = [section["id"] for section in Page(html(folder)).all("section")]
    assert ids[:2] == ["verdicts", "limit"]
    assert ids[-4:] == ["method", "definitions", "environment", "marked"]
    assert ids[2].startswith("scenario-")


def test_what_a_run_says_is_text_and_never_markup(tmp_path: Path) -> None:
    folder = factory.fused_kernels(tmp_path / "a", notes=["<script>alert(1)</script> | a * b"], cpu="<b>&amp;")
    render([folder], tmp_path / "out")
    page = html(tmp_path / "out")
    assert len(Page(page).all("script")) == 1
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    markdown = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert r"\<script\>alert(1)\</script\> | a \* b" in markdown
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "charts",
        "report.html",
        "report.md",
        "tables",
    ]


def test_rendering_leaves_the_run_alone_and_gives_the_same_bytes(tmp_path: Path) -> None:
    folder = factory.with_gaps(tmp_path / "a")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for name in ("one", "two"):
        render([folder], tmp_path / name)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    one = {path.relative_to(tmp_path / "one"): path.read_bytes() for path in (tmp_path / "one").rglob("*.*")}
    two = {path.relative_to(tmp_path / "two"): path.read_bytes() for path in (tmp_path / "two").rglob("*.*")}
    assert one == two


def test_markdown_tables_have_as_many_cells_as_headings_and_charts_exist(folder: Path) -> None:
    text = (folder / "report.md").read_text(encoding="utf-8")
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.strip().split("\n")}) == 1, block
    named = re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert named and all((folder / name).is_file() for name in named)
    assert text.count("<details>") == text.count("</details>")
    assert text.index("## Verdicts") < text.index("## How far from the limit") < text.index("## Method")


def test_no_folder_is_refused() -> None:
    with pytest.raises(ValueError, match="name at least one"):
        render([], Path("nowhere"))


def browse(tmp_path: Path, page: Path, *flags: str) -> str:
    """Runs Chromium over a page; its standard output."""
    command = [CHROMIUM or "", *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian: apt install chromium)")


@needs_chromium
@pytest.mark.parametrize(("width", "shown"), [(1200, "wide"), (500, "narrow")])
def test_a_browser_shows_the_page_at_desktop_and_phone_width(
    tmp_path: Path, rendered: dict[str, Path], width: int, shown: str
) -> None:
    probe = tmp_path / "probe.html"
    script = """<script>
    const facts = {
      overflow: document.documentElement.scrollWidth - innerWidth,
      shown: [...document.querySelectorAll("figure > div")].filter((d) => d.offsetParent).map((d) => d.className),
    };
    document.body.dataset.facts = `${facts.overflow > 0 ? "overflows" : "fits"} ${[...new Set(facts.shown)].join()}`;
    </script></body>"""
    probe.write_text(html(rendered["fused"]).replace("</body>", script), encoding="utf-8")
    dom = browse(tmp_path, probe, f"--window-size={width},900", "--dump-dom")
    assert f'data-facts="fits {shown}"' in dom
    picture = tmp_path / "page.png"
    browse(tmp_path, probe, f"--window-size={width},900", f"--screenshot={picture}")
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 20_000


@needs_chromium
def test_a_browser_sorts_tables_and_changes_the_theme(tmp_path: Path, rendered: dict[str, Path]) -> None:
    probe = tmp_path / "probe.html"
    script = """<script>
    const table = document.getElementById("table-fused-kernels-decode");
    const column = (index) => [...table.tBodies[0].rows].map((row) => row.cells[index].dataset.value ?? "-").join();
    const click = (index) => { table.tHead.rows[1].cells[index].firstElementChild.click(); return column(index); };
    const seen = [click(4), click(4), click(0)];
    document.body.dataset.seen = seen.join(";");
    document.body.dataset.sort = table.tHead.rows[1].cells[0].ariaSort;
    document.getElementById("theme").click();
    document.body.dataset.paper = getComputedStyle(document.body).backgroundColor;
    </script></body>"""
    probe.write_text(html(rendered["gaps"]).replace("</body>", script), encoding="utf-8")
    dom = browse(tmp_path, probe, "--dump-dom")
    # Measured standard: 108 and 500 tokens a second; one row has no figure and stays last both ways.
    assert 'data-seen="108.0,500.0,-;500.0,108.0,-;1,8,16"' in dom
    assert 'data-sort="ascending"' in dom
    assert 'data-paper="rgb(18, 23, 28)"' in dom
