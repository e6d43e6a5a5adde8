"""The decode step as CUDA graphs, two for each batch bucket: all greedy, or with rows that draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.inputs import StepInputs, StepShape
from engine.order import StepOrder

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
    kv_len 0). The bound on kv_len in a graph is the longest request the engine takes. A stage that does not sample
    needs no second graph for rows that draw.
    """

    def __init__(self, stage: Stage, buckets: Sequence[int]) -> None:
        self.stage = stage
        self._captured: dict[tuple[int, bool], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        for bucket in reversed(buckets):
            for greedy in (True, False) if stage.decoder.is_last else (True,):
                self._captured[bucket, greedy] = self._capture(bucket, greedy)

    def _capture(self, bucket: int, greedy: bool) -> _Captured:
        stage, shape = self.stage, StepShape(bucket, bucket, bucket)
        buffer = torch.zeros(StepInputs.nbytes(shape), dtype=torch.uint8, device=stage.device)

        def step() -> None:
            inputs = StepInputs.over(buffer, shape)
            residual = None if stage.decoder.is_first else stage.hidden_in[:bucket]
            result = stage.forward(inputs, True, 1, stage.max_model_len, residual)
            if stage.decoder.is_last:
                stage.choose(result, inputs, greedy)
            else:
                stage.hidden_out[:bucket].copy_(result)

        side = torch.cuda.Stream(stage.device)
        side.wait_stream(torch.cuda.current_stream(stage.device))
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream(stage.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        return _Captured(graph, shape, buffer)

    def replay(self, order: StepOrder) -> None:
        """Runs a decode step whose shape is a bucket's."""
        captured = self._captured[order.rows, order.greedy or not self.stage.decoder.is_last]
        self.stage.upload(order, captured.buffer)
        captured.graph.replay()
