"""Runs with a fake target: order, files, interruption, resume, failures."""

import json
from datetime import datetime

import pytest

from arkbench import folder as folders
from arkbench import runner as runners
from arkbench.errors import UserError
from arkbench.folder import RunFolder
from arkbench.plan import RunOptions, make_plan
from arkbench.progress import RemainingTime, SilentProgress, duration
from arkbench.records import CELL_COLUMNS, REQUEST_KEYS, SUMMARY_COLUMNS, read_requests, read_rows
from arkbench.runner import Runner
from arkbench.scenario import Overrides
from arkbench.targets.base import TargetError
from tests.harness.fakes import FakeTarget, tools

OPTIONS = RunOptions(overrides=Overrides(streams=(2,), output_tokens=(6,), context_tokens=(16,), prompt_tokens=(32,)))


def execute(path, target, options=OPTIONS, resume=False):
    plan = make_plan(options)
    run_folder = (
        RunFolder.resume(path, plan) if resume else RunFolder.create(path, plan, ["run", "--api-key", "secret"])
    )
    status = Runner(plan, run_folder, tools(target), SilentProgress()).run()
    run_folder.finish(status)
    return status


def test_a_complete_run_has_every_row(tmp_path):
    log = []
    assert execute(tmp_path / "r", FakeTarget(log)) == "complete"
    rows = read_rows(tmp_path / "r" / "cells.csv")
    assert list(rows[0]) == list(CELL_COLUMNS)
    assert len(rows) == 2 * 2 * 3
    assert {r["valid"] for r in rows} == {"true"}
    decode = next(r for r in rows if r["workload"] == "decode")
    assert float(decode["decode_tok_s"]) == pytest.approx(2000, rel=1e-3)
    assert float(decode["stream_tok_s"]) == pytest.approx(1000, rel=1e-3)
    assert float(decode["ttft_p50_s"]) == pytest.approx(0.01)
    assert float(decode["tpot_p50_s"]) == pytest.approx(0.001)
    assert decode["energy_j"] == decode["prefill_tok_s"] == decode["at_once"] == decode["prompt_tokens"] == ""
    assert decode["cached_tokens"] == "0"
    prefill = next(r for r in rows if r["workload"] == "prefill")
    assert float(prefill["prefill_tok_s"]) == pytest.approx(3200, rel=1e-3)
    assert prefill["decode_tok_s"] == prefill["streams"] == ""
    summary = read_rows(tmp_path / "r" / "summary.csv")
    assert list(summary[0]) == list(SUMMARY_COLUMNS)
    assert [r["repetitions"] for r in summary] == ["3"] * 4


def test_requests_are_stored_to_the_letter(tmp_path):
    execute(tmp_path / "r", FakeTarget([]))
    lines = (tmp_path / "r" / "requests.jsonl").read_text().splitlines()
    assert len(lines) == 2 * 3 * (2 + 1)
    assert tuple(json.loads(lines[0])) == REQUEST_KEYS
    assert json.loads(lines[0])["token_counts"] == [1] * 6


def test_provenance_without_the_key(tmp_path):
    execute(tmp_path / "r", FakeTarget([]))
    text = (tmp_path / "r" / "run.json").read_text()
    info = json.loads(text)
    assert "secret" not in text
    assert info["command"] == "arkbench run --api-key '***'"
    assert info["status"] == "complete"
    assert info["scenario"]["hash"] == info["scenarios"][0]["hash"]
    assert info["switches"]["fused"]["kernels"] == "fused"
    assert info["start_seconds"]["fused"]["weights"] == 1.0
    assert info["bandwidth_bytes_s"] == 1e9
    assert info["device"] == "cpu"
    for key in ("arkbench_version", "gpus", "driver", "torch", "triton", "cpu", "seed", "host", "start_utc", "end_utc"):
        assert key in info


def test_variants_alternate_and_cells_are_warmed_up_once_a_start(tmp_path):
    log = []
    execute(tmp_path / "r", FakeTarget(log))
    starts = [entry[1] for entry in log if entry[0] == "start"]
    assert starts == ["standard", "fused", "standard", "fused"]
    loads = [entry for entry in log if entry[0] == "load"]
    assert len(loads) == 2 * 2 * 3 + 4 * 2
    assert {entry[2:] for entry in log if entry[0] == "start"} == {(2, 38, 256)}


