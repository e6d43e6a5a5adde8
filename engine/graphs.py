"""The decode step as CUDA graphs, two for each batch bucket: all greedy, or with rows that draw."""

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


class DecodeGraphs:
    """Captured once at the start, largest bucket first: the smaller ones reuse its memory.

    A step of n requests is replayed in the smallest bucket that holds n; the rest of its rows are padding (slot 0,
    kv_len 0). The bound on kv_len in a graph is the longest request the engine takes.
    """

    def __init__(self, stage: Stage, max_streams: int) -> None:
        self.stage = stage
        self._captured: dict[tuple[int, bool], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._sizes = buckets_up_to(max_streams)
        for bucket in reversed(self._sizes):
            for greedy in (True, False):
                self._captured[bucket, greedy] = self._capture(bucket, greedy)

    def _capture(self, bucket: int, greedy: bool) -> _Captured:
        stage, shape = self.stage, StepShape(bucket, bucket, bucket)
        buffer = torch.zeros(StepInputs.nbytes(shape), dtype=torch.uint8, device=stage.device)

        def step() -> None:
            inputs = StepInputs.over(buffer, shape)
            stage.choose(stage.forward(inputs, True, 1, stage.max_model_len), inputs, greedy)

        side = torch.cuda.Stream(stage.device)
        side.wait_stream(torch.cuda.current_stream(stage.device))
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream(stage.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        return _Captured(graph, shape, buffer)

    def replay(self, plan: StepPlan, ring_row: int, greedy: bool) -> None:
        """Runs a decode step; `greedy`: none of its requests draws."""
        count = len(plan.pieces)
        captured = self._captured[next(size for size in self._sizes if size >= count), greedy]
        self.stage.upload(plan, ring_row, captured.shape, captured.buffer)
        captured.graph.replay()
