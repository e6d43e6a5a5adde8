"""The new families in the whole engine: requests together, preempted and cut into pieces, against transformers."""

from __future__ import annotations

import pytest
import torch
from layer_oracle import reference_model

from engine.config import EngineConfig, Switches
from engine.engine import Engine
from engine.request import Request, SamplingParams

LENGTHS = (5, 40, 17)
MADE = 6


def greedy(model, prompt: list[int]) -> list[int]:
    """The tokens that transformers makes, one after the other, without a cache."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(MADE):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def generate(folder, prompts: list[list[int]], **options) -> dict[str, list[int]]:
    switches = Switches(weights_dtype="fp32")
    config = {"max_streams": 4, "max_model_len": 64, "page_size": 16, **options}
    engine = Engine.load(EngineConfig("", weights=str(folder), switches=switches, **config))
    made: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), prompt, SamplingParams(max_tokens=MADE, ignore_eos=True)))
    while engine.has_work():
        for event in engine.step():
            made[event.request_id] += event.tokens
    engine.close()
    return made


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe", "glm4_moe_lite", "gpt_oss"])
def test_engine_makes_the_tokens_of_transformers(name, tmp_path):
    model = reference_model(name)
    model.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(0, 96, (n,), generator=generator).tolist() for n in LENGTHS]
    expected = {str(i): greedy(model, prompt) for i, prompt in enumerate(prompts)}
    assert generate(tmp_path, prompts) == expected
    assert generate(tmp_path, prompts, prefill_tokens=16) == expected
    assert generate(tmp_path, prompts, cache_tokens=64) == expected, "with preemption"