def test_ctrl_c_keeps_what_was_answered_and_resume_runs_the_rest(tmp_path):
    path = tmp_path / "r"
    # Loads 1 to 4 are two warm-ups and two cells; the fifth is the warm-up of the other variant, the sixth its cell.
    assert execute(path, FakeTarget([], interrupt_at=6)) == "partial"
    rows = read_rows(path / "cells.csv")
    assert [r["status"] for r in rows] == ["complete", "complete", "partial"]
    assert len(read_requests(path)) == 2 + 1 + 1
    log = []
    assert execute(path, FakeTarget(log), resume=True) == "complete"
    rows = read_rows(path / "cells.csv")
    assert [r["status"] for r in rows] == ["complete"] * 12
    assert len({(r["variant"], r["cell"], r["repetition"]) for r in rows}) == 12
    assert len(read_requests(path)) == 18
    assert len((path / "requests.interrupted.jsonl").read_text().splitlines()) == 1
    assert sum(entry[0] == "load" and entry[3] == 6 for entry in log) >= 5


def test_a_torn_last_line_is_left_out_on_resume(tmp_path):
    path = tmp_path / "r"
    execute(path, FakeTarget([], interrupt_at=6))
    for name in ("requests.jsonl", "cells.csv"):
        with (path / name).open("a") as file:
            file.write('{"scenario": "quick", "vari')
    assert execute(path, FakeTarget([]), resume=True) == "complete"
    assert len(read_rows(path / "cells.csv")) == 12


def test_a_complete_run_resumes_to_nothing(tmp_path):
    execute(tmp_path / "r", FakeTarget([]))
    log = []
    assert execute(tmp_path / "r", FakeTarget(log), resume=True) == "complete"
    assert log == []


def test_a_changed_scenario_is_not_resumed(tmp_path):
    execute(tmp_path / "r", FakeTarget([]))
    info = json.loads((tmp_path / "r" / "run.json").read_text())
    info["scenarios"][0]["hash"] = "0"
    (tmp_path / "r" / "run.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match="has changed since that run"):
        RunFolder.resume(tmp_path / "r", make_plan(OPTIONS))


def test_other_options_are_not_resumed(tmp_path):
    execute(tmp_path / "r", FakeTarget([]))
    stored = folders.stored_options(tmp_path / "r", None)
    assert stored == OPTIONS
    with pytest.raises(UserError, match="seed differ"):
        folders.check_options(tmp_path / "r", RunOptions(seed=9), stored)


def test_two_runs_in_the_same_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan, now = make_plan(OPTIONS), datetime(2026, 12, 1, 12, 0, 0)
    first, second = (folders.default_path(plan, now) for _ in range(2))
    assert first.name == "quick-SmolLM2-135M-20261201-120000"
    assert second.name == "quick-SmolLM2-135M-20261201-120000-2"


def test_there_is_room_for_all_streams_of_a_decode_cell():
    assert (
        make_plan(RunOptions(overrides=Overrides(streams=(1000,)))).scenarios[0].needs("SmolLM2-135M").streams == 1000
    )


def test_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "x").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        RunFolder.create(tmp_path, make_plan(OPTIONS), [])


def test_a_variant_that_cannot_start_is_skipped_and_named(tmp_path):
    error = ("fused", TargetError("cache=paged is not available"))
    assert execute(tmp_path / "r", FakeTarget([], error=error)) == "partial"
    rows = read_rows(tmp_path / "r" / "cells.csv")
    skipped = [r for r in rows if r["variant"] == "fused"]
    assert {(r["status"], r["valid"], r["reason"]) for r in skipped} == {
        ("skipped", "false", "cache=paged is not available"),
    }  # fmt: skip
    assert {r["decode_tok_s"] for r in skipped} == {""}


def test_nothing_that_starts_is_a_failed_run(tmp_path):
    class Broken(FakeTarget):
        def start(self, *_):
            raise TargetError("does not fit")

    assert execute(tmp_path / "r", Broken([])) == "failed"


def test_prompts_of_a_run_are_all_distinct(tmp_path):
    seen = []

    class Recording(FakeTarget):
        def run(self, load, on_answer):
            seen.extend((self.kernels, r.prompt[0]) for r in load.requests)
            return super().run(load, on_answer)

    execute(tmp_path / "r", Recording([]))
    for kernels in ("standard", "fused"):
        firsts = [first for name, first in seen if name == kernels]
        warm_ups = 2 * 3
        assert len(set(firsts)) >= len(firsts) - warm_ups // 2


