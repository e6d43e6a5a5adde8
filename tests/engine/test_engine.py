"""The engine's promises: a batch equals its requests alone, switches and memory pressure change no token."""

import math

import pytest
import torch

from engine.config import EngineError, Switches
from engine.graphs import GraphShapes
from engine.order import make_order
from engine.request import Request, SamplingParams
from tests.engine.helpers import generate, load, prompt_of

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 48, 63, 64, 65, 70)


@pytest.fixture(scope="module")
def folder(checkpoints):
    return str(checkpoints["qwen3"])


@pytest.fixture(scope="module")
def prompts():
    return [prompt_of(LENGTHS[i % len(LENGTHS)], i) for i in range(64)]


@pytest.fixture(scope="module")
def alone(folder, prompts):
    """What each request gives when it is the only one."""
    engine = load(folder)
    return [generate(engine, [prompt])[0] for prompt in prompts]


def greedy_of_transformers(model, prompt, tokens):
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
    return out[0, len(prompt) :].tolist()


def test_greedy_tokens_equal_those_of_transformers(references, prompts, alone):
    for i in (0, 4, 9):
        assert alone[i] == greedy_of_transformers(references["qwen3"], prompts[i], 8)


@pytest.mark.parametrize("count", [1, 3, 8, 64])
def test_a_batch_gives_what_each_request_gives_alone(folder, prompts, alone, count):
    assert generate(load(folder, max_streams=count), prompts[:count]) == alone[:count]


@pytest.mark.parametrize(
    "switches",
    [
        {"loop": "driven"},
        {"decode_batching": "off"},
        {"prefill": "whole"},
        {"prefill": "whole", "prefill_batching": "off"},
        {"prefill": "sequential"},
        {"prefill_batching": "off"},
    ],
    ids=str,
)
@pytest.mark.parametrize("prefill_tokens", [7, 64, 8192])
def test_switches_and_piece_sizes_change_no_token(folder, prompts, alone, switches, prefill_tokens):
    engine = load(folder, switches=switches, prefill_tokens=prefill_tokens)
    assert generate(engine, prompts[:12]) == alone[:12]


@pytest.mark.parametrize("size", [1, 5, 16, 64])
def test_the_page_size_changes_no_token(folder, prompts, alone, size):
    assert generate(load(folder, page_size=size), prompts[:12]) == alone[:12]


def poison(engine):
    """Fills every page that nobody owns with NaN, now and whenever one becomes free."""

    def fill(pages):
        for layer in engine.stage.cache.layers:
            layer.k[pages] = math.nan
            layer.v[pages] = math.nan

    fill(list(range(engine.pool.capacity + 1)))
    engine.pool.on_free = fill


@pytest.mark.parametrize("loop", ["driven", "inverted"])
def test_nothing_of_a_free_page_reaches_an_answer(folder, prompts, alone, loop):
    engine = load(folder, cache_tokens=320, max_streams=4, switches={"loop": loop})
    poison(engine)
    for begin in range(0, 24, 12):
        assert generate(engine, prompts[begin : begin + 12]) == alone[begin : begin + 12]


@pytest.mark.parametrize("loop", ["driven", "inverted"])
@pytest.mark.parametrize("cache_tokens", [112, 128, 176, 240])
def test_preemption_changes_no_token(folder, prompts, loop, cache_tokens):
    engine = load(folder, cache_tokens=cache_tokens, max_streams=6, switches={"loop": loop})
    expected = generate(load(folder), prompts[:8], tokens=30)
    preempted = []
    inner = engine.scheduler._preempt
    engine.scheduler._preempt = lambda track: (preempted.append(track.request.id), inner(track))
    poison(engine)
    assert generate(engine, prompts[:8], tokens=30) == expected
    assert preempted


def test_a_cancelled_request_ends_and_the_others_go_on(folder, prompts, alone):
    engine = load(folder, max_streams=2)
    free = engine.pool.free
    for i in range(4):
        engine.add(Request(str(i), prompts[i], SamplingParams(max_tokens=8, ignore_eos=True)))
    made, ends = {str(i): [] for i in range(4)}, {}
    steps = 0
    while engine.has_work():
        for event in engine.step():
            made[event.request_id] += event.tokens
            if event.finished:
                ends[event.request_id] = event.finished
        steps += 1
        if steps == 3:
            engine.cancel("1")
            engine.cancel("3")
            engine.cancel("nobody")
    assert ends == {"0": "length", "1": "cancelled", "2": "length", "3": "cancelled"}
    assert (made["0"], made["2"]) == (alone[0], alone[2])
    assert made["1"] == alone[1][: len(made["1"])]
    assert made["3"] == []
    assert engine.pool.free == free


def test_a_stop_token_ends_an_answer_and_is_its_last(folder, prompts, alone):
    engine = load(folder)
    stop = alone[5][3]
    cut = alone[5].index(stop) + 1
    assert generate(engine, [prompts[5]], stop_token_ids=(stop,)) == [alone[5][:cut]]
    events = []
    engine.add(Request("a", prompts[5], SamplingParams(max_tokens=8, ignore_eos=True, stop_token_ids=(stop,))))
    while engine.has_work():
        events += engine.step()
    assert events[-1].finished == "stop"


