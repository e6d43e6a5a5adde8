"""Running the engine in tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.batch import Batch
from engine.config import EngineConfig, Switches
from engine.engine import Engine
from engine.request import Request, SamplingParams


def load(weights: str, model: str = "", **options) -> Engine:
    """A small CPU engine; `switches` as a dict, dense float32 weights unless it says otherwise."""
    switches = Switches().with_({"weights_dtype": "fp32", **options.pop("switches", {})})
    config = {"max_streams": 8, "max_model_len": 256, "page_size": 16, **options}
    return Engine.load(EngineConfig(model, weights=weights, switches=switches, **config))


def generate(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int = 8, **sampling) -> list[list[int]]:
    """Every prompt's tokens, all requests added at once; checks that nothing is left behind."""
    free = engine.pool.free
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=tokens, **{"ignore_eos": True, **sampling})
        engine.add(Request(str(i), prompt, params))
    made: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    while engine.has_work():
        for event in engine.step():
            made[event.request_id] += event.tokens
    assert engine.pool.free == free
    return [made[str(i)] for i in range(len(prompts))]


def prompt_of(length: int, seed: int, vocab: int = 96) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    return torch.randint(0, vocab, (length,), generator=generator).tolist()


def logits_of(engine: Engine, tokens: Sequence[int], pieces: Sequence[int]) -> torch.Tensor:
    """The logits after every token, the tokens fed in `pieces` (a piece of 1 after the first is a decode step)."""
    stage, size = engine.stage, engine.config.page_size
    pages = engine.pool.take(-(-len(tokens) // size))
    table = torch.zeros((1, len(pages)), dtype=torch.int32)
    table[0] = torch.tensor(pages)
    rows, start = [], 0
    for count in pieces:
        positions = torch.arange(start, start + count, dtype=torch.int32)
        slots = table[0][(positions // size).long()] * size + positions % size
        batch = Batch(
            torch.tensor(tokens[start : start + count], dtype=torch.int32), positions, slots,
            torch.tensor([0, count], dtype=torch.int32), torch.tensor([start + count], dtype=torch.int32), table,
            torch.tensor([1], dtype=torch.int32), torch.arange(count, dtype=torch.int32),
            decode=start > 0 and count == 1, max_query=count, max_kv=start + count,
        )  # fmt: skip
        with torch.inference_mode():
            rows.append(stage.decoder(batch, stage.cache.layers))
        start += count
    engine.pool.release(pages, after=-1)
    engine.pool.completed(-1)
    return torch.cat(rows)
