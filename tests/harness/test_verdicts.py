"""The rules of the verdicts on literal cases."""

from dataclasses import replace

import pytest

from arkbench import formulas, published, verdicts
from arkbench.formulas import Cells
from arkbench.records import CELL_COLUMNS
from arkbench.verdicts import Context, Interval

CLAIMS = {claim.id: claim for claim in published.claims()}


def row(variant, workload, model="Qwen3.8-27B", scenario="fused-kernels", repetition=0, **values):
    full = dict.fromkeys(CELL_COLUMNS, "")
    named = {"scenario": scenario, "variant": variant, "workload": workload, "model": model, "status": "complete",
             "valid": "true", "repetition": repetition}  # fmt: skip
    shape = "-".join(
        f"{k}{v}" for k, v in values.items() if k in ("streams", "context_tokens", "prompt_tokens", "at_once")
    )
    full |= {k: str(v) for k, v in (named | {"cell": f"{workload}-{shape}"} | values).items()}
    return full


def context(rows, gpu="NVIDIA H200", used=1, on_cpu=False, endpoint=False, start=None):
    names = tuple(dict.fromkeys(r["scenario"] for r in rows)) or ("fused-kernels",)
    return Context(Cells(rows), names, (gpu,), used, on_cpu, endpoint, start or {})


def judge(claim_id, ctx):
    tests = published.tests()
    claim = CLAIMS[claim_id]
    return verdicts.verdict(claim, tests.claims[claim_id], tests.notes[claim.note], ctx)


def pair(fused, standard, streams=16, **more):
    rows = [row("fused", "decode", streams=streams, decode_tok_s=v, repetition=i, **more) for i, v in enumerate(fused)]
    return rows + [
        row("standard", "decode", streams=streams, decode_tok_s=v, repetition=i, **more) for i, v in enumerate(standard)
    ]


@pytest.mark.parametrize(
    ("measured", "better", "expected"),
    [
        ((2.5, 2.7), "higher", "reproduced"),
        ((2.66, 2.9), "higher", "exceeded"),
        ((2.0, 2.5), "higher", "not reproduced"),
        ((2.0, 2.5), "lower", "exceeded"),
        ((2.66, 2.9), "lower", "not reproduced"),
        ((2.66, 2.9), "equal", "not reproduced"),
        ((2.65, 2.9), "higher", "reproduced"),
    ],
)
def test_intervals(measured, better, expected):
    assert verdicts.decide(Interval(*measured), Interval(2.55, 2.65), better) == expected


def test_a_printed_figure_is_what_rounds_to_it():
    assert verdicts.claimed_ratio("2.6", "ratio") == Interval(pytest.approx(2.55), pytest.approx(2.65))
    assert verdicts.claimed_ratio("45", "percent") == Interval(pytest.approx(1.445), pytest.approx(1.455))
    assert verdicts.claimed_ratio("-90", "percent") == Interval(pytest.approx(0.095), pytest.approx(0.105))
    assert verdicts.claimed_ratio("81", "fall") == Interval(pytest.approx(0.185), pytest.approx(0.195))


def test_a_ratio_carries_over_to_another_gpu():
    got = judge("fused-decode-16", context(pair([260, 262, 258], [100, 100, 100])))
    assert (got["measured"], got["verdict"], got["reason"]) == ("2.60", "reproduced", "")
    assert got["spread"] == pytest.approx(0.04 / 2.6)


def test_exceeded_and_not_reproduced():
    assert judge("fused-decode-16", context(pair([400] * 3, [100] * 3)))["verdict"] == "exceeded"
    assert judge("fused-decode-16", context(pair([150] * 3, [100] * 3)))["verdict"] == "not reproduced"


def test_the_spread_decides_whether_a_difference_is_one():
    steady = judge("fused-decode-16", context(pair([240, 240, 240], [100, 100, 100])))
    shaky = judge("fused-decode-16", context(pair([240, 200, 270], [100, 100, 100])))
    assert (steady["verdict"], shaky["verdict"]) == ("not reproduced", "reproduced")


def prompts(fused, standard, tokens):
    rows = []
    for variant, rates in (("fused", fused), ("standard", standard)):
        rows += [
            row(variant, "prefill", prompt_tokens=tokens, prefill_tok_s=v, repetition=i) for i, v in enumerate(rates)
        ]
    return context(rows)


