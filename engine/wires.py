"""What passes between stages: orders and replies between stage 0 and the others, hidden states from each stage to the
next, tokens from the last stage back to stage 0.

Orders go by gloo always. Hidden states and tokens go by NCCL, GPU to GPU, where each stage has a GPU of its own: every
hop has a communicator of its own, so that no transfer waits behind one of another hop. Elsewhere (CPUs, or stages that
share a GPU, which NCCL refuses) they go by gloo, from a GPU through pinned host memory.
"""

from __future__ import annotations

import pickle
from collections import deque
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engine.order import StepOrder
from engine.peers import Peers
from engine.stage import Stage

FRAME = 8192
"""Bytes of an order's first message: enough for a decode step of 64 requests."""

FOREVER = timedelta(days=365)
"""Of a transfer: that nothing comes is no fault, the heartbeats find a stage that is gone."""

_ORDER, _REST, _REPLY, _HIDDEN, _TOKENS = range(1, 6)


class Mail:
    """Python objects over a gloo group, in order; sends do not wait."""

    def __init__(self, group: dist.ProcessGroupGloo, keep: int) -> None:
        self._group = group
        self._keep = keep
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def send(self, message: Any, ranks: list[int], tag: int = _ORDER) -> None:
        data = pickle.dumps(message, protocol=5)
        frame = torch.zeros(FRAME, dtype=torch.uint8)
        frame[:8].view(torch.int64)[0] = len(data)
        body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        head = body[: FRAME - 8]
        frame[8 : 8 + head.numel()] = head
        rest = body[FRAME - 8 :]
        for rank in ranks:
            self._start(frame, rank, tag)
            if rest.numel():
                self._start(rest, rank, _REST)

    def _start(self, tensor: Tensor, rank: int, tag: int) -> None:
        self._sent.append((self._group.send([tensor], rank, tag), tensor))
        while len(self._sent) > self._keep:
            self._sent.popleft()[0].wait(FOREVER)

    def receive(self, rank: int, tag: int = _ORDER) -> Any:
        """Waits for the next message of `rank`; raises RuntimeError when the link is broken."""
        frame = torch.empty(FRAME, dtype=torch.uint8)
        self._group.recv([frame], rank, tag).wait(FOREVER)
        length = int(frame[:8].view(torch.int64)[0])
        data = frame[8 : 8 + length]
        if length > FRAME - 8:
            rest = torch.empty(length - (FRAME - 8), dtype=torch.uint8)
            self._group.recv([rest], rank, _REST).wait(FOREVER)
            data = torch.cat([data, rest])
        return pickle.loads(data.numpy().tobytes())

    def flush(self) -> None:
        while self._sent:
            self._sent.popleft()[0].wait(FOREVER)


class Hops(Protocol):
    """Hidden states from the stage before to the stage behind, tokens from the last stage to stage 0."""

    def expect(self, order: StepOrder) -> Any:
        """Readies the receipt of a step's hidden state ahead of `hidden`; called from a thread of its own, in order."""
        ...

    def hidden(self, order: StepOrder, expected: Any) -> Tensor:
        """The hidden state [rows, hidden] on the stage's device, which may overwrite it."""
        ...

    def send_hidden(self, residual: Tensor, order: StepOrder) -> None:
        """Sends to the next stage; the buffer may be used again by the next step."""
        ...

    def send_tokens(self, tokens: Tensor, order: StepOrder) -> None:
        """Sends int32 [S] to stage 0."""
        ...

    def close(self) -> None:
        """After the last step: waits for what is still on its way."""
        ...

    def abort(self) -> None:
        """Lets go of transfers that will never end."""
        ...


class GlooHops:
    """Through host memory."""

    def __init__(self, group: dist.ProcessGroupGloo, peers: Peers, stage: Stage) -> None:
        self._group, self._rank, self._last = group, peers.rank, peers.size - 1
        self._device, self._dtype, self._hidden = stage.device, stage.dtype, stage.decoder.config.hidden
        self._keep = stage.ring_depth
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def expect(self, order: StepOrder) -> tuple[Any, Tensor]:
        shape = (order.rows, self._hidden)
        buffer = torch.empty(shape, dtype=self._dtype, pin_memory=self._device.type == "cuda")
        return self._group.recv([buffer], self._rank - 1, _HIDDEN), buffer

    def hidden(self, order: StepOrder, expected: tuple[Any, Tensor]) -> Tensor:
        work, buffer = expected
        work.wait(FOREVER)
        return buffer.to(self._device)

    def send_hidden(self, residual: Tensor, order: StepOrder) -> None:
        self._send(residual, self._rank + 1, _HIDDEN)

    def send_tokens(self, tokens: Tensor, order: StepOrder) -> None:
        self._send(tokens, 0, _TOKENS)

    def receive_tokens(self, count: int) -> Tensor:
        """Waits for the tokens of the oldest step that has not been received."""
        tokens = torch.empty(count, dtype=torch.int32)
        self._group.recv([tokens], self._last, _TOKENS).wait(FOREVER)
        return tokens

    def _send(self, tensor: Tensor, rank: int, tag: int) -> None:
        host = tensor.contiguous() if self._device.type == "cpu" else tensor.to("cpu")
        self._sent.append((self._group.send([host], rank, tag), host))
        while len(self._sent) > self._keep:
            self._sent.popleft()[0].wait(FOREVER)

    def close(self) -> None:
        while self._sent:
            self._sent.popleft()[0].wait(FOREVER)

    def abort(self) -> None:
        self._group.abort()


class Wires:
    """All that connects one stage with the others."""

    def __init__(self, peers: Peers, stage: Stage) -> None:
        store = dist.PrefixStore("gloo", peers.store)
        self._peers = peers
        self._group = dist.ProcessGroupGloo(store, peers.rank, peers.size, timedelta(seconds=peers.join_s))
        self._mail = Mail(self._group, stage.ring_depth * peers.size)
        self._others = [rank for rank in range(peers.size) if rank != peers.rank]
        if stage.device.type == "cuda" and peers.own_devices:
            from engine.wires_nccl import NcclHops

            self.hops: Hops = NcclHops(peers, stage)
            self.described = "a GPU each, joined by NCCL"
        else:
            self.hops = GlooHops(self._group, peers, stage)
            self.described = "joined by gloo through host memory"

    def send_order(self, message: Any) -> None:
        """From stage 0 to all others."""
        self._mail.send(message, self._others)

    def order(self) -> Any:
        """The next message of stage 0."""
        return self._mail.receive(0)

    def answer(self, message: Any) -> None:
        """From a stage to stage 0."""
        self._mail.send(message, [0], _REPLY)

    def reply(self, rank: int) -> Any:
        """The next answer of a stage, at stage 0."""
        return self._mail.receive(rank, _REPLY)

    def close(self) -> None:
        self.hops.close()
        self._mail.flush()

    def abort(self) -> None:
        """Lets go of transfers that will never end."""
        self.hops.abort()
        self._group.abort()
