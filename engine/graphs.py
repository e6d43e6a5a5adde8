"""Steps as CUDA graphs: decode by batch bucket, short prompts by the number of their tokens.

Decode buckets come in two kinds: all greedy (captured at the start), or with rows that draw (captured when the first
such step of a bucket comes). A short prompt is bound by the host's launches, not by the GPU: replayed, it is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.config import Attention, DenseFfn, ModelConfig
from engine.inputs import StepInputs, StepShape
from engine.layers.linear import Kernels
from engine.memory import model_weights
from engine.scheduler import StepPlan

if TYPE_CHECKING:
    from engine.order import StepOrder
    from engine.stage import Stage

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
PROMPT_BUCKETS = (64, 128, 256, 512, 768, 1024, 1536, 2048)
LONGEST_PROMPTS = ((3e9, 2048), (10e9, 1024), (math.inf, 512))
"""(weights of a model, up to which a captured prompt step has so many tokens): longer ones take the GPU longer than the
host needs to launch them (about 1 ms a layer), and padding them up to a bucket costs more than launches."""

PROMPTS_TOGETHER = 8
"""Most prompts in a captured prompt step."""


def buckets_up_to(max_streams: int) -> tuple[int, ...]:
    """The batch sizes that are captured; past 64 in steps of 32."""
    steps = (*BUCKETS, *range(96, max_streams + 32, 32))
    largest = next(b for b in steps if b >= max_streams)
    return tuple(b for b in steps if b <= largest)


@dataclass(frozen=True)
class GraphShapes:
    """The shapes of captured steps, smallest first: the same on every stage of a model."""

    decode: tuple[StepShape, ...]
    prompt: tuple[StepShape, ...]

    @staticmethod
    def of(max_streams: int, max_model_len: int, longest_prompt: int) -> GraphShapes:
        """`longest_prompt`: most tokens of a captured prompt step, 0 for none."""
        together = min(PROMPTS_TOGETHER, max_streams)
        lengths = [n for n in PROMPT_BUCKETS if n <= min(longest_prompt, max_model_len)]
        return GraphShapes(
            tuple(StepShape(n, n, n) for n in buckets_up_to(max_streams)),
            tuple(StepShape(n, together, together) for n in lengths),
        )

    @property
    def most_rows(self) -> int:
        return max(shape.rows for shape in (*self.decode, *self.prompt))

    def holding(self, plan: StepPlan) -> StepShape | None:
        """The smallest captured shape that holds the plan; None when none does or a prompt yields no token."""
        requests, rows = len(plan.pieces), sum(piece.count for piece in plan.pieces)
        if plan.decode:
            return next(shape for shape in self.decode if shape.rows >= rows)
        if not all(piece.samples for piece in plan.pieces):
            return None
        return next((s for s in self.prompt if s.rows >= rows and s.requests >= requests), None)


def longest_prompt(config: ModelConfig, kernels: Kernels) -> int:
    """Most tokens of a prompt step that is captured for the model; 0 where none can be, or where it would not pay.

    A captured prompt step has rows of no request, which attention and dense layers alone take. The standard kernels
    unpack whole matrices: there the GPU is the limit, not the host's launches.
    """
    plain = all(isinstance(layer.mixer, Attention) and isinstance(layer.ffn, DenseFfn) for layer in config.layers)
    if kernels != "fused" or not plain:
        return 0
    return next(tokens for weights, tokens in LONGEST_PROMPTS if model_weights(config)[0] <= weights)


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    shape: StepShape
    buffer: Tensor


class Graphs:
    """Captured once at the start, largest bucket first: the smaller ones reuse its memory.

    A step of n rows is replayed in the smallest bucket that holds n; the rest of its rows are padding (slot 0 and
    kv_len 0 in decode steps; rows of no request in prompt steps). The bound on kv_len in a graph is the longest
    request the engine takes. `hidden_in`, `hidden_out` [most rows, hidden]: where a stage that is not the first finds
    what the one before made, and where one that is not the last leaves what it made.
    """

    def __init__(self, stage: Stage, shapes: GraphShapes) -> None:
        self.stage = stage
        self.shapes = shapes
        self._captured: dict[tuple[StepShape, bool], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        rows = (shapes.most_rows, stage.decoder.config.hidden)
        hidden = {"dtype": stage.dtype, "device": stage.device}
        self.hidden_in = None if stage.decoder.is_first else torch.zeros(rows, **hidden)
        self.hidden_out = None if stage.decoder.is_last else torch.zeros(rows, **hidden)
        for shape in reversed(shapes.prompt):
            self._take(shape, decode=False, greedy=True)
        for shape in reversed(shapes.decode):
            self._take(shape, decode=True, greedy=True)

    def _take(self, shape: StepShape, decode: bool, greedy: bool) -> _Captured:
        key = (shape, greedy)
        if key not in self._captured:
            self._captured[key] = self._capture(shape, decode, greedy)
        return self._captured[key]

    def _capture(self, shape: StepShape, decode: bool, greedy: bool) -> _Captured:
        stage = self.stage
        buffer = torch.zeros(StepInputs.nbytes(shape), dtype=torch.uint8, device=stage.device)

        def step() -> None:
            inputs = StepInputs.over(buffer, shape)
            max_query = 1 if decode else shape.rows
            residual = None if self.hidden_in is None else self.hidden_in[: shape.rows]
            result = stage.forward(inputs, decode, decode, max_query, stage.max_model_len, residual)
            if self.hidden_out is None:
                stage.choose(result, inputs, greedy)
            else:
                self.hidden_out[: shape.rows].copy_(result)

        side = torch.cuda.Stream(stage.device)
        side.wait_stream(torch.cuda.current_stream(stage.device))
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream(stage.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        return _Captured(graph, shape, buffer)

    def replay(self, order: StepOrder, residual: Tensor | None) -> Tensor | None:
        """Runs a step in its captured shape. `residual` [rows, hidden]: from the stage before.

        A captured step finds its tokens in the token pool; those of a driven step come from the host and go there.

        Returns the residual for the next stage in a buffer that the next replay overwrites, or None on the last stage.
        """
        # A stage that does not sample needs no second graph for rows that draw.
        captured = self._take(order.shape, order.decode, order.greedy or self.hidden_out is not None)
        inputs = self.stage.upload(order, captured.buffer)
        if order.decode and not order.resident and self.stage.decoder.is_first:
            self.stage.token_pool.index_copy_(0, inputs.state_slots.long(), inputs.tokens)
        if residual is not None and self.hidden_in is not None:
            self.hidden_in[: order.rows].copy_(residual)
        captured.graph.replay()
        return None if self.hidden_out is None else self.hidden_out[: order.rows]