def test_a_gain_that_noise_alone_could_be_is_said_to_be_one():
    shaky = judge("fused-prefill-256", prompts([130, 150, 90], [100, 100, 100], 256))
    assert (shaky["measured"], shaky["verdict"]) == ("+30.0", "reproduced")
    assert shaky["reason"] == "no change fits as well: measured -10.0 % to +50.0 % within the noise"
    small = judge("fused-prefill-8192", prompts([100.5] * 3, [100] * 3, 8192))
    assert small["verdict"] == "reproduced"
    assert small["reason"] == "no change fits as well: measured -1.5 % to +2.5 % within the noise"
    assert judge("fused-prefill-256", prompts([145] * 3, [100] * 3, 256))["reason"] == ""
    assert judge("fused-prefill-1024", prompts([98] * 3, [100] * 3, 1024))["reason"] == ""


def test_a_ratio_that_noise_alone_could_be_is_said_to_be_one():
    got = judge("fused-decode-1", context(pair([96, 99, 101], [100, 100, 100], streams=1)))
    assert got["verdict"] == "reproduced"
    assert got["reason"] == "no change fits as well: measured 0.96 to 1.01 within the noise"


def test_one_repetition_has_the_wider_noise():
    assert judge("fused-decode-16", context(pair([245], [100])))["verdict"] == "reproduced"
    assert judge("fused-decode-16", context(pair([245, 245], [100, 100])))["verdict"] == "not reproduced"


def test_a_cpu_shows_its_ratio_and_no_verdict():
    got = judge("fused-decode-16", context(pair([260] * 3, [100] * 3), on_cpu=True))
    assert (got["measured"], got["verdict"]) == ("2.60", "not comparable")
    assert got["reason"].startswith("measured on a CPU, published for GPUs")


def test_another_model_is_named():
    got = judge("fused-decode-16", context(pair([260] * 3, [100] * 3, model="Qwen3-32B")))
    assert got["verdict"] == "reproduced"
    assert got["reason"] == "measured with Qwen3-32B, published for Qwen3.8-27B"


def test_a_claim_needs_all_of_its_cells():
    got = judge("fused-decode-16", context(pair([260], [])))
    assert (got["verdict"], got["reason"]) == (
        "not run", "not measured: standard, decode, streams 16, of Qwen3.8-27B",
    )  # fmt: skip
    assert "measured" not in got


def test_every_missing_cell_is_named():
    got = judge("fused-decode-16", context([row("fused", "decode", streams=8, decode_tok_s=9)]))
    assert got["reason"] == (
        "not measured: fused, decode, streams 16; standard, decode, streams 16, of Qwen3.8-27B"
    )  # fmt: skip


def test_many_missing_cells_are_counted():
    got = judge("batching-scaling-monotone", context([row("ark-2.0", "decode", scenario="decode-batching")]))
    assert got["verdict"] == "not run"
    assert got["reason"].endswith(" and 13 cells more, of Qwen3.8-27B")
    assert got["reason"].count(";") == 2


def test_another_scenario_is_not_this_claim():
    got = judge("loops-largest", context(pair([260], [100])))
    assert (got["verdict"], got["reason"]) == ("not run", "arkbench run inverted-loops tests it")


def test_an_invalid_cell_gives_no_verdict():
    rows = pair([260] * 3, [100] * 3)
    for r in rows[:2]:
        r |= {"valid": "false", "reason": "GPU 0 throttled: hw_thermal_slowdown"}
    got = judge("fused-decode-16", context(rows))
    assert got["verdict"] == "not comparable"
    assert "throttled" in got["reason"]


def test_one_bad_repetition_of_three_is_left_out():
    rows = pair([900, 260, 260], [100] * 3)
    rows[0] |= {"valid": "false", "reason": "1 of 16 requests failed"}
    assert judge("fused-decode-16", context(rows))["measured"] == "2.60"


def test_no_effect_claims_fail_in_both_directions():
    for speed, expected in ((1000, "reproduced"), (1200, "not reproduced"), (800, "not reproduced")):
        rows = [row("fused-bf16", "decode", streams=16, decode_tok_s=speed, repetition=i) for i in range(3)]
        rows += [row("standard-bf16", "decode", streams=16, decode_tok_s=1000, repetition=i) for i in range(3)]
        assert judge("unquantized-unaffected", context(rows))["verdict"] == expected


def releases(models, new=930.0, old=100.0, wh=(1.0, 0.1)):
    rows = []
    for model in models:
        streams = 10 if model == "Qwen3.5-4B" else 12
        rows.append(row("ark-1.0", "sustained", model, "decode-batching", streams=streams, decode_tok_s=old,
                        stream_tok_s=old / streams, wh_per_1k_tokens=wh[0]))  # fmt: skip
        rows.append(row("ark-2.0", "sustained", model, "decode-batching", streams=64, decode_tok_s=new,
                        stream_tok_s=new / 64, wh_per_1k_tokens=wh[1]))  # fmt: skip
    return rows


