"""Choosing the next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class SamplingTensors:
    """Per row [S]: temperature float32 (0: greedy), top_k int32 (0: off), top_p float32 (1: off), seed int64,
    position int32 (of the token being chosen)."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    position: Tensor


def sample_reference(logits: Tensor, params: SamplingTensors) -> Tensor:
    """logits [S, V] -> tokens int32 [S]; noise by (seed, position) alone."""
    tokens = logits.argmax(-1)
    for row in torch.nonzero(params.temperature > 0).flatten().tolist():
        tokens[row] = _draw(
            logits[row].float() / float(params.temperature[row]), int(params.top_k[row]), float(params.top_p[row]),
            int(params.seed[row]), int(params.position[row]),
        )  # fmt: skip
    return tokens.int()


def _draw(logits: Tensor, top_k: int, top_p: float, seed: int, position: int) -> int:
    ranked, ids = logits.sort(descending=True, stable=True)
    probabilities = ranked.softmax(-1)
    keep = probabilities.cumsum(-1) - probabilities < top_p
    if top_k:
        keep[top_k:] = False
    generator = torch.Generator().manual_seed((seed * 1_000_003 + position) % 2**63)
    noise = torch.rand(len(ranked), generator=generator).clamp_min(1e-30)
    keys = torch.where(keep, probabilities.cpu() / -noise.log(), torch.zeros(()))
    return int(ids[int(keys.argmax())])


sample = sample_reference
