"""What passes between stages: orders and replies between stage 0 and the others, hidden states from each stage to the
next, tokens from the last stage back to stage 0.

Orders go by gloo always. Hidden states and tokens go by NCCL, GPU to GPU, where each stage has a GPU of its own: every
hop has a communicator of its own, so that no transfer waits behind one of another hop. Elsewhere (CPUs, or stages that
share a GPU, which NCCL refuses) they go by gloo, from a GPU through pinned host memory.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.peers import Peers

FRAME = 8192
"""Bytes of an order's first message: enough for a decode step of 64 requests."""

FOREVER = timedelta(days=365)
"""Of a transfer: that nothing comes is no fault, the heartbeats find a stage that is gone."""

NCCL_TIMEOUT = timedelta(minutes=30)
HOP_CTAS = 4

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


@dataclass
class Coming:
    """A hidden state on its way; `wait` gives it on the stage's device."""

    work: Any
    buffer: Tensor
    device: torch.device

    def wait(self) -> Tensor:
        self.work.wait(FOREVER)
        return self.buffer.to(self.device, non_blocking=True)


class GlooHops:
    """Hidden states and tokens through host memory."""

    def __init__(self, group: dist.ProcessGroupGloo, rank: int, size: int, device: torch.device, depth: int) -> None:
        self._group, self._rank, self._size = group, rank, size
        self._device = device
        self._depth = depth
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def coming(self, rows: int, hidden: int, dtype: torch.dtype) -> Coming:
        """Readies the receipt of a hidden state [rows, hidden]; may be called from another thread, steps in order."""
        buffer = torch.empty((rows, hidden), dtype=dtype, pin_memory=self._device.type == "cuda")
        return Coming(self._group.recv([buffer], self._rank - 1, _HIDDEN), buffer, self._device)

    def send_hidden(self, residual: Tensor) -> None:
        self._send(residual, self._rank + 1, _HIDDEN)

    def send_tokens(self, tokens: Tensor) -> None:
        self._send(tokens, 0, _TOKENS)

    def receive_tokens(self, count: int) -> Tensor:
        """Waits for the tokens of the oldest step that has not been received."""
        tokens = torch.empty(count, dtype=torch.int32)
        self._group.recv([tokens], self._size - 1, _TOKENS).wait(FOREVER)
        return tokens

    def _send(self, tensor: Tensor, rank: int, tag: int) -> None:
        host = tensor.contiguous() if self._device.type == "cpu" else tensor.to("cpu")
        self._sent.append((self._group.send([host], rank, tag), host))
        while len(self._sent) > self._depth:
            self._sent.popleft()[0].wait(FOREVER)

    def close(self) -> None:
        while self._sent:
            self._sent.popleft()[0].wait(FOREVER)
