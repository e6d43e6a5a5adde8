"""The caching switches on a GPU. Activations and weights in float32, so that a token can hang on no rounding."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from engine.config import EngineConfig, Switches
from engine.engine import Engine
from tests.caching.helpers import poison, poison_states, serve

pytestmark = pytest.mark.gpu
MODELS = ("Qwen3-8B@layers=2", "Qwen3.5-4B@layers=4")
LENGTHS = (1, 63, 64, 65, 128, 200, 300)


def load(model, dtype="fp32", **options):
    switches = options.pop("switches", {})
    if dtype == "fp32":
        switches = {"weights_dtype": "fp32", **switches}
    config = {"max_streams": 8, "max_model_len": 1024, "device": "cuda", "dtype": dtype, **options}
    return Engine.load(EngineConfig(model, switches=Switches().with_(switches), **config))


def prompt(length, seed):
    generator = torch.Generator().manual_seed(seed * 10_000 + length)
    return torch.randint(1000, 100_000, (length,), generator=generator).tolist()


@pytest.fixture(scope="module", params=MODELS)
def cold(request):
    """(model, prompts, their tokens without a prompt cache)"""
    common = prompt(200, 9)
    prompts = [prompt(length, i) for i, length in enumerate(LENGTHS)]
    prompts += [common + prompt(20 + i, i) for i in range(4)] + [common]
    engine = load(request.param)
    tokens = [answer.tokens for answer in serve(engine, prompts)]
    engine.close()
    return request.param, prompts, tokens


@pytest.mark.parametrize(("loop", "graphs"), [("inverted", True), ("driven", False)])
def test_hits_change_no_token_and_free_pages_never_show(cold, loop, graphs):
    model, prompts, expected = cold
    engine = load(model, switches={"prompt_cache": "on", "loop": loop}, graphs=graphs)
    poison(engine)
    poison_states(engine)
    for _ in range(3):
        answers = serve(engine, prompts)
        assert [answer.tokens for answer in answers] == expected
    assert answers[-1].cached == 192
    assert all(answer.cached % 64 == 0 for answer in answers)
    engine.close()


def test_scarce_pages_change_no_token(cold):
    model, prompts, expected = cold
    engine = load(model, switches={"prompt_cache": "on"}, cache_tokens=704)
    poison(engine)
    for _ in range(2):
        assert [answer.tokens for answer in serve(engine, prompts)] == expected
    engine.close()


def test_a_contiguous_cache_changes_no_token(cold):
    model, prompts, expected = cold
    engine = load(model, switches={"cache": "contiguous"}, cache_tokens=3 * 1024)
    poison(engine)
    assert [answer.tokens for answer in serve(engine, prompts)] == expected
    assert engine.scheduler.max_streams == 3
    engine.close()


@pytest.mark.parametrize(
    ("cache_dtype", "cache"),
    [("bf16", "paged"), ("fp16", "paged"), ("int8", "paged"), ("fp8", "paged"), ("int8", "contiguous")],
)
def test_every_cache_dtype_answers_and_leaves_nothing(cache_dtype, cache):
    engine = load(MODELS[0], dtype="bf16", switches={"cache_dtype": cache_dtype, "cache": cache})
    poison(engine)
    prompts = [prompt(length, i) for i, length in enumerate(LENGTHS)]
    first = serve(engine, prompts, tokens=16)
    assert all(len(answer.tokens) == 16 for answer in first)
    assert [a.tokens for a in serve(engine, prompts, tokens=16)] == [a.tokens for a in first]
    engine.close()
