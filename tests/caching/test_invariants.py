"""Whole-engine invariants: every switch one step away from best, on a tiny model."""

import pytest
import torch

from engine.config import PRESETS, Switches
from engine.request import Request, SamplingParams
from tests.caching.helpers import check_rest, poison, poison_states, serve
from tests.engine.helpers import load, logits_of, prompt_of

BEST = PRESETS["best"].as_dict()
ONE_AWAY = [(name, value) for name, values in Switches.choices().items() for value in values if BEST[name] != value]
EXACT = {"decode_batching", "loop", "prefill", "prefill_batching", "cache", "prompt_cache"}
LENGTHS = (1, 15, 16, 17, 33, 48, 64, 70)

LOGIT_BOUNDS = {
    ("kernels", "standard"): 2e-2,
    ("cache_dtype", "fp16"): 0.0,
    ("cache_dtype", "int8"): 5e-2,
    ("cache_dtype", "fp8"): 1.5e-1,
}
"""Largest difference of a logit from `best`, over the largest logit. Activations in float32 keep a 16-bit cache in
float32; a value of fp8 is off by up to 1/16 of itself, one of int8 by 1/254 of its head's largest."""


@pytest.fixture(scope="module")
def prompts():
    common = prompt_of(40, 99)
    return [prompt_of(length, i) for i, length in enumerate(LENGTHS)] + [common, common + prompt_of(20, 7), common]


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"])
def best(request, folders, prompts):
    """(folder, the tokens of `best`)"""
    folder = folders[request.param]
    return folder, [answer.tokens for answer in serve(load(folder, switches=BEST), prompts)]


def test_every_switch_is_turned():
    assert {name for name, _ in ONE_AWAY} == set(Switches.choices())


@pytest.mark.parametrize(("name", "value"), ONE_AWAY, ids=lambda x: x)
def test_one_switch_away_from_best(best, prompts, name, value):
    folder, expected = best
    engine = load(folder, switches=BEST | {name: value}, max_streams=5, prefill_tokens=50)
    poison(engine)
    poison_states(engine)
    for _ in range(2):
        answers = serve(engine, prompts)
        assert all(len(answer.tokens) == 8 and answer.finished == "length" for answer in answers)
        if name in EXACT:
            assert [answer.tokens for answer in answers] == expected
        else:
            again = serve(engine, prompts)
            assert [answer.tokens for answer in again] == [answer.tokens for answer in answers]


@pytest.mark.parametrize(("name", "value"), LOGIT_BOUNDS, ids=str)
def test_kernels_and_cache_precision_stay_inside_their_bounds(folders, name, value):
    tokens, pieces = prompt_of(60, 3), [40] + [1] * 20
    reference = logits_of(load(folders["qwen3"], switches=BEST), tokens, pieces)
    found = logits_of(load(folders["qwen3"], switches=BEST | {name: value}), tokens, pieces)
    error = (found - reference).abs().max() / reference.abs().max()
    assert error <= LOGIT_BOUNDS[name, value]
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("cache", ["contiguous", "paged"])
@pytest.mark.parametrize("prompt_cache", ["off", "on"])
@pytest.mark.parametrize("loop", ["driven", "inverted"])
def test_cancellations_at_any_step_leave_nothing(folders, prompts, cache, prompt_cache, loop):
    if (cache, prompt_cache) == ("contiguous", "on"):
        return
    engine = load(
        folders["qwen3_5"],
        switches={"cache": cache, "prompt_cache": prompt_cache, "loop": loop},
        max_streams=3, cache_tokens=512, prefill_tokens=20,
    )  # fmt: skip
    poison(engine)
    for after in range(0, 12, 2):
        for i, prompt in enumerate(prompts):
            engine.add(Request(f"{after}-{i}", prompt, SamplingParams(max_tokens=12, ignore_eos=True)))
        for _ in range(after):
            engine.step()
        for i in range(0, len(prompts), 2):
            engine.cancel(f"{after}-{i}")
        while engine.has_work():
            engine.step()
        check_rest(engine)
    (answer,) = serve(engine, [prompts[5]])
    assert answer.tokens == serve(load(folders["qwen3_5"]), [prompts[5]])[0].tokens


def test_a_contiguous_cache_limits_the_streams_to_what_it_can_set_aside(folders, prompts):
    """512 tokens hold two streams of 256, or all these short requests when they take pages as they need them."""
    most = {}
    for cache in ("contiguous", "paged"):
        engine = load(folders["qwen3"], switches={"cache": cache}, cache_tokens=512, max_streams=8)
        for i, prompt in enumerate(prompts[:8]):
            engine.add(Request(str(i), prompt, SamplingParams(max_tokens=8, ignore_eos=True)))
        most[cache] = 0
        while engine.has_work():
            engine.step()
            running = engine.scheduler.running
            most[cache] = max(most[cache], len(running))
            if cache == "contiguous":
                for track in running:
                    assert track.pages == list(range(1 + 16 * (track.slot - 1), 1 + 16 * track.slot))
        check_rest(engine)
    assert most == {"contiguous": 2, "paged": 8}
