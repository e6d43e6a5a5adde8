"""How a model's work divides: over its layers, and between attention and products. Functions of its geometry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from engine.config import Attention, EngineError, Ffn, LatentAttention, ModelConfig, MoeFfn
from engine.memory import ffn_weights, mixer_weights

ATTENTION_COST = 2.0
"""Time of an operation in attention over one in a matrix product."""


def visited_weights(ffn: Ffn, hidden: int) -> int:
    """Elements of a feed-forward part that one token is multiplied by: of the experts those it visits."""
    if isinstance(ffn, MoeFfn):
        ffn = replace(ffn, experts=ffn.top_k)
    return ffn_weights(ffn, hidden)


def layer_costs(model: ModelConfig) -> tuple[list[float], float]:
    """The cost of every layer and of the output head, in parts of the whole model's.

    Half of a cost is the share of the bytes that a decode step of one token reads, the head counted; half the share of
    a prompt's arithmetic, for which the head is nothing: it runs for one row of a prompt.
    """
    layers = [mixer_weights(s.mixer, model.hidden) + visited_weights(s.ffn, model.hidden) for s in model.layers]
    head = model.vocab * model.hidden
    read, computed = sum(layers) + head, sum(layers)
    return [0.5 * n / read + 0.5 * n / computed for n in layers], 0.5 * head / read


def split_layers(costs: Sequence[float], head: float, stages: int) -> list[tuple[int, int]]:
    """(first, last) layer of every stage, `last` exclusive, such that the dearest stage is as cheap as can be.

    `head`: the cost that the last stage has besides its layers. Of equal divisions the one whose stages differ least
    (least sum of squares) is taken. Raises EngineError where there are more stages than layers.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise EngineError(f"stages={stages}: a model of {count} layers takes 1 to {count} stages")
    before = [0.0, *accumulate(costs)]

    def cost(first: int, last: int) -> float:
        return before[last] - before[first] + (head if last == count else 0.0)

    # best[n]: (dearest stage, sum of squares, bounds) of the first n layers over the stages so far.
    best = {n: (cost(0, n), cost(0, n) ** 2, [0, n]) for n in range(1, count + 1)}
    for stage in range(2, stages + 1):
        longer = {}
        for n in range(stage, count + 1):
            options = [
                (dearest, squares, bounds, cost(m, n)) for m, (dearest, squares, bounds) in best.items() if m < n
            ]
            longer[n] = min((max(d, c), s + c * c, [*bounds, n]) for d, s, bounds, c in options)
        best = longer
    bounds = best[count][2]
    return list(pairwise(bounds))


def stage_layers(model: ModelConfig, stages: int) -> list[tuple[int, int]]:
    """(first, last) layer of every stage of a model."""
    costs, head = layer_costs(model)
    return split_layers(costs, head, stages)


def attention_ratio(model: ModelConfig) -> float:
    """r of pieces, 1 / tokens: a token's attention over one earlier token against its products, halved as in f
    (`engine/pieces.py`)."""
    attention = 0
    for mixer in (layer.mixer for layer in model.layers):
        if isinstance(mixer, Attention) and mixer.window is None:
            attention += 2 * mixer.heads * mixer.head_dim
        elif isinstance(mixer, LatentAttention):
            attention += mixer.heads * (mixer.nope_dim + mixer.rope_dim + mixer.value_dim)
    products = sum(mixer_weights(s.mixer, model.hidden) + visited_weights(s.ffn, model.hidden) for s in model.layers)
    return ATTENTION_COST * attention / products / 2
