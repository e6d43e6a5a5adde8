"""Steps as CUDA graphs: decode by batch bucket, short prompts by the number of their tokens.

Decode buckets come in two kinds: all greedy (captured at the start), or with rows that draw (captured when the first
such step of a bucket comes). A short prompt is bound by the host's launches, not by the GPU: replayed, it is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.inputs import StepInputs, StepShape
from engine.scheduler import StepPlan

if TYPE_CHECKING:
    from engine.stage import Stage

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
PROMPT_BUCKETS = (64, 128, 256, 512)
PROMPTS_TOGETHER = 8
"""Most prompts in a captured prompt step."""


def buckets_up_to(max_streams: int) -> tuple[int, ...]:
    """The batch sizes that are captured; past 64 in steps of 32."""
    steps = (*BUCKETS, *range(96, max_streams + 32, 32))
    largest = next(b for b in steps if b >= max_streams)
    return tuple(b for b in steps if b <= largest)


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    shape: StepShape
    buffer: Tensor


class Graphs:
    """Captured once at the start, largest bucket first: the smaller ones reuse its memory.

    A step of n rows is replayed in the smallest bucket that holds n; the rest of its rows are padding (slot 0 and
    kv_len 0 in decode steps; rows of no request in prompt steps). The bound on kv_len in a graph is the longest
    request the engine takes.
    """

    def __init__(self, stage: Stage, max_streams: int, prompts: bool) -> None:
        self.stage = stage
        self._captured: dict[tuple[StepShape, bool], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        together = min(PROMPTS_TOGETHER, max_streams)
        self._decode = [StepShape(n, n, n) for n in buckets_up_to(max_streams)]
        self._prompt = [
            StepShape(n, together, together) for n in PROMPT_BUCKETS if prompts and n <= stage.max_model_len
        ]
        for shape in reversed(self._prompt):
            self._take(shape, decode=False, greedy=True)
        for shape in reversed(self._decode):
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
            stage.choose(stage.forward(inputs, decode, max_query, stage.max_model_len), inputs, greedy)

        side = torch.cuda.Stream(stage.device)
        side.wait_stream(torch.cuda.current_stream(stage.device))
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream(stage.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        return _Captured(graph, shape, buffer)

    def shape_for(self, plan: StepPlan) -> StepShape | None:
        """The smallest captured shape that holds the plan; None when none does or a prompt yields no token."""
        requests, rows = len(plan.pieces), sum(piece.count for piece in plan.pieces)
        if plan.decode:
            return next(shape for shape in self._decode if shape.rows >= rows)
        if not all(piece.samples for piece in plan.pieces):
            return None
        return next((s for s in self._prompt if s.rows >= rows and s.requests >= requests), None)

    def replay(self, plan: StepPlan, shape: StepShape, ring_row: int, greedy: bool) -> None:
        """Runs a step in a captured shape; `greedy`: none of its requests draws."""
        captured = self._take(shape, plan.decode, greedy)
        self.stage.upload(plan, ring_row, captured.shape, captured.buffer)
        captured.graph.replay()
