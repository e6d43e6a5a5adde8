"""The processes of one model's stages: how they find each other, and how each learns that another is gone.

On one machine stage 0 starts the others itself. Under `torchrun` (RANK and WORLD_SIZE are set) the processes are there
already, on one machine or several, and its store is the meeting point. Either way a key-value store (`TCPStore`) is
all that is needed to join: it holds who is who, what could not start, and a heartbeat of every stage.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.config import EngineConfig, EngineError

LOST_LINK = 17
"""Exit code of a stage that ends because another one is gone: never the cause."""

BEAT_S = 0.5
POLL_S = 0.02
NAMING_S = 1.0
"""How long stage 0 looks for the stage that died before it names a broken link instead."""


class Aborted(Exception):
    """Another stage could not start; the message is its own."""


@dataclass(frozen=True)
class Member:
    """One stage's process. `device` is the same string for two processes exactly when they share a device."""

    rank: int
    host: str
    pid: int
    device: str
    free: int | None

    def __str__(self) -> str:
        return f"stage {self.rank} ({self.host}, process {self.pid})"


@dataclass(frozen=True)
class Meeting:
    """Where processes meet. `children`: those that this process started, by rank; `address`: of the store."""

    rank: int
    size: int
    store: dist.Store
    reconnect: Callable[[], dist.Store]
    children: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def announce(self, config: EngineConfig) -> int:
        """Calls the other processes to the next engine; its number."""
        number = self.store.add("engines", 1) - 1
        self.store.set(f"config/{number}", pickle.dumps(config))
        return number

    def next_engine(self, number: int) -> EngineConfig | None:
        """Waits for the engine of that number; None when stage 0 has ended."""
        while not self.store.check([f"config/{number}"]):
            if self.store.check(["end"]):
                return None
            time.sleep(POLL_S)
        return pickle.loads(self.store.get(f"config/{number}"))

    def end(self) -> None:
        """Tells the other processes that no engine follows."""
        self.store.set("end", "")


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def torchrun_meeting(timeout_s: float) -> Meeting:
    """The rendezvous of torchrun, whose agent keeps the store."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    prefix = f"arkbench/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def connect(serve: bool = False) -> dist.Store:
        store = dist.TCPStore(host, port, None, serve, timedelta(seconds=timeout_s), wait_for_workers=False)
        return dist.PrefixStore(prefix, store)

    return Meeting(rank, size, connect(rank == 0 and not agent), connect)


def end_torchrun_stages() -> None:
    """Tells torchrun's other processes that no engine follows."""
    with suppress(RuntimeError):
        torchrun_meeting(timeout_s=5.0).end()


