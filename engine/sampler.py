"""What the host hands to the sampling kernel, and the rarer wishes that need more than the kernel: tokens that may not
be chosen yet (`min_tokens`) and log probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.request import SamplingParams

TokenLogprobs = tuple[float, dict[int, float]]


def is_plain(sampling: SamplingParams) -> bool:
    """Whether the kernel alone serves the request, so that a captured graph may, in steps that forbid no token."""
    return sampling.logprobs is None


def is_greedy(sampling: Sequence[SamplingParams]) -> bool:
    return all(params.temperature == 0 for params in sampling)


def forbid(logits: Tensor, banned: Sequence[tuple[int, frozenset[int]]]) -> Tensor:
    """logits [S, V] with the tokens of each (row, tokens) at minus infinity."""
    cells = [(row, token) for row, tokens in banned for token in sorted(tokens) if token < logits.shape[1]]
    if not cells:
        return logits
    rows, tokens = zip(*cells, strict=True)
    logits = logits.clone()
    logits[list(rows), list(tokens)] = float("-inf")
    return logits


def log_probabilities(logits: Tensor, tokens: Tensor, wanted: Sequence[int | None]) -> list[TokenLogprobs | None]:
    """For each row of logits [S, V] that wants them: its token's log probability and those of the best `wanted[row]`.

    They are of the model's own distribution: before temperature, top-k and top-p.
    """
    most = max((n for n in wanted if n is not None), default=0)
    table = torch.log_softmax(logits.float(), dim=-1)
    own = table.gather(1, tokens.long()[:, None])[:, 0].tolist()
    values, ids = (t.tolist() for t in table.topk(min(most, table.shape[1]), dim=-1)) if most else ([], [])
    result: list[TokenLogprobs | None] = []
    for row, n in enumerate(wanted):
        best = dict(zip(ids[row][:n], values[row][:n], strict=True)) if n else {}
        result.append(None if n is None else (own[row], best))
    return result
