"""Base and head, alternating on one GPU: two trees, one subprocess a run."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from arkbench.errors import UserError
from arkbench.gate import ALL_PAIRS, METRICS, PAIRS, CellKey, GateResult, judge_pairs
from arkbench.gate_compare import Pair, check_paired, differences, look_again, paired_floors, unstable_outputs
from arkbench.gate_runs import RunData, load_run, not_comparable

Side = Literal["base", "head"]
RunOne = Callable[[Side, int, str], RunData]
"""(side, seed, name of the run folder) -> the finished run."""
Say = Callable[[str], None]
RESAMPLES = 1000


@dataclass(frozen=True)
class Tree:
    """A checkout and the interpreter that runs it."""

    path: Path
    python: str = sys.executable


class GateRunError(UserError):
    """A run of base or head that ended in an error."""


def subprocess_runner(base: Tree, head: Tree, options: Sequence[str], output: Path) -> RunOne:
    """Runs `python -m arkbench.cli run` in a tree, its folder under `output`."""

    def run_one(side: Side, seed: int, name: str) -> RunData:
        tree = base if side == "base" else head
        folder = output / name
        command = [tree.python, "-m", "arkbench.cli", "run", *options, "--seed", str(seed), "--output", str(folder)]
        environment = os.environ | {"PYTHONPATH": str(tree.path)}
        log = output / f"{name}.log"
        with log.open("w") as out:
            code = subprocess.run(command, cwd=tree.path, env=environment, stdout=out, stderr=out).returncode
        if code != 0:
            last = (log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
            raise GateRunError(f"{side} failed ({name}, exit code {code}): {last[:200]} (see {log})")
        return load_run(folder)

    return run_one


def run_pairs(run_one: RunOne, numbers: range, seed: int, say: Say) -> list[Pair]:
    """Pairs `numbers` in ABBA order: even ones run base first. A pair shares its seed; no two pairs do."""
    pairs = []
    for number in numbers:
        order: tuple[Side, Side] = ("base", "head") if number % 2 == 0 else ("head", "base")
        runs: dict[str, RunData] = {}
        for side in order:
            say(f"pair {number + 1}: {side}")
            runs[side] = run_one(side, seed + number, f"pair-{number + 1:02d}-{side}")
        pair = Pair(runs["base"], runs["head"])
        problem = not_comparable(pair.base, pair.head)
        if problem:
            raise UserError(f"base and head cannot be compared: {problem}")
        pairs.append(pair)
    return pairs


def warm_up(run_one: RunOne, seed: int, say: Say) -> RunData:
    """One discarded run a side, with the first pair's seed; base's is returned, to see whether its outputs repeat."""
    say("warm-up: base")
    base = run_one("base", seed, "warm-up-base")
    say("warm-up: head")
    run_one("head", seed, "warm-up-head")
    return base


def check_ab(
    title: str,
    run_one: RunOne,
    seed: int,
    calibration: Calibration | None,
    say: Say,
    accept_outputs: bool = False,
) -> GateResult:
    """Five pairs, and five more when any cell is not clear after them."""
    floors = paired_floors(calibration.floors if calibration else None)
    warm = warm_up(run_one, seed, say)
    if calibration and calibration.gpus != warm.gpus:
        raise UserError(f"the floors were calibrated on {list(calibration.gpus)}, this run used {list(warm.gpus)}")
    pairs = run_pairs(run_one, range(PAIRS), seed, say)
    unclear = look_again(pairs, floors)
    if unclear:
        names = ", ".join(f"{cell} {column}" for cell, column in unclear[:3])
        say(
            f"{len(unclear)} not clear after {PAIRS} pairs ({names}{', ...' if len(unclear) > 3 else ''}): as many more"
        )
        pairs += run_pairs(run_one, range(PAIRS, ALL_PAIRS), seed, say)
    unstable = unstable_outputs(warm, pairs[0].base)
    return check_paired(title, pairs, floors, accept_outputs, unstable)


@dataclass(frozen=True)
class Calibration:
    """What a machine shows when head runs against itself.

    `false_alarms`, `undecided`: share of resampled checks that called a regression, or could not decide.
    `floors`: by metric, no lower than the defaults and above what pure noise reaches in 99 of 100 checks.
    """

    gpus: tuple[str, ...]
    pairs: int
    false_alarms: float
    undecided: float
    floors: dict[str, float]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.__dict__, indent=1) + "\n", encoding="utf-8")


def load_calibration(path: Path) -> Calibration:
    """A calibration that `save` wrote."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        floors = {m.column: float(saved["floors"][m.column]) for m in METRICS}
        return Calibration(tuple(saved["gpus"]), saved["pairs"], saved["false_alarms"], saved["undecided"], floors)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: is no calibration ({error!r}); write one with arkbench check --calibrate") from None