def spawned_meeting(stages: int, timeout_s: float) -> Meeting:
    """Starts stages - 1 processes on this machine and keeps the store for them."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)
    root = str(Path(__file__).resolve().parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    children = {}
    for rank in range(1, stages):
        arguments = [str(rank), str(stages), str(store.port), str(timeout_s)]
        # Its stdin is a pipe that closes when this process ends, however it ends.
        children[rank] = subprocess.Popen(
            [sys.executable, "-m", "engine.resident", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    return Meeting(0, stages, store, lambda: local_store(store.port, timeout_s), children)


def local_store(port: int, timeout_s: float) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)


def device_for(device: str, meeting: Meeting) -> torch.device:
    """The device of this process: a GPU of its own where the machine has enough, else GPUs are shared in turn."""
    if device != "cuda":
        return torch.device(device)
    local = int(os.environ.get("LOCAL_RANK", meeting.rank)) if not meeting.children else meeting.rank
    return torch.device("cuda", local % torch.cuda.device_count())


def device_key(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{socket.gethostname()} cpu"
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"


class Peers:
    """The stages of one engine, from joining to the end. `engine`: which engine of these processes it is."""

    def __init__(
        self, meeting: Meeting, engine: int, device: torch.device, free: int | None, join_s: float, silence_s: float
    ) -> None:
        self.rank, self.size = meeting.rank, meeting.size
        self.meeting = meeting
        self.join_s, self.silence_s = join_s, silence_s
        self.prefix = f"engine-{engine}"
        self.store = dist.PrefixStore(self.prefix, meeting.store)
        self.failure: str | None = None
        self.on_failure: Callable[[str], None] = lambda message: None
        self._stop = threading.Event()
        me = Member(self.rank, socket.gethostname(), os.getpid(), device_key(device), free)
        self._put("member", me)
        self.members: list[Member] = self._gather("member", join_s)
        self._watcher = threading.Thread(target=self._watch, name="stage watch", daemon=True)
        self._watcher.start()

    @property
    def own_devices(self) -> bool:
        """Whether no two stages share a device."""
        return len({member.device for member in self.members}) == self.size

    def share_of_free(self) -> int | None:
        """This stage's part of the memory that was free on its device before any stage was built."""
        me = self.members[self.rank]
        sharers = [m for m in self.members if m.device == me.device]
        return None if me.free is None else min(m.free for m in sharers if m.free is not None) // len(sharers)

    def smallest(self, name: str, value: int) -> int:
        """The least of the numbers that all stages name."""
        self._put(name, value)
        return min(self._gather(name))

    def all_of(self, name: str, value: Any) -> list[Any]:
        """What each stage names, by rank; waits for all of them."""
        self._put(name, value)
        return self._gather(name)

    def abort(self, message: str) -> None:
        """Tells the others that this stage cannot start."""
        self.store.set("error", message)

    def check(self) -> None:
        """Raises EngineError once a stage is known to be gone."""
        if self.failure is not None:
            raise EngineError(self.failure)

    def broken(self, link: str) -> EngineError:
        """The error for a broken link: names the stage that died, if one is found to have within a moment."""
        until = time.monotonic() + (NAMING_S if self.meeting.children else self.silence_s)
        while self.failure is None and time.monotonic() < until:
            time.sleep(POLL_S)
        return EngineError(self.failure or f"{link} is broken; see what the processes of the stages printed")

    def leave(self) -> None:
        """Marks this stage as one that only follows another that is gone."""
        with suppress(RuntimeError):
            self.store.set(f"left/{self.rank}", "")

    def close(self) -> None:
        self._stop.set()
        self._watcher.join(timeout=5)

    # ------------------------------------------------------------------------------------------ inside

    def _put(self, name: str, value: Any) -> None:
        self.store.set(f"{name}/{self.rank}", pickle.dumps(value))

    def _gather(self, name: str, timeout_s: float = float("inf")) -> list[Any]:
        until = time.monotonic() + timeout_s
        for rank in range(self.size):
            while not self.store.check([f"{name}/{rank}"]):
                if self.store.check(["error"]):
                    raise Aborted(self.store.get("error").decode())
                self.check()
                self._check_children()
                if time.monotonic() > until:
                    raise EngineError(
                        f"stage {rank} of {self.size} did not join within {timeout_s:g} s; start it, or allow more by "
                        "ARKBENCH_JOIN_TIMEOUT (seconds)"
                    )
                time.sleep(POLL_S)
        return [pickle.loads(self.store.get(f"{name}/{rank}")) for rank in range(self.size)]

    def _check_children(self) -> None:
        dead = _first_dead(self.meeting.children)
        if dead is not None:
            raise EngineError(f"stage {dead[0]} ({socket.gethostname()}) ended at its start: {dead[1]}")

    def _watch(self) -> None:
        """Beats, and looks for others whose beat has stopped or whose process has ended."""
        try:
            store = dist.PrefixStore(self.prefix, self.meeting.reconnect())
            seen: dict[int, tuple[bytes, float]] = {}
            beat = 0
            while not self._stop.wait(BEAT_S if not self.meeting.children else BEAT_S / 5):
                beat += 1
                store.set(f"beat/{self.rank}", str(beat))
                message = self._dead_child() or self._silent(store, seen)
                if message is not None:
                    self._fail(message)
                    return
        except Exception as error:
            if not self._stop.is_set():
                self._fail(f"the meeting point at stage 0 ({self.members[0].host}) is gone ({type(error).__name__})")

    def _dead_child(self) -> str | None:
        dead = _first_dead(self.meeting.children)
        return None if dead is None else f"{self.members[dead[0]]} ended: {dead[1]}; start the engine again"

    def _silent(self, store: dist.Store, seen: dict[int, tuple[bytes, float]]) -> str | None:
        now = time.monotonic()
        for member in self.members:
            if member.rank == self.rank:
                continue
            beat = store.get(f"beat/{member.rank}") if store.check([f"beat/{member.rank}"]) else b""
            last, since = seen.get(member.rank, (None, now))
            if beat != last:
                seen[member.rank] = (beat, now)
            elif now - since > self.silence_s and not store.check([f"left/{member.rank}"]):
                return f"{member} has not been heard of for {self.silence_s:g} s; it, or the network to it, is gone"
        return None

    def _fail(self, message: str) -> None:
        self.failure = message
        self.on_failure(message)


def _first_dead(children: dict[int, subprocess.Popen[bytes]]) -> tuple[int, str] | None:
    """(rank, how) of a child that ended by itself; one that only followed another (LOST_LINK) is not it."""
    for rank, child in children.items():
        code = child.poll()
        if code is not None and code != LOST_LINK:
            return rank, f"signal {-code}" if code < 0 else f"exit code {code}"
    return None


def end_children(children: Sequence[subprocess.Popen[bytes]], grace_s: float) -> None:
    """Closes their pipes, which ends them, and kills those that have not ended after `grace_s`."""
    for child in children:
        assert child.stdin is not None
        child.stdin.close()
    until = time.monotonic() + grace_s
    for child in children:
        try:
            child.wait(timeout=max(until - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
