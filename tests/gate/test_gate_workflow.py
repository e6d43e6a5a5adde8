"""The workflow and the page name options that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from arkbench.gate_cli import register
from arkbench.gate_report import MARKER

ROOT = Path(__file__).parent.parent.parent
WORKFLOW = ROOT / ".github" / "workflows" / "perf-gate.yml"


def known_options() -> set[str]:
    app = typer.Typer(add_completion=False)
    register(app)
    return {name for parameter in get_command(app).params for name in parameter.opts if name.startswith("--")}


def test_workflow_uses_options_that_exist():
    used = set()
    for line in WORKFLOW.read_text().splitlines():
        if "arkbench.cli check" in line or "options+=" in line or "options=" in line:
            used |= set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", line))
    assert {"--base", "--calibrate", "--markdown", "--junit", "--floors"} <= used <= known_options()


def test_page_names_options_that_exist():
    page = (ROOT / "docs" / "gate.md").read_text()
    for line in re.findall(r"^arkbench check.*$", page, re.MULTILINE):
        assert set(re.findall(r"--[a-z-]+", line)) <= known_options()
    assert {o for o in known_options() if o not in ("--help", "--seed")} <= set(re.findall(r"--[a-z-]+", page))


def test_comment_is_found_by_its_marker():
    assert f"const marker = '{MARKER}';" in WORKFLOW.read_text()


def test_workflow_is_yaml_and_keeps_forks_away():
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(WORKFLOW.read_text())
    job = workflow["jobs"]["gate"]
    assert "head.repo.full_name == github.repository" in job["if"]
    scripts = "\n".join(step.get("run", "") for step in job["steps"])
    assert "${{" not in scripts  # expressions reach the shell through the environment only
