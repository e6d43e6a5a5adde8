"""Hidden states and tokens from GPU to GPU by NCCL, for stages that have a GPU each.

Nothing here waits on the host. Every hop has a communicator of its own, so that no transfer queues behind one of
another hop; each is made when the stages join. The steps of a captured size go through preallocated rings.
"""

from __future__ import annotations

import time
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.order import StepOrder
from engine.peers import Peers
from engine.sampler import TokenLogprobs
from engine.stage import Stage

NCCL_TIMEOUT = timedelta(minutes=60)
"""Of a transfer: heartbeats find a stage that is gone long before."""

HOP_BLOCKS = 4
"""Thread blocks of a transfer: a receive that waits for its sender holds them, and the step before needs the rest."""

RING_ROWS = 512


class NcclHops:
    """See `engine.wires.Hops`."""

    def __init__(self, peers: Peers, stage: Stage) -> None:
        self.stage = stage
        rank, last = peers.rank, peers.size - 1
        self._before = _pair(peers, f"hop {rank - 1}", 1) if rank > 0 else None
        self._behind = _pair(peers, f"hop {rank}", 0) if rank < last else None
        self.back = _pair(peers, "back", 0 if rank == 0 else 1) if rank in (0, last) else None
        self._rows = RING_ROWS if stage.graphs is None else max(RING_ROWS, stage.graphs.shapes.most_rows)
        shape = (stage.ring_depth, self._rows, stage.decoder.config.hidden)
        self._incoming, self._outgoing = (
            torch.empty(shape if pair is not None else 0, dtype=stage.dtype, device=stage.device)
            for pair in (self._before, self._behind)
        )
        self._receiving = torch.cuda.Stream(stage.device)
        self._arrived, self._used = ([torch.cuda.Event() for _ in range(stage.ring_depth)] for _ in range(2))
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._connect(rank, last)

    def _connect(self, rank: int, last: int) -> None:
        """One word through every hop: makes the communicators now, not with the first request."""
        word = torch.zeros(1, dtype=torch.int32, device=self.stage.device)
        if self._before is not None:
            self._before.recv([word], 0, 0).wait()
        if self._behind is not None:
            self._behind.send([word], 1, 0).wait()
        if self.back is not None and rank == last:
            self.back.send([word], 0, 0).wait()
        elif self.back is not None:
            self.back.recv([word], 1, 0).wait()

    def expect(self, order: StepOrder) -> None:
        return None

    def hidden(self, order: StepOrder, expected: None) -> Tensor:
        assert self._before is not None
        row, computing = order.step % self.stage.ring_depth, torch.cuda.current_stream()
        with torch.cuda.stream(self._receiving):
            if order.rows <= self._rows:
                self._receiving.wait_event(self._used[row])
                buffer = self._incoming[row, : order.rows]
            else:
                shape = (order.rows, self._incoming.shape[2])
                buffer = torch.empty(shape, dtype=self.stage.dtype, device=self.stage.device)
                buffer.record_stream(computing)
            self._before.recv([buffer], 0, 0).wait()
            self._arrived[row].record(self._receiving)
        computing.wait_event(self._arrived[row])
        return buffer

    def send_hidden(self, residual: Tensor, order: StepOrder) -> None:
        assert self._behind is not None
        row = order.step % self.stage.ring_depth
        self._forget_sent()
        if order.rows <= self._rows:
            buffer = self._outgoing[row, : order.rows]
            buffer.copy_(residual)
        else:
            buffer = residual
        self._used[row].record()
        self._sent.append((self._behind.send([buffer], 1, 0), buffer))

    def send_tokens(self, tokens: Tensor, order: StepOrder) -> None:
        assert self.back is not None
        self._used[order.step % self.stage.ring_depth].record()
        self._forget_sent()
        self._sent.append((self.back.send([tokens], 0, 0), tokens))

    def _forget_sent(self) -> None:
        """Lets go of buffers that were sent a whole ring ago; the stream waits for them, which costs nothing."""
        while len(self._sent) >= self.stage.ring_depth:
            self._sent.popleft()[0].wait()

    def close(self) -> None:
        torch.cuda.synchronize(self.stage.device)
        for pair in (self._before, self._behind, self.back):
            if pair is not None:
                pair.shutdown()

    def abort(self) -> None:
        for pair in (self._before, self._behind, self.back):
            if pair is not None:
                pair.abort()


def _pair(peers: Peers, name: str, place: int) -> dist.ProcessGroupNCCL:
    """A communicator of two stages; `place`: 0 for the one that comes first in the chain, 1 for the other."""
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options.config.max_ctas = HOP_BLOCKS
    options._timeout = NCCL_TIMEOUT
    return dist.ProcessGroupNCCL(dist.PrefixStore(name, peers.store), place, 2, options)


class NcclReturns:
    """See `engine.pipeline.Returns`: tokens go into the token pool and to the host without the host's help."""

    def __init__(self, hops: NcclHops, peers: Peers, reply: Any) -> None:
        stage = hops.stage
        self._hops, self._peers, self._reply = hops, peers, reply
        self._pool, self._depth = stage.token_pool, stage.ring_depth
        shape = (stage.ring_depth, stage.max_streams)
        self._tokens = torch.empty(shape, dtype=torch.int32, device=stage.device)
        self._host = torch.empty(shape, dtype=torch.int32, pin_memory=True)
        self._stream = torch.cuda.Stream(stage.device)
        self._arrived = [torch.cuda.Event() for _ in range(stage.ring_depth)]
        self._orders: dict[int, StepOrder] = {}
        self._taken = -1

    @torch.inference_mode()
    def expect(self, order: StepOrder) -> None:
        assert self._hops.back is not None
        self._orders[order.step] = order
        row = order.step % self._depth
        with torch.cuda.stream(self._stream):
            tokens = self._tokens[row, : max(order.samples, 1)]
            self._hops.back.recv([tokens], 1, 0).wait()
            if order.samples:
                slots = order.sample_slots().pin_memory().to(self._pool.device, non_blocking=True)
                self._pool.index_copy_(0, slots, tokens)
                self._host[row, : order.samples].copy_(tokens, non_blocking=True)
            self._arrived[row].record(self._stream)

    def ready(self, step: int) -> bool:
        return self._arrived[step % self._depth].query()

    def settle(self, step: int) -> None:
        """Steps launched from now on start when the tokens of `step` are in the token pool; the host does not wait."""
        if step > self._taken:
            torch.cuda.current_stream().wait_event(self._arrived[step % self._depth])

    def take(self, step: int) -> tuple[list[int], list[TokenLogprobs | None] | None]:
        while not self.ready(step):
            self._peers.check()
            time.sleep(0)
        order = self._orders.pop(step)
        self._taken = step
        return self._host[step % self._depth, : order.samples].tolist(), self._reply() if order.logprobs else None

    def close(self) -> None:
        return None
