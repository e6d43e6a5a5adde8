"""Scenario files: what is refused and how, what is expanded and into what."""

import pytest

from arkbench import scenario as scenarios
from arkbench.errors import UserError
from arkbench.plan import RunOptions, make_plan, option_conflicts
from arkbench.scenario import Overrides

BASE = """
name = "t"
title = "T"
models = ["SmolLM2-135M"]
repetitions = 2
[[workloads]]
type = "decode"
streams = [1, 8]
context_tokens = 64
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BASE + "speed = 3\n", "x.toml: workloads[0].speed: unknown key"),
        (BASE.replace("[1, 8]", "[1, 0]"), "x.toml: workloads[0].streams[1]: input should be greater than 0"),
        (BASE.replace("[1, 8]", "[1, 1]"), "x.toml: workloads[0].streams: the same value stands in it twice"),
        (BASE.replace("[1, 8]", "[]"), "x.toml: workloads[0].streams: value should have at least 1 item"),
        (BASE.replace("[1, 8]", "true"), "x.toml: workloads[0].streams[0]: input should be a valid integer"),
        (BASE.replace('"decode"', '"decoed"'), "x.toml: workloads[0]: type must be one of decode, prefill"),
        (BASE.replace("streams = [1, 8]", ""), "x.toml: workloads[0].streams: is missing"),
        (BASE.replace("streams =", "stream ="), "x.toml: workloads[0].stream: unknown key (and 1 more)"),
        (BASE.replace('title = "T"', ""), "x.toml: title: is missing"),
        (BASE.replace("name = ", "name == "), "x.toml: is not valid TOML"),
        (BASE.replace('"t"', '"a/b"'), "x.toml: name: string should match pattern"),
        (BASE + 'variants = ["nope"]\n', "x.toml: workloads[0].variants names 'nope'"),
        (BASE.replace('"decode"', '"burst"').replace("streams", "at_once").replace("context_tokens = 64", ""),
         "x.toml: workloads[0]: give prompt_tokens or prompt_mix, one of the two"),
        (BASE + "[limits]\ngrace_s = inf\n", "x.toml: limits.grace_s: input should be a finite number"),
        (BASE.replace("64", "9" * 5000), "x.toml: is not valid TOML: Exceeds the limit"),
        ("x = " + "[" * 5000 + "]" * 5000, "x.toml: is nested too deeply"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_with_file_and_key(text, expected):
    with pytest.raises(UserError) as raised:
        scenarios.parse(text, "x.toml")
    assert str(raised.value).startswith(expected)
    assert "\n" not in str(raised.value)


def test_a_byte_order_mark_is_no_part_of_a_scenario(tmp_path):
    (tmp_path / "bom.toml").write_text(BASE, encoding="utf-8-sig")
    assert scenarios.load(str(tmp_path / "bom.toml")).text == BASE


def test_cells_have_readable_ids_in_order():
    scenario = scenarios.parse(BASE, "x.toml")
    cells = scenarios.cells_of(scenario, ["SmolLM2-135M"], ["best"])
    assert [c.id for c in cells] == ["decode-s1-c64", "decode-s8-c64"]
    assert [(c.streams, c.context_tokens, c.output_tokens) for c in cells] == [(1, 64, 128), (8, 64, 128)]


def test_several_models_are_in_the_id():
    cells = scenarios.cells_of(scenarios.parse(BASE, "x"), ["a/b", "c"], ["best"])
    assert [c.id for c in cells][::2] == ["a-b.decode-s1-c64", "c.decode-s1-c64"]


def test_matrix_is_a_product():
    text = BASE.replace("[[workloads]]", '[matrix]\nswitches = { loop = ["driven", "inverted"], kernels = ["fused"] }\n'
                        "[[workloads]]")  # fmt: skip
    variants = scenarios.parse(text, "x").all_variants()
    assert {n: v.switches for n, v in variants.items()} == {
        "driven-fused": {"loop": "driven", "kernels": "fused"},
        "inverted-fused": {"loop": "inverted", "kernels": "fused"},
    }


def test_overrides_replace_what_a_workload_has():
    scenario = scenarios.override(
        scenarios.parse(BASE, "x"), Overrides(streams=(2,), prompt_tokens=(7,), output_tokens=(5,), repetitions=1)
    )
    (cell,) = scenarios.cells_of(scenario, ["m"], ["best"])
    assert (cell.id, cell.streams, cell.prompt_tokens, cell.output_tokens) == ("decode-s2-c64", 2, None, 5)
    assert scenario.repetitions == 1


@pytest.mark.parametrize("name", list(scenarios.scenario_files()))
def test_every_shipped_scenario_can_be_planned(name):
    plan = make_plan(RunOptions(scenarios=(name,)))
    (one,) = plan.scenarios
    assert one.scenario.name == name
    assert one.cells
    assert len({(c.model, c.variant, c.id) for c in one.cells}) == len(one.cells)


def test_release_comparison_has_its_exception():
    plan = make_plan(RunOptions(scenarios=("decode-batching",)))
    sustained = {(c.model, c.variant): c.streams for c in plan.scenarios[0].cells if c.workload == "sustained"}
    assert sustained["Qwen3-8B", "ark-1.0"] == 12
    assert sustained["Qwen3.5-4B", "ark-1.0"] == 10
    assert sustained["Qwen3.5-4B", "ark-2.0"] == 64


def test_set_leaves_out_the_variant_that_contradicts_it():
    plan = make_plan(RunOptions(set_switches=("kernels=fused",)))
    (one,) = plan.scenarios
    assert [v.name for v in one.variants] == ["fused"]
    assert one.notes == ("variant 'standard' is left out: it contradicts --set",)


def test_set_of_another_switch_applies_to_all():
    plan = make_plan(RunOptions(set_switches=("loop=driven",)))
    assert [(v.name, v.switches["loop"]) for v in plan.scenarios[0].variants] == [
        ("standard", "driven"), ("fused", "driven"),
    ]  # fmt: skip


def test_prompt_numbers_are_shared_by_variants_and_by_nothing_else():
    plan = make_plan(RunOptions())
    cells = plan.scenarios[0].cells
    taken = []
    for repetition in range(-1, 3):
        for cell in {c.id: c for c in cells}.values():
            from arkbench import workloads

            count = workloads.warm_up_count(cell) if repetition < 0 else workloads.request_count(cell)
            first = plan.first_number(cell, repetition)
            taken += range(first, first + count)
    assert len(set(taken)) == len(taken)
    standard, fused = ([c for c in cells if c.variant == v] for v in ("standard", "fused"))
    assert [plan.first_number(c, 0) for c in standard] == [plan.first_number(c, 0) for c in fused]


def test_both_spellings_of_a_model_are_one():
    for name in ("Qwen3.6-35B", "qwen3.6-35b-a3b"):
        assert make_plan(RunOptions(overrides=Overrides(models=(name,)))).scenarios[0].models == ("Qwen3.6-35B-A3B",)


def test_an_endpoint_takes_the_workloads_of_every_variant_once():
    plan = make_plan(RunOptions(scenarios=("decode-batching",), endpoint="http://h"), "served")
    cells = plan.scenarios[0].cells
    assert {c.variant for c in cells} == {"endpoint"} and {c.model for c in cells} == {"served"}
    assert {c.streams for c in cells if c.workload == "sustained"} == {12, 64}


def test_options_come_back_from_json_and_conflicts_are_named():
    options = RunOptions(seed=3, overrides=Overrides(streams=(1, 8)), api_key="k")
    assert "k" not in options.stored().values()
    assert RunOptions.restored(options.stored(), "k") == options
    assert option_conflicts(RunOptions(), options) == []
    assert option_conflicts(RunOptions(seed=4, overrides=Overrides(streams=(2,))), options) == ["seed", "streams"]
