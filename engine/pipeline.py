"""A model over several stages, as stage 0 sees it: it decides, holds the first layers, and gets the tokens back.

The scheduler's plans become orders (`engine/order.py`) that go to every stage at once, ahead of the data; each stage
works them off in its own resident loop (`engine/resident.py`). Hidden states go from stage to stage; from the last one
come the tokens of every step, or a single empty word for a piece that yields none, so that stage 0 knows how far the
steps are. Stage 0 never waits for that word, only for tokens that it needs.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from engine.assemble import Assembled, Place, assemble, joined_facts
from engine.config import EngineConfig, EngineError
from engine.layers.linear import Kernels
from engine.memory import free_memory
from engine.order import Banned, StepOrder
from engine.peers import (
    Aborted,
    Meeting,
    Peers,
    device_for,
    end_children,
    spawned_meeting,
    torchrun_meeting,
    under_torchrun,
)
from engine.sampler import TokenLogprobs
from engine.scheduler import StepPlan
from engine.spans import Pieces, SpanLog, StageSpans
from engine.wires import GlooHops, Wires

if TYPE_CHECKING:
    from engine.wires_nccl import NcclReturns

CLOSE, SPANS = "close", "spans"
"""Messages to a stage besides orders: end this engine; report what was worked on when."""


@dataclass
class PipelineResult:
    """A step in flight over all stages."""

    plan: StepPlan
    order: StepOrder
    pipeline: Pipeline
    logprobs: list[TokenLogprobs | None] | None = None

    def ready(self) -> bool:
        return self.pipeline.returns.ready(self.order.step)

    def wait(self) -> list[int]:
        tokens, self.logprobs = self.pipeline.returns.take(self.order.step)
        return tokens


class Returns:
    """What comes back from the last stage, step by step, received by a thread of its own.

    `settle` puts tokens into the token pool, where decode steps find them.
    """

    def __init__(self, hops: GlooHops, peers: Peers, token_pool: Tensor, reply: Callable[[], Any]) -> None:
        self._hops, self._peers, self._reply = hops, peers, reply
        self._pool = token_pool
        self._expected: queue.Queue[StepOrder | None] = queue.Queue()
        self._arrived: queue.Queue[tuple[StepOrder, Tensor, Any] | Exception] = queue.Queue()
        self._done: dict[int, tuple[list[int], Any]] = {}
        self._settled = -1
        self._thread = threading.Thread(target=self._receive, name="tokens", daemon=True)
        self._thread.start()

    def expect(self, order: StepOrder) -> None:
        self._expected.put(order)

    def ready(self, step: int) -> bool:
        return step in self._done or not self._arrived.empty()

    def settle(self, step: int) -> None:
        """Waits until the tokens of every step up to `step` are in the token pool."""
        while self._settled < step:
            self._take_next()

    def take(self, step: int) -> tuple[list[int], list[TokenLogprobs | None] | None]:
        """Waits for a step; its tokens and log probabilities."""
        self.settle(step)
        return self._done.pop(step)

    def _take_next(self) -> None:
        while True:
            self._peers.check()
            try:
                item = self._arrived.get(timeout=0.2)
                break
            except queue.Empty:
                continue
        if isinstance(item, Exception):
            raise self._peers.broken("the link from the last stage to stage 0") from item
        order, tokens, logprobs = item
        if order.samples:
            slots = order.sample_slots()
            self._pool.index_copy_(0, slots.to(self._pool.device), tokens.to(self._pool.device))
        self._done[order.step] = (tokens[: order.samples].tolist(), logprobs)
        self._settled = order.step

    def _receive(self) -> None:
        try:
            while (order := self._expected.get()) is not None:
                tokens = self._hops.receive_tokens(max(order.samples, 1))
                logprobs = self._reply() if order.logprobs else None
                self._arrived.put((order, tokens, logprobs))
        except Exception as error:
            self._arrived.put(error)

    def close(self) -> None:
        self._expected.put(None)


@contextmanager
def _named(peers: Peers) -> Iterator[None]:
    """Turns what a broken link raises into an error that names the stage that is gone."""
    try:
        yield
    except RuntimeError as error:
        raise peers.broken("a link of stage 0") from error


def meet(config: EngineConfig) -> Meeting:
    """The processes of the stages: torchrun's, or started here."""
    if not under_torchrun():
        return spawned_meeting(config.stages, config.join_timeout_s)
    meeting = torchrun_meeting(config.join_timeout_s)
    if meeting.size != config.stages:
        raise EngineError(f"stages={config.stages}, but torchrun started {meeting.size} processes: give both the same")
    return meeting


