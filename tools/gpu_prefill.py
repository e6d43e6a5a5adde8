"""Reads prompts with a whole model on a GPU, each way of reading them faster switched off in turn.

    python -m tools.gpu_prefill Qwen3-8B [Llama-3.2-1B ...] [--prompts 1536 2048 4096 8192]

Synthetic 4-bit weights; tokens a second to the first token, the best of five. "no library": prompt attention by the
paged kernel alone; "library": by PyTorch's from 1,024 rows on; "flash": by flash attention where cuDNN's would be;
"not ahead": every matrix unpacked right before its product; "ahead": one ahead in all prompts. "first" is the time of
the first prompt of a length, in which cuDNN makes its plan.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.kernels import attention_library
from engine.kernels.w4 import FUSED_ROWS
from engine.layers.linear import Linear
from tools.gpu_engine import generate


@contextmanager
def rules(change: Callable[[attention_library.Rule], attention_library.Rule]) -> Iterator[None]:
    before = dict(attention_library.RULES)
    attention_library.RULES.update({dim: change(rule) for dim, rule in before.items()})
    try:
        yield
    finally:
        attention_library.RULES.update(before)


@contextmanager
def ahead_from(engine: Engine, rows: int) -> Iterator[None]:
    """Unpacks one matrix ahead in steps of at least `rows` rows."""
    linears = (layer for layer in engine.stage.decoder.linears.values() if isinstance(layer, Linear))
    ahead = next(layer.place.ahead for layer in linears if layer.place is not None)
    before, ahead.rows = ahead.rows, rows
    try:
        yield
    finally:
        ahead.rows = before


def measure(model: str, prompts: list[int]) -> None:
    engine = Engine.load(EngineConfig(model, device="cuda", max_streams=8, max_model_len=max(prompts) + 64))

    def rate(prompt: int) -> float:
        return prompt / min(generate(engine, 1, 2, prompt)[1] for _ in range(5))

    with rules(lambda rule: replace(rule, first="flash")):
        generate(engine, 1, 2, max(prompts))  # compiles the kernels, makes no plan of cuDNN's
    for prompt in prompts:
        first = generate(engine, 1, 2, prompt)[1]
        found = {"all": rate(prompt)}
        with rules(lambda rule: replace(rule, rows=1 << 30)):
            found["no library"] = rate(prompt)
        with rules(lambda rule: replace(rule, rows=1024)):
            found["library"] = rate(prompt)
        with rules(lambda rule: replace(rule, first="flash")):
            found["flash"] = rate(prompt)
        with ahead_from(engine, 1 << 30):
            found["not ahead"] = rate(prompt)
        with ahead_from(engine, FUSED_ROWS + 1):
            found["ahead"] = rate(prompt)
        print(
            f"{model} {prompt}: "
            + ", ".join(f"{name} {value:.0f}" for name, value in found.items())
            + f"; first {first * 1e3:.0f} ms",
            flush=True,
        )
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1536, 2048, 4096, 8192])
    options = parser.parse_args()
    for model in options.models:
        measure(model, options.prompts)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
