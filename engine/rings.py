"""Rings of buffers between host and device, each slot guarded by the event of its last use."""

from __future__ import annotations

import torch
from torch import Tensor


class UpRing:
    """Pinned host buffers for inputs; a buffer is filled again only when its last copy is over."""

    def __init__(self, device: torch.device, depth: int) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(depth)]
        self._events = [torch.cuda.Event() if self.on_gpu else None for _ in range(depth)]
        self._used = [False] * depth
        self._at = 0

    def take(self, nbytes: int) -> Tensor:
        """The next host buffer, uint8, of at least nbytes."""
        i = self._at
        if self._used[i]:
            self._events[i].synchronize()
        if self._buffers[i].numel() < nbytes:
            self._buffers[i] = torch.empty(max(nbytes, 4096), dtype=torch.uint8, pin_memory=self.on_gpu)
        return self._buffers[i]

    def send(self, host: Tensor, nbytes: int, into: Tensor | None) -> Tensor:
        """Copies the buffer just taken to the device: into `into`, or into a new buffer."""
        if not self.on_gpu:
            return host[:nbytes].clone()
        target = torch.empty(nbytes, dtype=torch.uint8, device=self.device) if into is None else into
        target.copy_(host[:nbytes], non_blocking=True)
        self._events[self._at].record()
        self._used[self._at] = True
        self._at = (self._at + 1) % len(self._buffers)
        return target


class DownRing:
    """Sampled tokens on their way to the host, on a stream of their own: no step waits for a copy.

    The device writes row `step % depth`; a row is written again only `depth` steps later, when the host, which is at
    most one step behind, has read it.
    """

    def __init__(self, device: torch.device, depth: int, width: int) -> None:
        self.on_gpu = device.type == "cuda"
        self.tokens = torch.zeros((depth, width), dtype=torch.int32, device=device)
        if self.on_gpu:
            self._host = torch.zeros((depth, width), dtype=torch.int32, pin_memory=True)
            self._stream = torch.cuda.Stream(device)
            self._written = [torch.cuda.Event() for _ in range(depth)]
            self._arrived = [torch.cuda.Event() for _ in range(depth)]

    def fetch(self, row: int) -> None:
        """Starts the copy of a row to the host."""
        if not self.on_gpu:
            return
        self._written[row].record()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._written[row])
            self._host[row].copy_(self.tokens[row], non_blocking=True)
            self._arrived[row].record(self._stream)

    def arrived(self, row: int) -> bool:
        """Whether `read` would not wait."""
        return not self.on_gpu or self._arrived[row].query()

    def read(self, row: int, count: int) -> list[int]:
        """Waits for the row and returns its first `count` tokens."""
        if not self.on_gpu:
            return self.tokens[row, :count].tolist()
        self._arrived[row].synchronize()
        return self._host[row, :count].tolist()