def calibrate(run_one: RunOne, pairs: int, seed: int, say: Say) -> Calibration:
    """Runs head against itself and replays the gate on resampled pairs.

    The order within a pair means nothing here, so every replay draws ten pairs with replacement and random signs.
    """
    warm_up(run_one, seed, say)
    done = run_pairs(run_one, range(pairs), seed, say)
    measured, limits = differences(done, paired_floors())
    return replay(measured, limits, done[0].head.gpus, pairs, seed)


def replay(
    measured: dict[tuple[CellKey, str], list[float]],
    limits: dict[tuple[CellKey, str], float],
    gpus: tuple[str, ...],
    pairs: int,
    seed: int,
) -> Calibration:
    """The gate's outcome over RESAMPLES draws from measured A/A differences."""
    short = [key for key, values in measured.items() if len(values) < ALL_PAIRS]
    if short or not measured:
        raise UserError(f"calibration needs {ALL_PAIRS} usable pairs of every cell; {len(short)} have fewer")
    rng = random.Random(seed)
    alarms = undecided = 0
    reached: dict[str, list[float]] = {column: [] for _, column in measured}
    for _ in range(RESAMPLES):
        drawn = {k: [rng.choice((-1, 1)) * rng.choice(v) for _ in range(ALL_PAIRS)] for k, v in measured.items()}
        states = {j.state for j in judge_pairs(drawn, limits, final=True).values()}
        alarms += "regression" in states
        undecided += "inconclusive" in states
        for column, medians in reached.items():
            medians.append(max(median(v) for (_, c), v in drawn.items() if c == column))
    floors = paired_floors()
    for column, medians in reached.items():
        floors[column] = round(max(floors[column], sorted(medians)[int(0.99 * RESAMPLES)]), 4)
    return Calibration(gpus, pairs, alarms / RESAMPLES, undecided / RESAMPLES, floors)


def git(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"git {shlex.join(arguments)}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    return done.stdout.strip()


@contextmanager
def base_tree(head: Path, revision: str, folder: Path, say: Say) -> Iterator[Tree]:
    """A worktree of `revision` under `folder`, removed at the end; it gets an environment only for other packages."""
    commit = git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}", cwd=head)
    path = folder / "base"
    git("worktree", "prune", cwd=head)  # what a check that was killed has left behind
    git("worktree", "add", "--detach", "--force", str(path), commit, cwd=head)
    try:
        python = sys.executable
        if dependencies(path) != dependencies(head):
            say("base needs other packages than head: building its environment")
            python = build_environment(folder / "base-env", dependencies(path))
        yield Tree(path, python)
    finally:
        git("worktree", "remove", "--force", str(path), cwd=head)


def dependencies(tree: Path) -> list[str]:
    """What a tree's pyproject.toml requires at run time, in a normal form."""
    try:
        project = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
    except OSError:
        return []
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{tree / 'pyproject.toml'}: is not valid TOML ({error})") from None
    return sorted(re.sub(r"\s+", "", requirement) for requirement in project.get("dependencies", []))


def build_environment(folder: Path, requirements: Sequence[str]) -> str:
    """A virtual environment with `requirements`; returns its interpreter."""
    python = folder / "bin" / "python"
    steps = (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", *requirements],
    )
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"base's environment could not be built: {last}")
    return str(python)
