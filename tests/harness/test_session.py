"""One model loaded once for several variants and scenarios; what becomes of a model that cannot be started."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from arkbench import cli, commands
from arkbench.folder import RunFolder
from arkbench.metrics import Machine
from arkbench.plan import Needs, RunOptions, batches, make_plan
from arkbench.progress import SilentProgress
from arkbench.records import read_rows, read_run
from arkbench.runner import Runner, Tools
from arkbench.scenario import Overrides
from arkbench.targets.base import LoadReport, TargetError
from tests.harness.fakes import FakeTarget, NoMeter

HEAD = 'name = "{name}"\ntitle = "T"\nmodels = ["SmolLM2-135M"]\nrepetitions = {repetitions}\n'
LOOPS = '[matrix]\nswitches = {{ loop = ["driven", "inverted"] }}\n'
PREFILL = '[[workloads]]\ntype = "prefill"\nprompt_tokens = {tokens}\n'


def scenario(folder, name, body, repetitions=1):
    path = folder / f"{name}.toml"
    path.write_text((HEAD + body).format(name=name, repetitions=repetitions, tokens=100))
    return str(path)


def run(path, options, make_target, resume=False):
    plan = make_plan(options)
    folder = RunFolder.resume(path, plan) if resume else RunFolder.create(path, plan, ["run"])
    tools = Tools(make_target, NoMeter, lambda: Machine(1e9, 1e9), "cpu")
    status = Runner(plan, folder, tools, SilentProgress()).run()
    folder.finish(status)
    return status


def kinds(log):
    return [entry[0] for entry in log]


def test_scenarios_of_one_model_share_a_target_and_the_largest_room(tmp_path):
    files = (scenario(tmp_path, "a", LOOPS + PREFILL), scenario(tmp_path, "b", PREFILL.replace("{tokens}", "150")))
    log, made = [], []

    def make_target(plan, model, variant):
        made.append((plan.scenario.name, model))
        return FakeTarget(log)

    assert run(tmp_path / "r", RunOptions(scenarios=files), make_target) == "complete"
    assert made == [("a", "SmolLM2-135M")]
    assert [entry[2:] for entry in log if entry[0] == "start"] == [(1, 151, 256)] * 3
    assert kinds(log).count("close") == 1
    assert [(r["scenario"], r["variant"]) for r in read_rows(tmp_path / "r" / "cells.csv")] == [
        ("a", "driven"), ("a", "inverted"), ("b", "best"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        PREFILL + "cache_tokens = 6400\n",
        '[matrix]\nswitches = {{ cache = ["contiguous", "paged"] }}\n' + PREFILL,
        'target = "http"\n' + PREFILL,
        PREFILL.replace("{tokens}", "300"),
    ],
    ids=["its own cache", "contiguous cache", "a server", "requests three times as long"],
)
def test_a_scenario_whose_figures_a_larger_room_could_change_has_its_own(tmp_path, body):
    files = (scenario(tmp_path, "a", PREFILL), scenario(tmp_path, "b", body))
    found = batches(make_plan(RunOptions(scenarios=files)).scenarios)
    assert [[plan.scenario.name for plan in batch.plans] for batch in found] == [["a"], ["b"]]


def test_the_order_is_model_by_model(tmp_path):
    two = 'models = ["SmolLM2-135M", "Llama-3.2-1B"]'
    files = [scenario(tmp_path, name, PREFILL) for name in ("a", "b")]
    for file in map(Path, files):
        file.write_text(file.read_text().replace('models = ["SmolLM2-135M"]', two))
    found = batches(make_plan(RunOptions(scenarios=tuple(files))).scenarios)
    assert [(b.model, len(b.plans), b.needs) for b in found] == [
        ("SmolLM2-135M", 2, Needs(1, 101, 192)), ("Llama-3.2-1B", 2, Needs(1, 101, 192)),
    ]  # fmt: skip


def test_a_variant_whose_start_is_a_claim_is_started_afresh(tmp_path):
    log = []
    options = RunOptions(overrides=Overrides(streams=(1,), context_tokens=(8,), repetitions=2))
    run(tmp_path / "r", options, lambda *_: FakeTarget(log))
    starts = [(before, entry[1]) for before, entry in zip(["", *kinds(log)], log, strict=False) if entry[0] == "start"]
    assert starts == [("", "standard"), ("close", "fused"), ("load", "standard")]


def test_turned_switches_are_no_start(tmp_path):
    class Turning(FakeTarget):
        def start(self, switches, *room):
            first = not any(entry[0] == "start" for entry in self.log)
            return replace(super().start(switches, *room), loaded=first)

    file = scenario(tmp_path, "a", LOOPS + PREFILL)
    run(tmp_path / "r", RunOptions(scenarios=(file,)), lambda *_: Turning([]))
    starts = read_run(tmp_path / "r")["start_seconds"]
    assert set(starts["driven"]) == {"weights", "total"}
    assert set(starts["inverted"]) == {"switches turned"}


def test_in_process_and_http_are_never_loaded_together(tmp_path):
    body = '[variants.here]\n[variants.there]\ntarget = "http"\n' + PREFILL
    logs = {"in-process": [], "http": []}
    together = []

    def make_target(plan, model, variant):
        return FakeTarget(Both(variant.target))

    class Both(list):
        def __init__(self, kind):
            self.kind = kind

        def append(self, entry):
            logs[self.kind].append(entry[0])
            together.append((self.kind, entry[0]))

    options = RunOptions(scenarios=(scenario(tmp_path, "a", body, repetitions=2),))
    assert run(tmp_path / "r", options, make_target) == "complete"
    assert [entry for entry in together if entry[1] != "load"] == [
        ("in-process", "start"), ("in-process", "close"), ("http", "start"), ("http", "close"),
        ("in-process", "start"), ("in-process", "close"), ("http", "close"),
    ]  # fmt: skip


def test_variants_of_one_name_keep_their_own_switches(tmp_path):
    a = scenario(tmp_path, "a", '[variants.on]\nswitches = {{ prompt_cache = "on" }}\n' + PREFILL)
    b = scenario(tmp_path, "b", '[variants.on]\nswitches = {{ prompt_cache = "off" }}\n' + PREFILL)
    plan = make_plan(RunOptions(scenarios=(a, b)))
    assert {name: s["prompt_cache"] for name, s in plan.switches().items()} == {"a/on": "on", "b/on": "off"}


# -------------------------------------------------------------------------------------------------- failures


class Failing(FakeTarget):
    """`at`: number of the load that meets a fault; `stuck`: it cannot be closed either."""

    def __init__(self, log, at, stuck=False):
        super().__init__(log)
        self.at, self.stuck = at, stuck

    def run(self, load, on_answer):
        if self.loads + 1 == self.at:
            self.loads += 1
            raise RuntimeError("illegal memory access")
        return super().run(load, on_answer)

    def close(self):
        super().close()
        if self.stuck:
            raise RuntimeError("cannot be closed")


@pytest.mark.parametrize("stuck", [False, True])
def test_a_cell_with_a_fault_is_not_tried_again_and_the_others_are_measured(tmp_path, stuck):
    body = PREFILL + '[[workloads]]\ntype = "prefill"\nprompt_tokens = 20\n'
    options = RunOptions(scenarios=(scenario(tmp_path, "a", body, repetitions=2),))
    made = iter([Failing([], 2, stuck), FakeTarget([]), FakeTarget([])])
    assert run(tmp_path / "r", options, lambda *_: next(made)) == "partial"
    rows = read_rows(tmp_path / "r" / "cells.csv")
    assert [(r["cell"], r["status"]) for r in rows] == [
        ("prefill-p100", "failed"), ("prefill-p20", "complete"), ("prefill-p100", "skipped"),
        ("prefill-p20", "complete"),
    ]  # fmt: skip
    assert {r["reason"] for r in rows if r["cell"] == "prefill-p100"} == {
        "unexpected RuntimeError: illegal memory access (see errors.log in the run folder)"
    }
    errors = (tmp_path / "r" / "errors.log").read_text()
    assert ("cannot be closed" in errors) == stuck
    log = []
    assert run(tmp_path / "r", options, lambda *_: FakeTarget(log), resume=True) == "complete"
    assert kinds(log).count("load") == 3


def test_a_target_that_dies_while_it_is_warmed_up_is_started_again(tmp_path):
    class Dying(FakeTarget):
        def run(self, load, on_answer):
            if self.loads == 0:
                self.loads += 1
                raise TargetError("the engine stopped")
            assert self.log[-1][0] in ("start", "load")
            self.log.append(("load",))
            super().run(load, on_answer)
            return LoadReport()

    log = []
    options = RunOptions(scenarios=(scenario(tmp_path, "a", PREFILL, repetitions=2),))
    assert run(tmp_path / "r", options, lambda *_: Dying(log)) == "partial"
    assert kinds(log)[:2] == ["start", "start"]
    assert [r["status"] for r in read_rows(tmp_path / "r" / "cells.csv")] == ["skipped", "complete"]


def test_ctrl_c_while_a_model_is_loaded_is_no_fault(tmp_path):
    class Interrupted(FakeTarget):
        def start(self, *_):
            raise KeyboardInterrupt

    options = RunOptions(scenarios=(scenario(tmp_path, "a", PREFILL, repetitions=2),))
    log = []
    assert run(tmp_path / "r", options, lambda *_: Interrupted(log)) == "partial"
    assert not (tmp_path / "r" / "errors.log").exists()
    assert kinds(log) == ["close"] and read_rows(tmp_path / "r" / "cells.csv") == []


SMALL = ["run", "--model", "SmolLM2-135M@layers=1", "--device", "cpu", "--no-energy", "--no-report"]
TWO = ["--model", "SmolLM2-135M@layers=2", "--set", "kernels=fused", "--set", "weights_dtype=fp32"]
CELLS = ["--streams", "1", "--context", "8", "--output-tokens", "4", "--prompt-tokens", "8", "--repetitions", "1"]


def test_an_engine_that_breaks_at_its_start_costs_its_own_model_only(tmp_path, monkeypatch):
    from engine.engine import Engine

    load = Engine.load

    def breaking(config):
        if config.model.endswith("layers=1"):
            raise RuntimeError("CompilationError: at 12:4\n  no such instruction")
        return load(config)

    monkeypatch.setattr(Engine, "load", staticmethod(breaking))
    out = tmp_path / "r"
    done = CliRunner().invoke(cli.app, [*SMALL, *TWO, *CELLS, "--output", str(out)])
    assert done.exit_code == commands.EXIT_FAILED, done.output
    rows = read_rows(out / "cells.csv")
    by_model = {(r["model"], r["status"]) for r in rows}
    assert ("SmolLM2-135M@layers=2", "complete") in by_model and ("SmolLM2-135M@layers=1", "failed") in by_model
    assert ("SmolLM2-135M@layers=1", "complete") not in by_model
    assert "no such instruction" in (out / "errors.log").read_text()
    assert done.output.count("unexpected RuntimeError: CompilationError: at 12:4") >= 1
    assert not (out / "report.md").exists()
    monkeypatch.setattr(Engine, "load", staticmethod(load))
    again = CliRunner().invoke(cli.app, ["run", "--resume", str(out), "--no-report"])
    assert again.exit_code == 0, again.output
    rows = read_rows(out / "cells.csv")
    assert {r["status"] for r in rows} == {"complete"} and len(rows) == 4
    assert {"starts", "warm-ups", "cells"} <= set(json.loads((out / "run.json").read_text())["seconds"])


def test_an_engine_that_breaks_while_it_runs_gives_its_memory_back(tmp_path, monkeypatch):
    from arkbench.targets.bundled import BundledTarget, resolve_switches
    from engine.engine import Engine

    target = BundledTarget("SmolLM2-135M@layers=1", "random", "cpu", 1, 0)
    assert target.start(resolve_switches("best", {}), 1, 64, 128).loaded
    assert not target.start(resolve_switches("best", {"loop": "driven"}), 1, 64, 128).loaded

    def broken(self):
        raise RuntimeError("gone")

    monkeypatch.setattr(Engine, "close", broken)
    with pytest.raises(RuntimeError, match="gone"):
        target.close()
    assert target._engine is None
    monkeypatch.undo()
    assert target.start(resolve_switches("best", {}), 1, 64, 128).loaded
    target.close()


# --------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("name", "values", "option"),
    [
        ("models", {"duration_s": 10.0}, "--duration"),
        ("prompt-caching", {"context_tokens": (64,)}, "--context"),
        ("quick", {"cache_tokens": 640}, "--cache-tokens"),
        ("quick", {"users": (4,)}, "--users"),
        ("kernels", {"streams": (4,)}, "--streams"),
    ],
)
def test_an_option_without_a_meaning_is_named(name, values, option):
    (one,) = make_plan(RunOptions(scenarios=(name,), overrides=Overrides(**values))).scenarios
    assert f"{name}: {option} means nothing to this scenario and is ignored" in one.notes


def test_an_option_with_a_meaning_is_not_named():
    plan = make_plan(RunOptions(scenarios=("quick",), overrides=Overrides(streams=(1,), output_tokens=(8,))))
    assert not any("ignored" in note for note in plan.scenarios[0].notes)


def test_a_shortened_window_is_named():
    plan = make_plan(RunOptions(scenarios=("decode-batching",), overrides=Overrides(duration_s=10.0)))
    (one,) = plan.scenarios
    assert {c.duration_s for c in one.cells if c.workload == "sustained"} == {10.0}
    assert one.notes == (
        "decode-batching: sustained windows of 10 s in place of the scenario's 120 s (--duration)",
    )  # fmt: skip


def test_a_conversation_shrinks():
    overrides = Overrides(users=(4,), shared_tokens=100, turn_tokens=10, output_tokens=(4,), prompt_tokens=(60,))
    (one,) = make_plan(RunOptions(scenarios=("prompt-caching",), overrides=overrides)).scenarios
    assert {c.id for c in one.cells} == {
        "conversation-u4-t1-s1-x100", "conversation-u4-t1-s8-x100", "conversation-u4-t10-s1-x100", "burst-n1-p60",
        "burst-n16-p60",
    }  # fmt: skip
    assert one.needs("Qwen3-8B").tokens == 100 + 10 * 10 + 9 * 4 + 4
