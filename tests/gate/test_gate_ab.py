"""Alternating runs: with a fake runner, and end to end through subprocesses and a git worktree."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
import tomllib
from pathlib import Path
from textwrap import dedent
from xml.etree import ElementTree

import pytest
import typer
from rich.console import Console
from run_folders import cell_row, write_run
from typer.testing import CliRunner

import arkbench
from arkbench.errors import UserError
from arkbench.gate import ALL_PAIRS, METRICS, PAIRS, CellKey, GateResult, Row
from arkbench.gate_ab import (
    Calibration,
    base_tree,
    calibrate,
    check_ab,
    dependencies,
    load_calibration,
    replay,
)
from arkbench.gate_cli import register
from arkbench.gate_report import MARKER, cells_of, junit, markdown, print_table, short_names, worst_first
from arkbench.gate_runs import RunData, load_run

SOURCE = str(Path(arkbench.__file__).parent.parent)


class FakeRunner:
    """Runs nothing: writes folders whose speed has seeded noise, head slower by `slowdown`."""

    def __init__(self, folder: Path, slowdown: float = 0.0, noise: float = 0.005, **fields) -> None:
        self.folder, self.slowdown, self.noise, self.fields = folder, slowdown, noise, fields
        self.calls: list[tuple[str, int, str]] = []
        self.random = random.Random(3)

    def __call__(self, side: str, seed: int, name: str) -> RunData:
        self.calls.append((side, seed, name))
        slow = 1 + (self.slowdown if side == "head" else 0.0)
        rows = [self.row(side, seed, cell, slow * self.random.gauss(1, self.noise)) for cell in ("a", "b")]
        return load_run(write_run(self.folder / name, rows, seed=seed))

    def row(self, side: str, seed: int, cell: str, time: float):
        fields = {k: v(side, seed, len(self.calls)) for k, v in self.fields.items()}
        plain = {"decode_tok_s": 1000 / time, "tpot_p50_s": 0.008 * time, "output_hash": f"{cell}{seed}"}
        return cell_row(cell, **(plain | fields))


def run_check(runner: FakeRunner, **options) -> GateResult:
    return check_ab("head against base", runner, 7, None, lambda text: None, **options)


def test_equal_sides_pass_after_five_pairs(tmp_path):
    runner = FakeRunner(tmp_path)
    result = run_check(runner)
    assert result.exit_code == 0 and len(runner.calls) == 2 + 2 * PAIRS
    assert all(r.pairs == PAIRS for r in result.rows if r.check == "decode_tok_s")


def test_order_is_abba_and_seeds_are_shared_within_a_pair_only(tmp_path):
    runner = FakeRunner(tmp_path)
    run_check(runner)
    assert [(side, seed) for side, seed, _ in runner.calls] == [
        ("base", 7), ("head", 7),
        ("base", 7), ("head", 7), ("head", 8), ("base", 8), ("base", 9), ("head", 9),
        ("head", 10), ("base", 10), ("base", 11), ("head", 11),
    ]  # fmt: skip


def test_planted_slowdown_is_caught_after_ten_pairs(tmp_path):
    runner = FakeRunner(tmp_path, slowdown=0.05)
    result = run_check(runner)
    assert result.exit_code == 1 and len(runner.calls) == 2 + 2 * ALL_PAIRS
    row = next(r for r in result.rows if r.check == "decode_tok_s")
    assert row.state == "regression" and row.pairs == 10 and row.worsening == pytest.approx(0.0488, abs=0.006)


def test_speed_up_passes_at_once(tmp_path):
    runner = FakeRunner(tmp_path, slowdown=-0.10)
    assert run_check(runner).exit_code == 0 and len(runner.calls) == 2 + 2 * PAIRS


def test_warm_ups_do_not_count(tmp_path):
    def figure(side, seed, call):
        return 1.0 if call <= 2 else 1000.0

    assert run_check(FakeRunner(tmp_path, decode_tok_s=figure)).exit_code == 0


def test_one_throttled_run_is_made_up_for_by_more_pairs(tmp_path):
    runner = FakeRunner(tmp_path, valid=lambda side, seed, call: "false" if call == 4 else "true")
    result = run_check(runner)
    assert len(runner.calls) == 2 + 2 * ALL_PAIRS
    row = next(r for r in result.rows if r.check == "decode_tok_s")
    assert row.pairs == ALL_PAIRS - 1 and row.state == "pass" and result.exit_code == 0


def test_slowdown_is_caught_beside_a_throttled_run(tmp_path):
    runner = FakeRunner(tmp_path, 0.05, valid=lambda side, seed, call: "false" if call == 4 else "true")
    result = run_check(runner)
    assert result.exit_code == 1
    assert {r.pairs for r in result.rows if r.state == "regression"} == {ALL_PAIRS - 1}


def test_throttled_throughout_is_invalid(tmp_path):
    runner = FakeRunner(tmp_path, valid=lambda *_: "false", reason=lambda *_: "GPU 0 throttled")
    result = run_check(runner)
    assert result.exit_code == 2
    reasons = {r.reason for r in result.rows if r.state == "invalid"}
    assert reasons == {"0 usable pairs of at least 5; base: GPU 0 throttled"}


def test_changed_output_is_a_regression_unless_accepted(tmp_path):
    def digest(side, seed, call):
        return f"{side if seed == 9 else ''}{seed}"

    assert run_check(FakeRunner(tmp_path / "a", output_hash=digest)).exit_code == 1
    assert run_check(FakeRunner(tmp_path / "b", output_hash=digest), accept_outputs=True).exit_code == 0


def test_outputs_that_base_does_not_repeat_are_left_out_and_noted(tmp_path):
    result = run_check(FakeRunner(tmp_path, output_hash=lambda side, seed, call: str(call)))
    assert result.exit_code == 0 and not any(r.check == "outputs" for r in result.rows)
    assert "outputs of quick best Llama-3.2-1B a were not compared: base does not repeat its own" in result.notes


def test_failed_requests_in_one_run_are_a_regression(tmp_path):
    def failed(side, seed, call):
        return int(side == "head" and seed == 8)

    assert run_check(FakeRunner(tmp_path, requests_failed=failed)).exit_code == 1


def test_cell_that_head_loses_is_no_pass(tmp_path):
    class Losing(FakeRunner):
        def __call__(self, side, seed, name):
            run = super().__call__(side, seed, name)
            cells = {k: v for k, v in run.cells.items() if side == "base" or k.cell != "b"}
            return RunData(run.path, run.gpus, run.scenarios, run.seed, cells, run.tokens, run.peak_memory)

    result = run_check(Losing(tmp_path))
    assert result.exit_code == 2
    assert any(r.cell.cell == "b" and "missing in head" in r.reason for r in result.rows)


def test_calibration_of_a_quiet_machine(tmp_path):
    found = calibrate(FakeRunner(tmp_path), ALL_PAIRS, 1, lambda text: None)
    assert found.false_alarms <= 0.01 and found.floors == {m.column: m.paired_floor for m in METRICS}
    assert found.gpus == ("NVIDIA H200",) and found.pairs == 10
    found.save(tmp_path / "calibration.json")
    assert load_calibration(tmp_path / "calibration.json") == found


def test_calibration_widens_the_floors_of_a_noisy_machine():
    key = (CellKey("s", "v", "m", "c"), "decode_tok_s")
    found = replay({key: [0.08, -0.1, 0.06, 0.09, -0.07, 0.1, 0.02, -0.09, 0.05, 0.1]}, {key: 0.025}, (), 10, 1)
    assert 0.05 < found.floors["decode_tok_s"] < 0.1 and found.floors["tpot_p50_s"] == 0.025
    assert found.undecided > 0.2


def test_calibration_needs_ten_usable_pairs():
    key = (CellKey("s", "v", "m", "c"), "decode_tok_s")
    for measured in ({key: [0.0] * 9}, {}):
        with pytest.raises(UserError, match="10 usable pairs"):
            replay(measured, dict.fromkeys(measured, 0.025), (), 10, 1)


def test_floors_of_another_gpu_are_refused(tmp_path):
    other = Calibration(("RTX 5090",), 20, 0.0, 0.0, {m.column: 0.03 for m in METRICS})
    with pytest.raises(UserError, match="calibrated on"):
        check_ab("t", FakeRunner(tmp_path), 1, other, lambda text: None)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(UserError, match="is no calibration"):
        load_calibration(tmp_path / "broken.json")


# ------------------------------------------------------------------------------------------------- reports

ROWS = (
    Row(CellKey("s", "v", "m", "ok"), "decode_tok_s", "pass", 100.0, 101.0, -0.00995, 0.025, 0.9, 5),
    Row(CellKey("s", "v", "m", "a|b"), "decode_tok_s", "regression", 1000.0, 950.0, 0.0513, 0.025, 1e-7, 10),
    Row(CellKey("s", "v", "m", "gone"), "cell", "invalid", reason="missing in head [x] <y>"),
    Row(
        CellKey("s", "v", "m", "loud"), "tpot_p50_s", "inconclusive", 0.01, 0.0104, 0.0392, 0.025, 0.2, 10, "too noisy"
    ),
)
RESULT = GateResult("head against base", ROWS, ("a note",))


def test_fields_of_a_row():
    assert cells_of(ROWS[1]) == (
        "s v m a|b", "decode_tok_s", "1000 tok/s", "950 tok/s", "-5.0% worse", "2.5%", "<0.0001", "10", "regression",
    )  # fmt: skip
    assert cells_of(ROWS[3])[4] == "+4.0% worse" and cells_of(ROWS[0])[4] == "+1.0% better"
    assert cells_of(ROWS[2]) == ("s v m gone", "cell", *[""] * 6, "invalid: missing in head [x] <y>")


def test_short_names_keep_what_differs():
    same = [CellKey("s", "v", "m", "a"), CellKey("s", "v", "m", "b"), CellKey("s", "v", "m", "a")]
    assert list(short_names(same).values()) == ["a", "b"]
    assert short_names([*same, CellKey("s", "w", "m", "a")])[same[0]] == "v a"
    assert short_names([]) == {}


@pytest.mark.parametrize("width", [80, 160])
def test_table_names_every_cell_and_state(width):
    out = io.StringIO()
    print_table(RESULT, Console(file=out, width=width))
    text = out.getvalue()
    for word in (
        "decode_tok_s",
        "-5.0% worse",
        "950 tok/s",
        "a|b",
        "too noisy",
        "note: a note",
        "invalid: gone, cell: missing in head [x] <y>",
    ):
        assert word in text, word
    assert all(text.count(state) >= 2 for state in ("regression", "invalid", "inconclusive"))
    assert text.splitlines()[-1] == "regression: 1 regression, 1 invalid, 1 inconclusive, 1 pass"


def test_markdown_shows_the_worst_first_and_escapes():
    text = markdown(RESULT)
    assert text.startswith(
        f"{MARKER}\n### arkbench check: regression: 1 regression, 1 invalid, 1 inconclusive, 1 pass\n"
    )
    assert [r.state for r in worst_first(ROWS)] == ["regression", "invalid", "inconclusive", "pass"]
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.replace("\\|", "").count("|") == 10 for line in table) and "a\\|b" in text
    assert "&lt;y>" in text and "- a note" in text and text.index("<details>") < text.index("s v m ok")


def test_junit_counts_and_kinds():
    suite = ElementTree.fromstring(junit(RESULT))
    assert {k: suite.get(k) for k in ("tests", "failures", "errors", "skipped")} == {
        "tests": "4", "failures": "1", "errors": "1", "skipped": "1",
    }  # fmt: skip
    kinds = {case.get("classname"): [child.tag for child in case] for case in suite}
    assert kinds == {"s.v.m.a|b": ["failure"], "s.v.m.gone": ["error"], "s.v.m.loud": ["skipped"], "s.v.m.ok": []}


def test_a_check_without_rows_is_an_error_in_junit():
    suite = ElementTree.fromstring(junit(GateResult("t", problem="broken \x00 file")))
    assert suite.get("errors") == "1" and suite.find("testcase/error").get("message") == "broken   file"
    assert "invalid: broken" in markdown(GateResult("t", problem="broken"))


# ------------------------------------------------------------------------------------------------- command line


def application() -> typer.Typer:
    app = typer.Typer()

    @app.command()
    def other() -> None: ...

    register(app)
    return app


def command(*arguments: str, **environment: str):
    return CliRunner().invoke(application(), ["check", *arguments], env={"COLUMNS": "200", **environment})


def stored(tmp_path: Path, speed: float) -> list[str]:
    base, head = tmp_path / "base", tmp_path / "head"
    write_run(base, [cell_row(repetition=i) for i in range(3)])
    write_run(head, [cell_row(repetition=i, decode_tok_s=speed) for i in range(3)])
    return [str(head), "--baseline", str(base)]


@pytest.mark.parametrize(("speed", "code"), [(1000.0, 0), (700.0, 1), (float("nan"), 2)])
def test_stored_form_on_the_command_line(tmp_path, speed, code):
    summary, report, xml = tmp_path / "summary.md", tmp_path / "out" / "report.md", tmp_path / "junit.xml"
    summary.write_text("before\n")
    files = ["--markdown", str(report), "--junit", str(xml)]
    result = command(*stored(tmp_path, speed), *files, GITHUB_STEP_SUMMARY=str(summary))
    assert result.exit_code == code, result.output
    assert summary.read_text() == "before\n" + report.read_text() and "head against base" in report.read_text()
    assert ElementTree.parse(xml).getroot().get("name") == "arkbench check"


@pytest.mark.parametrize(
    "arguments",
    [[], ["run"], ["--baseline", "run"], ["--base", "HEAD", "--calibrate"], ["a", "--baseline", "b", "--base", "HEAD"]],
)
def test_forms_do_not_mix(arguments):
    result = command(*arguments)
    assert result.exit_code == 2 and result.stderr.startswith("arkbench check: ") and result.stderr.count("\n") == 1


def test_unreadable_run_is_reported_everywhere(tmp_path):
    xml = tmp_path / "junit.xml"
    result = command(str(tmp_path / "nowhere"), "--baseline", str(tmp_path), "--junit", str(xml))
    assert result.exit_code == 2 and "cannot be read" in result.stderr
    assert ElementTree.parse(xml).getroot().get("errors") == "1"


def test_folder_in_use_is_refused(tmp_path):
    (tmp_path / "file").touch()
    result = command("--calibrate", "--output", str(tmp_path))
    assert result.exit_code == 2 and "is not an empty folder" in result.stderr


# ------------------------------------------------------------------------------------------------- subprocesses

FAKE_CLI = """
    import csv, hashlib, json, pathlib, random, sys

    SLOWDOWN = {slowdown}
    arguments = sys.argv[1:]
    assert arguments[0] == "run", arguments
    seed, out = (arguments[arguments.index(o) + 1] for o in ("--seed", "--output"))
    if {fails}:
        print("CUDA out of memory", file=sys.stderr)
        sys.exit(3)
    out = pathlib.Path(out)
    out.mkdir()
    digest = hashlib.sha256(pathlib.Path(arguments[1]).read_bytes()).hexdigest()
    scenarios = [dict(name="quick", hash=digest)]
    run = dict(status="complete", seed=int(seed), gpus=[dict(name="Fake")], scenarios=scenarios)
    (out / "run.json").write_text(json.dumps(run))
    time = (1 + SLOWDOWN) * random.Random(f"{{out}}{{SLOWDOWN}}").gauss(1, 0.003)
    row = {row!r}
    row |= dict(decode_tok_s=1000 / time, tpot_p50_s=0.008 * time, output_hash=seed)
    with (out / "cells.csv").open("w") as file:
        writer = csv.DictWriter(file, {columns!r})
        writer.writeheader()
        writer.writerow(row)