def test_conversations_grow_by_the_real_answers(tmp_path):
    loads = []

    class Recording(FakeTarget):
        def run(self, load, on_answer):
            loads.append([list(r.prompt) for r in load.requests])
            return super().run(load, on_answer)

    scenario = tmp_path / "talk.toml"
    scenario.write_text(
        'name = "talk"\ntitle = "T"\nmodels = ["SmolLM2-135M"]\nrepetitions = 1\n[[workloads]]\n'
        'type = "conversation"\nusers = 2\nturns = 3\nstreams = 2\nshared_tokens = 20\nturn_tokens = 10\n'
        "output_tokens = 5\n"
    )
    assert execute(tmp_path / "r", Recording([]), RunOptions(scenarios=(str(scenario),))) == "complete"
    _, first, second, third = loads
    assert [len(p) for p in first] == [30, 30]
    assert [len(p) for p in third] == [60, 60]
    assert first[0][:20] == first[1][:20]
    assert first[0][20] != first[1][20]
    answer = [(sum(first[0]) + i) % 1000 for i in range(5)]
    assert second[0][:35] == first[0] + answer


def test_a_cold_cell_has_its_own_start_and_no_warm_up(tmp_path):
    scenario = tmp_path / "cold.toml"
    scenario.write_text(
        'name = "cold"\ntitle = "T"\nmodels = ["SmolLM2-135M"]\nrepetitions = 2\n[[workloads]]\n'
        'type = "prefill"\nprompt_tokens = 10\n[[workloads]]\ntype = "prefill"\nprompt_tokens = 20\ncold = true\n'
    )
    log = []
    execute(tmp_path / "r", FakeTarget(log), RunOptions(scenarios=(str(scenario),)))
    kinds = [entry[0] for entry in log]
    assert kinds == ["start", "load", "load", "load", "close", "start", "load", "load", "load", "close"]


def test_remaining_time_is_corrected_by_what_cells_and_starts_took():
    left = RemainingTime(cost=10.0, starts=2, now=100.0)
    assert left.seconds(101.0, 100.0) is None
    left.done(2.0, {"scenario": "s", "model": "a", "duration_s": 1.0})
    # 5 s beside the cell for the first of two models, and 8 / 2 times the cell's 1 s
    assert left.seconds(106.0, 106.0) == pytest.approx(9.0)
    assert left.seconds(110.0, 106.0) == pytest.approx(5.0)
    assert [duration(s) for s in (45, 200, 7500, 273_600)] == [
        "45 s",
        "3 min 20 s",
        "2 h 5 min",
        "3 days 4 h",
    ]


def test_a_fault_of_one_model_is_kept_and_the_run_goes_on(tmp_path):
    scenario = tmp_path / "two.toml"
    scenario.write_text(
        'name = "two"\ntitle = "T"\nmodels = ["SmolLM2-135M", "Llama-3.2-1B"]\nrepetitions = 2\n[[workloads]]\n'
        'type = "prefill"\nprompt_tokens = 10\n'
    )

    class Faulty(FakeTarget):
        def start(self, *arguments, **more):
            self.starts = getattr(self, "starts", 0) + 1
            if self.starts == 1:
                raise RuntimeError("does not compile\nat line 3")
            return super().start(*arguments, **more)

    log = []
    execute(tmp_path / "r", Faulty(log), RunOptions(scenarios=(str(scenario),)))
    rows = read_rows(tmp_path / "r" / "cells.csv")
    assert [(row["model"], row["status"]) for row in rows] == [
        ("SmolLM2-135M", "failed"), ("SmolLM2-135M", "skipped"), ("Llama-3.2-1B", "complete"),
        ("Llama-3.2-1B", "complete"),
    ]  # fmt: skip
    assert rows[0]["valid"] == "false"
    assert rows[0]["reason"] == "unexpected RuntimeError: does not compile (see errors.log in the run folder)"
    assert "Traceback" in (tmp_path / "r" / "errors.log").read_text()
    assert json.loads((tmp_path / "r" / "run.json").read_text())["status"] == "partial"


def test_client_that_was_the_limit_makes_a_cell_invalid():
    from arkbench.targets.base import LoadReport

    row = {"valid": True, "reason": ""}
    runners._judge_client(row, [LoadReport(), LoadReport(False, "the client was the limit: lag 80 ms")])
    assert row == {"valid": False, "reason": "the client was the limit: lag 80 ms"}


def test_a_device_without_room_for_the_measurement_of_its_rates_is_named(monkeypatch):
    def full(device):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation")

    monkeypatch.setattr("arkbench.machine.copy_bandwidth", full)
    with pytest.raises(UserError, match=r"^cuda: its memory bandwidth cannot be measured \(CUDA out of memory"):
        runners.measure_rates("cuda", 1)