def test_a_median_over_models_needs_them_all():
    models = published.tests().model_sets["releases"]
    assert len(models) == 15
    assert judge("batching-gain-median", context(releases(models)))["verdict"] == "reproduced"
    some = judge("batching-gain-median", context(releases(models[:3])))
    assert (some["verdict"], some["measured"]) == ("not comparable", "9.30")
    assert some["reason"].startswith("needs all of its 15 models; missing: Qwen3.5-4B")


def test_a_range_compares_both_ends():
    models = published.tests().model_sets["releases"]
    rows = releases(models[:1], 680) + releases(models[1:2], 1250) + releases(models[2:])
    got = judge("batching-gain-range", context(rows))
    assert (got["measured"], got["verdict"]) == ("6.80-12.5", "reproduced")


def test_energy_that_was_not_measured_gives_no_verdict():
    models = published.tests().model_sets["releases"]
    assert judge("batching-energy-median", context(releases(models)))["verdict"] == "reproduced"
    got = judge("batching-energy-median", context(releases(models, wh=("", ""))))
    assert got["verdict"] == "not comparable"
    assert "has no wh_per_1k_tokens" in got["reason"]


def scaling(totals):
    return [
        row("ark-2.0", "decode", "Qwen3.6-35B-A3B", "decode-batching", streams=s, context_tokens=c, decode_tok_s=t,
            requests_failed=0, requests_refused=0, requests_timeout=0)
        for c in (1000, 4000) for s, t in zip((1, 4, 8, 16, 24, 32, 48, 64), totals, strict=True)
    ]  # fmt: skip


def test_total_throughput_rises_or_not():
    rising = context(scaling([87, 300, 500, 800, 1000, 1150, 1260, 1341]))
    assert judge("batching-scaling-monotone", rising)["verdict"] == "reproduced"
    assert judge("batching-scaling-1-64", rising)["measured"] == "15.4"
    falling = context(scaling([87, 300, 500, 800, 1000, 900, 1260, 1341]))
    assert judge("batching-scaling-monotone", falling)["verdict"] == "not reproduced"
    assert judge("batching-no-failures", rising)["verdict"] == "reproduced"


def test_a_failed_request_counts():
    rows = scaling([1, 2, 3, 4, 5, 6, 7, 8])
    rows[3]["requests_refused"] = "2"
    got = judge("batching-no-failures", context(rows))
    assert (got["measured"], got["verdict"]) == ("2", "not reproduced")


def burst(prompt, at_once, variant="ark-2.1", **values):
    values = {"prefill_tok_s": 1.0, "cached_tokens": 0} | values
    return row(
        variant, "burst", "Qwen3.5-122B-A10B", "pipelined-prefill", prompt_tokens=prompt, at_once=at_once, **values
    )


def test_an_absolute_count_compares_on_the_same_hardware_only():
    rows = [burst(16000, 64, requests_ok=64, requests_failed=0, requests_refused=0, requests_timeout=0)]
    same = context(rows, gpu="NVIDIA GeForce RTX 5090", used=4)
    got = judge("prefill-in-time-16k-64", same)
    assert (got["measured"], got["verdict"]) == ("64 of 64", "reproduced")
    for other in (context(rows, used=4), context(rows, gpu="NVIDIA GeForce RTX 5090", used=2)):
        got = judge("prefill-in-time-16k-64", other)
        assert (got["measured"], got["verdict"]) == ("64 of 64", "not comparable")


def test_a_level_rate():
    level = [burst(16000, n, prefill_tok_s=v) for n, v in zip((2, 4, 8, 16, 32), (30e3, 31e3, 30e3, 30e3, 31e3))]  # noqa: B905
    assert judge("prefill-plateau", context(level))["verdict"] == "reproduced"
    level[4]["prefill_tok_s"] = "40000"
    assert judge("prefill-plateau", context(level))["verdict"] == "not reproduced"


def test_longer_prompts_gain_more():
    rows = [burst(p, 1, "ark-2.0", prefill_tok_s=1000) for p in (4000, 16000, 64000)]
    rows += [burst(p, 1, prefill_tok_s=v) for p, v in ((4000, 1300), (16000, 1700), (64000, 1800))]
    assert judge("prefill-longer-gains-more", context(rows))["verdict"] == "reproduced"


