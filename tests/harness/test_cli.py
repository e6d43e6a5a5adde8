"""The command line as a user types it: mistakes, the dry run, a real small run, Ctrl-C, kill and resume."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arkbench.records import read_rows

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
SMALL = ["run", "quick", "--model", "SmolLM2-135M@layers=2", "--streams", "2", "--context", "16", "--output-tokens",
         "6", "--prompt-tokens", "32", "--device", "cpu"]  # fmt: skip


def command(*arguments, cwd):
    return [sys.executable, "-m", "arkbench.cli", *map(str, arguments)], {
        "cwd": cwd, "env": ENVIRONMENT, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
    }  # fmt: skip


def arkbench(*arguments, cwd):
    line, options = command(*arguments, cwd=cwd)
    return subprocess.run(line, **options, timeout=240)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nosuch"], "unknown scenario 'nosuch': there are api-cost, decode-batching,"),
        (["run", "--model", "Qwen9"], "unknown model 'Qwen9': did you mean"),
        (["run", "--set", "speed=warp"], "unknown switch 'speed': the switches are kernels,"),
        (["run", "--set", "loop=warp"], "switch 'loop' cannot be 'warp': it takes driven or inverted"),
        (["run", "--set", "loop"], "--set loop: write it as switch=value"),
        (["run", "--streams", "1,x"], "--streams 1,x: it takes positive whole numbers"),
        (["run", "--endpoint", "http://127.0.0.1:9"], "http://127.0.0.1:9/v1 does not answer"),
        (["run", "--endpoint", "http://127.0.0.1:9", "--set", "loop=driven"], ""),
        (["run", "--device", "tpu"], "--device tpu: it is auto, cuda or cpu"),
        (["run", "--resume", "nowhere"], "nowhere: is no run folder"),
        (["run", "--output", "."], ".: is not empty"),
        (["run", "--output", "broken.toml"], "broken.toml: is a file"),
        (["run", "--streams", "1000000000"], "cell decode-s1000000000-c64: its prompts have 64,000,000,000 tokens"),
        (["run", "--streams", "9" * 5000], f"--streams {'9' * 80}: it takes positive whole numbers"),
        (
            ["run", "--repetitions", "9" * 18],
            "scenario 'quick': 999,999,999,999,999,999 repetitions; 10,000 are the most",
        ),
        (["run", "--device", "cuda:1"], "--device cuda:1: it is auto, cuda or cpu (CUDA_VISIBLE_DEVICES chooses"),
        (["run", "--device", "cpu:x"], "--device cpu:x: it is auto, cuda or cpu"),
        (["run", "--set", "loop=driven", "--set", "loop=inverted"], "--set loop: it is given both as driven and as"),
        (["run", "--output", "a" * 300], f"{'a' * 300}: cannot be written (File name too long)"),
        (["run", "--duration", "inf"], "Invalid value for '--duration'"),
        (["run", "--repetitions", "0"], "Invalid value for '--repetitions'"),
        (["run", "--speed", "9"], "No such option: --speed"),
        (["fly"], "No such command 'fly'"),
        (["run", "broken.toml"], "broken.toml: workloads: is missing"),
        (["run", "--weights", "unknown/weights"], "--weights unknown/weights: name the model that they are of"),
        (["report", "nowhere"], "nowhere: is no run folder"),
        (["report", "one", "two"], "report: name --output DIR for a report of several runs"),
        (["compare", "nowhere", "nowhere"], "nowhere: is no run folder"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, tmp_path, monkeypatch, capsys):
    from arkbench import cli

    (tmp_path / "broken.toml").write_text('name = "b"\ntitle = "B"\nmodels = ["SmolLM2-135M"]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["arkbench", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    error = capsys.readouterr().err
    assert exit_.value.code == 2
    assert error.startswith(f"arkbench: {message}")
    assert error.count("\n") == 1


def test_an_unknown_option_is_exit_code_2(tmp_path):
    done = arkbench("run", "--fast", cwd=tmp_path)
    assert done.returncode == 2
    assert "--fast" in done.stderr and "Traceback" not in done.stderr


def test_the_dry_run_shows_cells_time_and_memory_and_writes_nothing(tmp_path):
    done = arkbench("run", "quick", "--dry-run", "--users", "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "note: quick: --users means nothing to this scenario and is ignored" in done.stdout
    assert "decode-s8-c64" in done.stdout and "GB" in done.stdout and "6 cells, about" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_list_has_everything(tmp_path):
    done = arkbench("list", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in ("pipelined-prefill", "fused-decode-16", "gpt-oss-20b", "cache_dtype", "ark-2.1"):
        assert word in done.stdout


def test_a_run_ends_with_table_verdicts_and_report(tmp_path):
    done = arkbench(*SMALL, "--repetitions", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "results" / "runs").iterdir()
    assert run.name.startswith("quick-SmolLM2-135M-layers-2-")
    for name in ("run.json", "requests.jsonl", "cells.csv", "summary.csv", "verdicts.csv", "report.md", "report.html"):
        assert (run / name).stat().st_size > 0, name
    assert json.loads((run / "run.json").read_text())["status"] == "complete"
    assert len(read_rows(run / "verdicts.csv")) == 38
    assert {r["valid"] for r in read_rows(run / "cells.csv")} == {"true"}
    assert "Verdicts" in done.stdout and "report.html" in done.stdout
    again = arkbench("report", run, "--output", tmp_path / "again", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again" / "report.html").exists()


def wait_for_cells(path, count, process):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and len(path.read_text().splitlines()) > count:
            return
        time.sleep(0.05)
    raise AssertionError("the run ended before it could be stopped")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_keeps_its_cells_and_resumes(tmp_path, how):
    run = tmp_path / "run"
    line, options = command(*SMALL, "--repetitions", "5", "--output", run, cwd=tmp_path)
    # a process started in the background of a shell inherits that Ctrl-C is ignored
    process = subprocess.Popen(line, **options, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    wait_for_cells(run / "cells.csv", 2, process)
    process.send_signal(how)
    process.communicate(timeout=120)
    assert process.returncode == (130 if how == signal.SIGINT else -9)
    assert json.loads((run / "run.json").read_text())["status"] == "partial"
    if how == signal.SIGINT:
        assert "partial" in (run / "report.md").read_text()
    before = [r for r in read_rows(run / "cells.csv") if r["status"] == "complete"]
    assert len(before) >= 2
    done = arkbench("run", "--resume", run, "--no-report", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    after = read_rows(run / "cells.csv")
    assert len(after) == 20 and {r["status"] for r in after} == {"complete"}
    assert after[: len(before)] == before