def test_min_tokens_holds_a_stop_token_back(folder, prompts, alone):
    stop = alone[5][0]
    (made,) = generate(load(folder), [prompts[5]], stop_token_ids=(stop,), min_tokens=4)
    assert len(made) >= 4 and stop not in made[:4]


@pytest.mark.parametrize("loop", ["inverted", "driven"])
def test_min_tokens_of_an_answer_of_fixed_length_costs_no_captured_step(folder, prompts, loop):
    """What benchmark clients send: ignore_eos and min_tokens. No token is forbidden, so every step may be replayed."""
    engine, orders = load(folder, switches={"loop": loop}), []
    launch = engine.loop.runner.launch

    def recorded(plan, banned):
        shapes = GraphShapes.of(8, 512, longest_prompt=512)
        orders.append(make_order(plan, banned, 16, 8, loop == "inverted", shapes))
        return launch(plan, banned)

    engine.loop.runner.launch = recorded
    generate(engine, [prompts[5]], min_tokens=8)
    assert len(orders) >= 8 and all(order.graph for order in orders)


def test_log_probabilities_are_those_of_the_logits(folder, references, prompts):
    engine = load(folder)
    engine.add(Request("a", prompts[3], SamplingParams(max_tokens=3, ignore_eos=True, logprobs=2)))
    events = []
    while engine.has_work():
        events += engine.step()
    tokens = list(prompts[3])
    for event in events:
        with torch.no_grad():
            expected = torch.log_softmax(references["qwen3"](torch.tensor([tokens])).logits[0, -1], dim=-1)
        ((own, best),) = event.logprobs
        assert own == pytest.approx(float(expected[event.tokens[0]]), abs=1e-4)
        top = expected.topk(2)
        assert list(best) == top.indices.tolist()
        assert list(best.values()) == pytest.approx(top.values.tolist(), abs=1e-4)
        tokens += event.tokens


def test_sampling_depends_on_the_seed_and_not_on_the_batch(folder, prompts):
    engine = load(folder)
    wishes = {"temperature": 1.0, "top_k": 20, "top_p": 0.95}
    alone = [generate(engine, [prompt], seed=5, **wishes)[0] for prompt in prompts[:6]]
    assert generate(engine, prompts[:6], seed=5, **wishes) == alone
    assert generate(engine, prompts[:6], seed=6, **wishes) != alone


def test_switches_change_between_requests(folder, prompts, alone):
    engine = load(folder)
    assert generate(engine, prompts[:6]) == alone[:6]
    weights = engine.stage.decoder
    engine.set_switches(engine.config.switches.with_({"loop": "driven", "decode_batching": "off"}))
    assert generate(engine, prompts[:6]) == alone[:6]
    assert engine.stage.decoder is weights
    engine.set_switches(engine.config.switches.with_({"weights_dtype": "int4"}))
    assert engine.info.quantized.startswith("every matrix in 4 bits but the output head")


def test_requests_that_can_never_run_are_refused_in_one_line(folder):
    engine = load(folder, max_model_len=64, cache_tokens=32)

    def refusal(prompt, tokens):
        with pytest.raises(EngineError) as error:
            engine.add(Request("a", prompt, SamplingParams(max_tokens=tokens)))
        return str(error.value)

    assert "at least one prompt token" in refusal([], 1)
    assert "60 prompt + 5 output tokens exceed the limit of 64 tokens" in refusal([1] * 60, 5)
    assert "40 tokens do not fit the cache of 32 tokens" in refusal([1] * 30, 10)
    assert "token 96 is not in the vocabulary of 96" in refusal([96], 1)
    assert not engine.has_work()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "nothing-like-it"}, "unknown model 'nothing-like-it'"),
        ({"stages": 0}, "stages=0: a model has at least one stage"),
        ({"stages": 2}, "stages=2: a model of 1 layers takes 1 to 1 stages"),
        ({"switches": Switches(cache="contiguous", prompt_cache="on")}, "prompt_cache=on needs pages"),
        (
            {"switches": Switches(cache="contiguous"), "cache_tokens": 200, "max_model_len": 210},
            "cache=contiguous sets 256 tokens aside for a stream, which a cache of 200 has no room for",
        ),
        ({"device": "cuda"}, "torch sees no NVIDIA GPU"),
        ({"dtype": "fp8"}, "dtype 'fp8': it takes bf16, fp16, fp32"),
        ({"page_size": 0}, "page_size must be 1 or more"),
    ],
)
def test_what_cannot_run_is_refused_before_it_starts(options, message):
    from engine.config import EngineConfig
    from engine.engine import Engine

    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(EngineError, match=message):
        Engine.load(EngineConfig(**{"model": "SmolLM2-135M@layers=1", **options}))


def test_more_stages_than_layers_start_no_process(monkeypatch):
    from engine.config import EngineConfig
    from engine.engine import Engine

    monkeypatch.setattr("engine.pipeline.Pipeline", lambda config: pytest.fail("stages were started"))
    with pytest.raises(EngineError, match="stages=50: a model of 2 layers takes 1 to 2 stages"):
        Engine.load(EngineConfig("SmolLM2-135M@layers=2", stages=50))