class Pipeline:
    """Starts or joins the other stages, then runs steps over all of them. Raises EngineError when a stage is gone."""

    def __init__(self, config: EngineConfig) -> None:
        self._meeting = meet(config)
        self._peers: Peers | None = None
        self._wires: Wires | None = None
        self.resident = True
        try:
            self._join(config)
        except Aborted as error:
            self._break_off(str(error))
            raise EngineError(str(error)) from None
        except BaseException as error:
            self._break_off(f"stage 0 could not start: {error}")
            raise

    def _join(self, config: EngineConfig) -> None:
        number = self._meeting.announce(config)
        device = device_for(config.device, self._meeting)
        self._peers = peers = Peers(
            self._meeting, number, device, free_memory(device), config.join_timeout_s, config.silence_s
        )
        place = Place(device, 0, peers.share_of_free(), lambda pages: peers.smallest("pages", pages))
        self.own: Assembled = assemble(config, place)
        self.facts = joined_facts(peers.all_of("facts", self.own.facts))
        self._wires = Wires(peers, self.own.stage)
        self.returns = self._make_returns(self._wires, peers)
        self.described = f"{config.stages} stages: {self._wires.described}"
        self._last_sample: dict[int, int] = {}
        self._timeline = config.timeline
        self._log = None if config.timeline is None else SpanLog(self.own.stage.device)
        self._pieces = Pieces()

    def _make_returns(self, wires: Wires, peers: Peers) -> Returns | NcclReturns:
        def reply() -> Any:
            return wires.reply(peers.size - 1)

        if isinstance(wires.hops, GlooHops):
            return Returns(wires.hops, peers, self.own.stage.token_pool, reply)
        from engine.wires_nccl import NcclHops, NcclReturns

        assert isinstance(wires.hops, NcclHops)
        return NcclReturns(wires.hops, peers, reply)

    def launch(self, plan: StepPlan, banned: Banned) -> PipelineResult:
        """Sends a step on its way."""
        peers, wires, stage = self._peers, self._wires, self.own.stage
        assert peers is not None and wires is not None
        peers.check()
        stage.resident = self.resident
        order = stage.order(plan, banned)
        with _named(peers):
            wires.send_order(order)
            if order.decode and order.resident:
                self.returns.settle(max(self._last_sample[piece.slot] for piece in plan.pieces))
        residual = self._execute(order, plan)
        with _named(peers):
            wires.hops.send_hidden(residual, order)
            self.returns.expect(order)
        for piece in plan.pieces:
            if piece.samples:
                self._last_sample[piece.slot] = order.step
        return PipelineResult(plan, order, self)

    def _execute(self, order: StepOrder, plan: StepPlan) -> Tensor:
        stage = self.own.stage
        start = self._log.mark() if self._log is not None else None
        residual, _ = stage.execute(order)
        assert residual is not None
        if not order.resident:
            stage.synchronize()
        if self._log is not None:
            self._log.add(order.step, start)
            self._pieces.add(plan)
        return residual

    def set_kernels(self, kernels: Kernels) -> None:
        """Turns the switch `kernels` on every stage; only while no step is in flight."""
        assert self._wires is not None
        self._wires.send_order(kernels)
        self.own.stage.set_kernels(kernels)

    def write_timeline(self) -> None:
        """Appends to the file what every stage worked on since the last call; only while no step is in flight."""
        if not self._pieces:
            return
        assert self._log is not None and self._timeline is not None and self._wires is not None
        host = socket.gethostname()
        lines = self._pieces.lines(0, self._log.take(), 0.0)
        self._wires.send_order(SPANS)
        for rank in range(1, self._meeting.size):
            found: StageSpans = self._wires.reply(rank)
            # Machines differ in their clocks; on one machine they are the same.
            offset = 0.0 if found.host == host else time.monotonic() - found.now_s
            lines += self._pieces.lines(rank, found.spans, offset)
        self._pieces.clear()
        with open(self._timeline, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def close(self) -> None:
        """Ends the other stages of this engine; after a failure, at once."""
        peers, wires = self._peers, self._wires
        assert peers is not None and wires is not None
        if peers.failure is not None:
            self._break_off(peers.failure)
            return
        try:
            wires.send_order(CLOSE)
            self.returns.close()
            peers.all_of("closed", True)
        except (EngineError, RuntimeError) as error:
            self._break_off(str(error))
            return
        peers.close()
        wires.close()
        end_children(list(self._meeting.children.values()), grace_s=5)

    def _break_off(self, reason: str) -> None:
        """Ends what is left of the stages, whatever state it is in."""
        if self._peers is not None:
            self._peers.abort(reason)
            self._peers.close()
        for child in self._meeting.children.values():
            child.kill()
        end_children(list(self._meeting.children.values()), grace_s=5)
        if self._wires is not None:
            self._wires.abort()