"""


def write_tree(tree: Path, slowdown: float, fails: bool = False) -> None:
    from arkbench.records import CELL_COLUMNS

    package = tree / "arkbench"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    code = FAKE_CLI.format(slowdown=slowdown, fails=fails, row=cell_row(), columns=list(CELL_COLUMNS))
    (package / "cli.py").write_text(dedent(code))
    (tree / "scenarios").mkdir(exist_ok=True)
    (tree / "scenarios" / "quick.toml").write_text("name = 'quick'\n")


def git(tree: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *arguments], cwd=tree, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    tree = tmp_path / "repository"
    write_tree(tree, 0.0)
    git(tree, "init", "-q")
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "base")
    return tree


CHECK = "import typer; from arkbench.gate_cli import register; app = typer.Typer(); app.command()(lambda: None)"


def check_in(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = f"{CHECK}\nregister(app)\napp()"
    environment = os.environ | {"PYTHONPATH": SOURCE, "COLUMNS": "200", "PYTHONSAFEPATH": "1"}
    environment.pop("GITHUB_STEP_SUMMARY", None)
    command = [sys.executable, "-c", code, "check", *arguments]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


def test_head_against_head_passes_end_to_end(repository, tmp_path):
    done = check_in(repository, "--base", "HEAD", "--output", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass" in done.stdout and len(list((tmp_path / "out").glob("pair-*-*/cells.csv"))) == 2 * PAIRS


def test_planted_slowdown_is_caught_end_to_end(repository, tmp_path):
    write_tree(repository, 0.05)
    report = tmp_path / "report.md"
    done = check_in(repository, "--base", "HEAD", "--output", str(tmp_path / "out"), "--markdown", str(report))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "| decode_tok_s |" in report.read_text() and "+changes" in report.read_text()
    worktrees = subprocess.run(["git", "worktree", "list"], cwd=repository, capture_output=True, text=True).stdout
    assert len(worktrees.splitlines()) == 1


def test_head_that_does_not_run_is_no_pass(repository, tmp_path):
    write_tree(repository, 0.0, fails=True)
    done = check_in(repository, "--base", "HEAD", "--output", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "head failed (warm-up-head, exit code 3): CUDA out of memory" in done.stderr


def test_unknown_revision_is_one_line(repository):
    done = check_in(repository, "--base", "no-such-revision")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "no-such-revision" in done.stderr


def test_environment_is_built_only_for_other_dependencies(repository, tmp_path, monkeypatch):
    built = []
    monkeypatch.setattr("arkbench.gate_ab.build_environment", lambda folder, needs: built.append(needs) or "python-x")
    (repository / "pyproject.toml").write_text('[project]\nname = "a"\nversion = "1"\ndependencies = ["x >= 1", "b"]\n')
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "dependencies")
    (repository / "pyproject.toml").write_text('[project]\nname = "a"\nversion = "2"\ndependencies = ["b", "x>=1"]\n')
    with base_tree(repository, "HEAD", tmp_path / "one", lambda text: None) as tree:
        assert tree.python == sys.executable and built == []
    (repository / "pyproject.toml").write_text('[project]\nname = "a"\nversion = "2"\ndependencies = ["x>=2"]\n')
    with base_tree(repository, "HEAD", tmp_path / "two", lambda text: None) as tree:
        assert tree.python == "python-x" and built == [["b", "x>=1"]]
        assert tree.path.is_dir()
    assert not tree.path.exists()


def test_dependencies_of_this_project_are_read():
    names = dependencies(Path(SOURCE))
    listed = tomllib.loads((Path(SOURCE) / "pyproject.toml").read_text())["project"]["dependencies"]
    assert len(names) == len(listed) and "pydantic>=2.7" in names
