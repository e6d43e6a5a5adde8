"""The scenarios of large machines on a CPU, made small by options alone."""

from typer.testing import CliRunner

from arkbench import cli
from arkbench.records import read_rows, read_run

MODEL = ["--model", "SmolLM2-135M@layers=1", "--device", "cpu", "--repetitions", "1", "--set", "weights_dtype=fp32"]


def run(folder, *arguments):
    done = CliRunner().invoke(cli.app, ["run", *arguments, *MODEL, "--output", str(folder)])
    assert done.exit_code == 0, done.output
    return read_rows(folder / "cells.csv"), read_run(folder)


def test_caching_scenarios_run_on_a_cpu(tmp_path):
    small = "--streams 2 --context 64 --at-once 4 --prompt-tokens 64 --output-tokens 4 --users 3 --shared-tokens 130"
    names = ("paged-attention", "prefill-batching", "prompt-caching")
    rows, info = run(
        tmp_path / "r", *names, *small.split(), "--turn-tokens", "10", "--cache-tokens", "640", "--no-report"
    )
    assert {(r["status"], r["valid"], r["reason"]) for r in rows} == {("complete", "true", "")}
    assert {r["cell"] for r in rows if r["scenario"] == "prompt-caching"} == {
        "conversation-u3-t1-s2-x130", "conversation-u3-t10-s2-x130", "burst-n4-p64",
    }  # fmt: skip
    assert info["answers"]["compared"] == 6 and info["answers"]["different"] == []
    assert {"prefill-batching/on", "prompt-caching/on", "paged"} <= set(info["switches"])
    assert "energy" not in info["seconds"]


def test_the_release_comparison_with_short_windows(tmp_path):
    small = "--streams 2 --context 16 --prompt-tokens 16 --output-tokens 4 --duration 0.5 --no-energy --no-report"
    rows, info = run(tmp_path / "r", "decode-batching", *small.split())
    sustained = [r for r in rows if r["workload"] == "sustained"]
    assert {r["variant"] for r in sustained} == {"ark-1.0", "ark-2.0"}
    assert all(0.4 < float(r["duration_s"]) < 20 for r in sustained)
    note = "decode-batching: sustained windows of 0.5 s in place of the scenario's 120 s (--duration)"
    assert note in info["notes"] and info["options"]["overrides"]["duration_s"] == 0.5


def test_what_the_api_costs_is_said_in_percent_or_times(tmp_path):
    small = ["--streams", "2", "--context", "16", "--output-tokens", "48", "--no-energy"]
    rows, info = run(tmp_path / "r", "api-cost", *small)
    assert [(r["variant"], r["valid"]) for r in rows] == [("in-process", "true"), ("http", "true")]
    assert info["answers"]["compared"] == 0
    assert "http against in-process: decode throughput" in (tmp_path / "r" / "report.md").read_text()
