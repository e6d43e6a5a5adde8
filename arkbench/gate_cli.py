"""`arkbench check`: the regression gate on the command line."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from arkbench.errors import UserError
from arkbench.gate import ALL_PAIRS, GateResult
from arkbench.gate_ab import RunOne, Say, Tree, base_tree, calibrate, check_ab, git, load_calibration, subprocess_runner
from arkbench.gate_compare import check_stored
from arkbench.gate_report import junit, markdown, print_table
from arkbench.gate_runs import load_run

CALIBRATION_FILE = "calibration.json"


@dataclass(frozen=True)
class Plan:
    """What alternating runs need: the options that every run gets, and where their folders go."""

    run_options: tuple[str, ...]
    output: Path
    seed: int
    floors: Path | None
    accept_outputs: bool


def register(app: typer.Typer) -> None:
    """Adds the `check` command to the application."""
    app.command()(check)


def check(
    run: Annotated[Path | None, typer.Argument(help="Run folder to judge, with --baseline.")] = None,
    baseline: Annotated[Path | None, typer.Option(help="Stored run folder of the same GPUs and scenarios.")] = None,
    base: Annotated[str | None, typer.Option(help="Git revision to alternate with on this GPU.")] = None,
    calibrate_: Annotated[
        bool, typer.Option("--calibrate", help="Run head against itself: this machine's false-alarm rate and floors.")
    ] = False,
    scenario: Annotated[
        list[str] | None, typer.Option(help="Scenario of the alternating runs (repeatable; default quick).")
    ] = None,
    run_args: Annotated[str, typer.Option(help="More options for every run, e.g. '--model Llama-3.2-1B'.")] = "",
    pairs: Annotated[int, typer.Option(min=ALL_PAIRS, help="Pairs of a calibration.")] = 2 * ALL_PAIRS,
    floors: Annotated[Path | None, typer.Option(help="Calibration file whose floors replace the defaults.")] = None,
    accept_outputs: Annotated[bool, typer.Option(help="The change is meant to change the generated tokens.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the first pair; every pair has its own.")] = 1,
    output: Annotated[Path | None, typer.Option(help="New folder for the runs and reports.")] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="Write the Markdown report here.")] = None,
    junit_file: Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML here.")] = None,
) -> None:
    """The regression gate. Exit code 0: pass; 1: regression; 2: inconclusive, invalid or not comparable."""
    console, errors = Console(), Console(stderr=True)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    try:
        _one_form(run, baseline, base, calibrate_)
        if run is not None and baseline is not None:
            result = check_stored(load_run(baseline), load_run(run), accept_outputs)
        else:
            options = (*(_scenario(s) for s in scenario or ["quick"]), *shlex.split(run_args))
            plan = Plan(options, _folder(output), seed, floors, accept_outputs)
            if base is None:
                _calibrate(plan, pairs, say)
                return
            result = _against(base, plan, say)
        print_table(result, console)
    except (UserError, OSError, ValueError) as error:
        errors.print(f"arkbench check: {error}", markup=False, highlight=False, soft_wrap=True)
        result = GateResult("arkbench check", problem=str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None  # left alone it would end in 1, which means a regression
    _write(result, markdown_file, junit_file)
    raise typer.Exit(result.exit_code)


def _one_form(run: Path | None, baseline: Path | None, base: str | None, calibrating: bool) -> None:
    if (run is None) != (baseline is None):
        raise UserError("a stored comparison needs both: arkbench check RUN --baseline RUN")
    if sum((run is not None, base is not None, calibrating)) != 1:
        raise UserError("give one of: RUN --baseline RUN, --base REV, --calibrate")


def _folder(output: Path | None) -> Path:
    """The folder of the runs: named and new, or a temporary one."""
    if output is None:
        return Path(tempfile.mkdtemp(prefix="arkbench-check-"))
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output {output}: is not an empty folder; name a new one")
    output.mkdir(parents=True, exist_ok=True)
    return output.resolve()


def _scenario(name: str) -> str:
    """Head's own file of a scenario where there is one, so that base runs the same text."""
    for candidate in (Path(name), Path("scenarios") / f"{name}.toml"):
        if candidate.is_file():
            return str(candidate.resolve())
    return name


def _head() -> Tree:
    return Tree(Path(git("rev-parse", "--show-toplevel", cwd=Path.cwd())))


def _against(revision: str, plan: Plan, say: Say) -> GateResult:
    head = _head()
    calibrated = load_calibration(plan.floors) if plan.floors else None
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="arkbench-base-")))
        base = stack.enter_context(base_tree(head.path, revision, scratch, say))
        title = f"{_describe(head.path)} against {revision} ({_describe(base.path)})"
        run_one = subprocess_runner(base, head, plan.run_options, plan.output)
        return check_ab(title, run_one, plan.seed, calibrated, say, plan.accept_outputs)


def _describe(tree: Path) -> str:
    return git("describe", "--always", "--dirty=+changes", "--exclude=*", cwd=tree)


def _calibrate(plan: Plan, pairs: int, say: Say) -> None:
    head = _head()
    run_one: RunOne = subprocess_runner(head, head, plan.run_options, plan.output)
    found = calibrate(run_one, pairs, plan.seed, say)
    found.save(plan.output / CALIBRATION_FILE)
    say(f"false alarms: {found.false_alarms:.1%} of checks; undecided: {found.undecided:.1%}")
    for column, floor in found.floors.items():
        say(f"floor of {column}: {floor:.1%}")
    say(f"written to {plan.output / CALIBRATION_FILE} (use it with --floors)")


def _write(result: GateResult, markdown_file: Path | None, junit_file: Path | None) -> None:
    text = markdown(result)
    files: Sequence[tuple[Path | None, str]] = ((markdown_file, text), (junit_file, junit(result)))
    for file, content in files:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content, encoding="utf-8")
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        with open(summary, "a", encoding="utf-8") as out:
            out.write(text)