def test_cached_tokens_must_be_known_and_zero():
    assert judge("prefill-zero-cached", context([burst(4000, 1)]))["verdict"] == "reproduced"
    assert judge("prefill-zero-cached", context([burst(4000, 1, cached_tokens=64)]))["verdict"] == "not reproduced"
    assert judge("prefill-zero-cached", context([burst(4000, 1, cached_tokens="")]))["verdict"] == "not comparable"


def test_start_up_is_bounded():
    rows = pair([1], [1])
    assert judge("fused-start-up", context(rows, start={"fused": {"total": 12.0}}))["verdict"] == "reproduced"
    assert judge("fused-start-up", context(rows, start={"fused": {"total": 75.0}}))["verdict"] == "not reproduced"
    assert judge("fused-start-up", context(rows))["verdict"] == "not run"


def test_every_claim_has_a_test_and_without_a_run_none_has_a_verdict():
    empty = Context(Cells([]), (), (), None, False, False)
    rows = verdicts.all_verdicts(empty)
    assert len(rows) == len(CLAIMS) == 38
    assert {r["verdict"] for r in rows} == {"not run"}


def test_published_figures_reproduce_themselves():
    """The published tables, put in as if they had been measured on the published hardware, reproduce their claims."""
    rows = []
    for line in published.table("fused_kernels_decode"):
        for name in ("standard", "fused"):
            rows.append(row(name, "decode", streams=line["concurrent_requests"], decode_tok_s=line[f"{name}_tok_s"]))
    for line in published.table("fused_kernels_prefill"):
        for name in ("standard", "fused"):
            rows.append(row(name, "prefill", prompt_tokens=line["prompt_tokens"], prefill_tok_s=line[f"{name}_tok_s"]))
    ids = [i for i, c in CLAIMS.items() if c.note == "fused-kernels" and c.source != "text"]
    got = {i: judge(i, context(rows, gpu="NVIDIA GeForce RTX 5090"))["verdict"] for i in ids}
    assert set(got.values()) == {"reproduced"}, got


def test_published_loops_reproduce_themselves():
    from arkbench.targets import bundled

    rows = []
    for line in published.table("inverted_loops"):
        model = bundled.canonical_model(line["model"])
        for name, column in (("driven", "ark_1_1_tok_s"), ("inverted", "ark_2_0_tok_s")):
            rows.append(row(name, "decode", model, "inverted-loops", streams=1, decode_tok_s=line[column]))
    for claim in ("loops-largest", "loops-smallest", "loops-order"):
        assert judge(claim, context(rows, used=4))["verdict"] == "reproduced", claim


def test_rank_correlation():
    assert formulas.rank_correlation([1, 2, 3, 4], [40, 30, 20, 10]) == pytest.approx(-1.0)
    assert formulas.rank_correlation([1, 2, 3], [1, 3, 2]) == pytest.approx(0.5)
    assert formulas.rank_correlation([1, 2, 3], [5, 5, 5]) == 0.0


def test_a_shortened_sustained_window_stands_beside_what_rests_on_it():
    models = published.tests().model_sets["releases"]
    rows = [
        row(variant, "sustained", model, "decode-batching", streams=streams, decode_tok_s=speed)
        for model in models
        for variant, streams, speed in (("ark-1.0", 12, 100.0), ("ark-2.0", 64, 900.0))
    ]
    short = replace(context(rows), sustained_s=10.0)
    found = {r["id"]: r for r in verdicts.all_verdicts(short)}
    named = {name for name, r in found.items() if "sustained windows of 10 s (--duration)" in r["reason"]}
    measured = {name for name, r in found.items() if r["verdict"] != "not run"}
    assert named and named <= measured
    assert all("--duration" not in r["reason"] for r in verdicts.all_verdicts(context(rows)))


@pytest.mark.parametrize(
    ("figure", "unit", "written"),
    [
        ("2.6", "x", "2.6×"),
        ("1.00", "x", "1.00×"),
        ("45", "%", "+45 %"),
        ("+32.3", "%", "+32.3 %"),
        ("-90", "%", "-90 %"),
        ("81-93", "%", "81–93 %"),
        ("6.8-12.5", "x", "6.8–12.5×"),
        ("191 of 192", "requests", "191 of 192 requests"),
        ("18.8", "s", "18.8 s"),
        ("seconds", "s", "seconds"),
        ("rises", "", "rises"),
        ("", "x", ""),
    ],
)
def test_figures_are_written_with_their_unit(figure, unit, written):
    assert published.with_unit(figure, unit) == written
