"""A model over several processes gives the tokens that it gives in one, whatever drives the steps."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from engine.config import EngineConfig, EngineError, Switches
from engine.engine import Engine
from engine.request import Request, SamplingParams
from tests.engine.conftest import reference
from tests.engine.helpers import generate, prompt_of

LENGTHS = (1, 3, 16, 17, 40, 65)
FAMILIES = {"qwen3": {"num_hidden_layers": 4}, "qwen3_moe": {"num_hidden_layers": 4}, "qwen3_5": {}}
SOAK_REQUESTS = 2000

MODES = [
    {"loop": loop, "prefill": prefill, "prefill_batching": batching}
    for loop in ("driven", "inverted")
    for prefill, batching in (("whole", "off"), ("sequential", "on"), ("pipelined", "on"), ("pipelined", "off"))
] + [{"decode_batching": "off", "loop": "driven"}, {"decode_batching": "off"}]


def load(folder, stages=1, **options):
    switches = Switches(weights_dtype="fp32").with_(options.pop("switches", {}))
    config = {"max_streams": 6, "max_model_len": 128, "page_size": 16, **options}
    return Engine.load(EngineConfig("", weights=str(folder), stages=stages, switches=switches, **config))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, changes in FAMILIES.items():
        made[name] = tmp_path_factory.mktemp("stages") / name
        reference(name, **changes).save_pretrained(made[name])
    return made


@pytest.fixture(scope="module")
def prompts():
    return [prompt_of(length, i) for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def alone(folders, prompts):
    """Every family's tokens, one request at a time in one process."""
    tokens = {}
    for name, folder in folders.items():
        engine = load(folder, switches={"loop": "driven"})
        tokens[name] = [generate(engine, [prompt], tokens=6)[0] for prompt in prompts]
    return tokens


def cut_prompts(engine, most):
    engine.scheduler.prefill_tokens = engine.scheduler.sizer.most = most


@pytest.mark.parametrize(("name", "stages"), [("qwen3", 4), ("qwen3_moe", 2), ("qwen3_5", 3)])
def test_tokens_do_not_depend_on_stages_loops_or_pieces(name, stages, folders, prompts, alone):
    engine = load(folders[name], stages)
    try:
        for mode in MODES:
            engine.set_switches(engine.config.switches.with_(mode))
            for most in (7, 64):
                cut_prompts(engine, most)
                assert generate(engine, prompts, tokens=6) == alone[name], (mode, most)
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_the_prompt_cache_over_stages_changes_no_token(name, folders, prompts, alone):
    engine = load(folders[name], 2, switches={"prompt_cache": "on"}, max_streams=3)
    try:
        for _ in range(3):
            for i, prompt in enumerate(prompts):
                engine.add(Request(str(i), prompt, SamplingParams(max_tokens=6, ignore_eos=True)))
            made, cached = {str(i): [] for i in range(len(prompts))}, 0
            while engine.has_work():
                for event in engine.step():
                    made[event.request_id] += event.tokens
                    cached += event.cached_tokens
            assert [made[str(i)] for i in range(len(prompts))] == alone[name]
        assert cached >= 16 + 32 + 64
    finally:
        engine.close()


def test_memory_pressure_and_log_probabilities_over_stages(folders, prompts, alone):
    """Preempted requests are computed again; log probabilities and drawn tokens are those of one process."""
    wishes = {"temperature": 0.8, "top_k": 20, "seed": 3}
    whole = load(folders["qwen3"])
    drawn = generate(whole, prompts, tokens=6, **wishes)
    expected = logprobs_of(whole, prompts[4])
    engine = load(folders["qwen3"], 2, cache_tokens=112)
    try:
        assert generate(engine, prompts, tokens=6) == alone["qwen3"]
        assert generate(engine, prompts, tokens=6, **wishes) == drawn
        found = logprobs_of(engine, prompts[4])
    finally:
        engine.close()
    assert [own for own, _ in found] == pytest.approx([own for own, _ in expected], abs=1e-5)
    assert [list(best) for _, best in found] == [list(best) for _, best in expected]


def logprobs_of(engine, prompt):
    engine.add(Request("a", prompt, SamplingParams(max_tokens=3, ignore_eos=True, logprobs=2, min_tokens=2)))
    found = []
    while engine.has_work():
        found += [event.logprobs[0] for event in engine.step()]
    return found


def test_random_traffic_over_two_stages(folders):
    """Random lengths and cancellations in a small pool of pages: every answer right, every page back."""
    draw = random.Random(5)
    wanted = [(prompt_of(draw.randint(1, 40), i), draw.randint(1, 12)) for i in range(SOAK_REQUESTS)]
    single = load(folders["qwen3"], max_streams=4)
    expected = {}
    for i, (prompt, tokens) in enumerate(wanted):
        expected[str(i)] = generate(single, [prompt], tokens=tokens)[0]
    engine = load(folders["qwen3"], 2, max_streams=4, cache_tokens=128, prefill_tokens=24)
    free, made, ends = engine.pool.free, {name: [] for name in expected}, {}
    waiting = list(expected)
    try:
        while waiting or engine.has_work():
            while waiting and len(made) - len(waiting) - len(ends) < 8:
                name = waiting.pop(0)
                prompt, tokens = wanted[int(name)]
                engine.add(Request(name, prompt, SamplingParams(max_tokens=tokens, ignore_eos=True)))
            for event in engine.step():
                made[event.request_id] += event.tokens
                if event.finished:
                    ends[event.request_id] = event.finished
            if draw.random() < 0.05:
                running = [name for name in made if name not in ends and name not in waiting]
                if running:
                    engine.cancel(draw.choice(running))
        assert engine.pool.free == free
    finally:
        engine.close()
    cancelled = {name for name, end in ends.items() if end == "cancelled"}
    assert 0 < len(cancelled) < len(made) / 2
    for name, tokens in made.items():
        assert tokens == (expected[name][: len(tokens)] if name in cancelled else expected[name])


def test_too_many_stages_are_refused(folders):
    with pytest.raises(EngineError, match="a model of 4 layers takes 1 to 4 stages"):
        load(folders["qwen3"], 5)


def test_the_time_line_names_every_piece_on_every_stage(folders, tmp_path):
    path = tmp_path / "timeline.jsonl"
    engine = load(folders["qwen3"], 2, timeline=str(path), prefill_tokens=32, switches={"prefill": "sequential"})
    try:
        generate(engine, [prompt_of(64, 1), prompt_of(40, 2)], tokens=2)
    finally:
        engine.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {tuple(line) for line in lines} == {("stage", "kind", "request", "piece", "start_s", "end_s")}
    read = [(line["request"], line["piece"]) for line in lines if line["stage"] == 1 and line["kind"] == "prefill"]
    assert read == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for stage in (0, 1):
        own = [line for line in lines if line["stage"] == stage]
        assert all(line["start_s"] < line["end_s"] for line in own)
        assert all(a["end_s"] <= b["start_s"] + 1e-9 for a, b in itertools.pairwise(own))
