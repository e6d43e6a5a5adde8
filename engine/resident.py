"""The resident loop of every stage but the first: take an order, take the hidden state, run, hand over, again.

`python -m engine.resident` is what stage 0 starts on its own machine; `serve_stage` is what a process of torchrun runs
whose rank is not 0. Either ends with the process of stage 0, and with one line when another stage is gone.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
import traceback
from typing import Any

import torch

from engine.assemble import Place, assemble
from engine.config import EngineConfig, EngineError
from engine.memory import free_memory
from engine.order import StepOrder
from engine.peers import LOST_LINK, Aborted, Meeting, Peers, device_for, local_store, torchrun_meeting
from engine.pipeline import CLOSE, SPANS
from engine.spans import SpanLog, StageSpans
from engine.stage import Stage
from engine.wires import Wires


class StepFailed(Exception):
    """A step failed on this stage; the message is the device's or torch's."""


class Resident:
    """One stage of one engine."""

    def __init__(self, wires: Wires, stage: Stage, timeline: bool) -> None:
        self._wires, self._stage = wires, stage
        self._log = SpanLog(stage.device) if timeline else None
        # Stage 0 bounds the steps in flight, and with them what waits here.
        self._inbox: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._receive, name="orders", daemon=True).start()

    def _receive(self) -> None:
        """Takes orders ahead and readies the receipt of their hidden states."""
        if self._stage.device.type == "cuda":
            torch.cuda.set_device(self._stage.device)
        try:
            message = None
            while message != CLOSE:
                message = self._wires.order()
                coming = self._wires.hops.expect(message) if isinstance(message, StepOrder) else None
                self._inbox.put((message, coming))
        except Exception as error:
            self._inbox.put((error, None))

    def run(self) -> None:
        """Works until stage 0 closes the engine; raises RuntimeError when a link breaks."""
        while True:
            message, coming = self._inbox.get()
            if isinstance(message, Exception):
                raise message
            if message == CLOSE:
                return
            if isinstance(message, StepOrder):
                self._step(message, coming)
            elif message == SPANS:
                spans = [] if self._log is None else self._log.take()
                self._wires.answer(StageSpans(socket.gethostname(), time.monotonic(), spans))
            else:
                self._stage.set_kernels(message)

    def _step(self, order: StepOrder, coming: Any) -> None:
        stage, hops = self._stage, self._wires.hops
        stage.resident = order.resident
        hidden = hops.hidden(order, coming)
        start = self._log.mark() if self._log is not None else None
        try:
            residual, logprobs = stage.execute(order, hidden)
            if not order.resident:
                stage.synchronize()
        except RuntimeError as error:
            raise StepFailed(str(error)) from error
        if self._log is not None:
            self._log.add(order.step, start)
        if residual is not None:
            hops.send_hidden(residual, order)
            return
        hops.send_tokens(stage.down.tokens[order.step % stage.ring_depth, : max(order.samples, 1)], order)
        if order.logprobs:
            self._wires.answer(logprobs)


def serve_stage(meeting: Meeting) -> None:
    """Serves one engine after the other, as stage 0 announces them, until it says that there are no more."""
    number = 0
    while (config := meeting.next_engine(number)) is not None:
        serve_engine(meeting, number, config)
        number += 1


def serve_under_torchrun() -> None:
    """What a process of torchrun does whose rank is not 0."""
    serve_stage(torchrun_meeting(EngineConfig("").join_timeout_s))


def serve_engine(meeting: Meeting, number: int, config: EngineConfig) -> None:
    """Serves one engine to its end; returns early where it cannot start here or elsewhere, which stage 0 reports."""
    device = device_for(config.device, meeting)
    peers = None
    try:
        peers = Peers(meeting, number, device, free_memory(device), config.join_timeout_s, config.silence_s)
        peers.on_failure = lambda message: leave(peers, message)
        agree = peers
        place = Place(device, meeting.rank, peers.share_of_free(), lambda pages: agree.smallest("pages", pages))
        own = assemble(config, place)
        peers.all_of("facts", own.facts)
        wires = Wires(peers, own.stage)
    except (Aborted, EngineError) as error:
        if peers is None:
            raise
        if isinstance(error, EngineError):
            peers.abort(f"stage {meeting.rank} ({socket.gethostname()}): {error}")
        peers.close()
        return
    try:
        Resident(wires, own.stage, config.timeline is not None).run()
        peers.all_of("closed", True)
    except StepFailed as error:
        traceback.print_exc()
        leave(peers, str(error), code=1)
    except RuntimeError:
        leave(peers, str(peers.broken(f"a link of stage {meeting.rank}")))
    peers.close()
    wires.close()
    del own, wires
    if device.type == "cuda":
        torch.cuda.empty_cache()


def leave(peers: Peers, message: str, code: int = LOST_LINK) -> None:
    """Ends this process because a stage is gone: at once, for the device may never answer again."""
    print(f"arkbench: stage {peers.rank} ({socket.gethostname()}) ends: {message}", file=sys.stderr, flush=True)
    if code == LOST_LINK:
        peers.leave()
    os._exit(code)


def end_with_parent() -> None:
    """Ends this process when stage 0's end of the pipe closes."""
    os.read(0, 1)
    os._exit(LOST_LINK)


def main() -> None:
    rank, size, port, timeout_s = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(max(1, torch.get_num_threads() // size))
    store = local_store(port, timeout_s)
    serve_stage(Meeting(rank, size, store, lambda: local_store(port, timeout_s)))


if __name__ == "__main__":
    main()
