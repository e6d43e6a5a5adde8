"""A client process: takes jobs over a socket, runs them, hands answers back. Started by `ClientProcess`."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from arkbench.targets._channel import Channel, ChannelClosed
from arkbench.targets._job import Job
from arkbench.targets.base import Answer

_BATCH = 32


class ClientProcess:
    """The harness's handle of one client process. A process of its own keeps the harness's work off the clock."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        code = f"from arkbench.targets._worker import main; main({theirs.fileno()})"
        command = [sys.executable, "-c", code]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL
        )
        theirs.close()
        self.channel = Channel(ours)

    def close(self) -> None:
        self.channel.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Session:
    """One job as the client process sees it: answers go out in small batches, between turns of the loop."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._answers: list[Answer] = []
        self.release: float | None = None
        self.cancelled = False

    def on_answer(self, answer: Answer) -> None:
        self._answers.append(answer)

    def poll(self) -> bool:
        """Sends what is ready, reads what has come; True when the job is to be cancelled."""
        if self._answers:
            batch, self._answers = self._answers[:_BATCH], self._answers[_BATCH:]
            self._channel.send(("answers", batch))
        elif self._channel.unsent:
            self._channel.flush()
        for kind, value in self._channel.receive():
            if kind == "release":
                self.release = value
            elif kind == "cancel":
                self.cancelled = True
        return self.cancelled

    def wait_for_release(self) -> None:
        while self.release is None and not self.cancelled:
            select.select([self._channel], [], [], 1.0)
            self.poll()

    def finish(self, stats: Any) -> None:
        while self._answers:
            self.poll()
        self._channel.send(("done", stats))
        while self._channel.unsent:
            select.select([], [self._channel], [], 1.0)
            self._channel.flush()


def _run_job(channel: Channel, job: Job) -> None:
    session = _Session(channel)
    if job.client == "raw":
        from arkbench.targets._raw import RawClient as Client
    else:
        from arkbench.targets._httpx import HttpxClient as Client
    client = Client(job, session.on_answer, session.poll)
    client.open_connections()
    channel.send(("ready", None))
    session.wait_for_release()
    session.finish(client.run(session.release if session.release is not None else time.monotonic()))


def _raise_file_limit() -> None:
    """As many open sockets as the system lets this process have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(fd: int) -> None:
    """Serves jobs until the harness closes its end."""
    # Ctrl-C reaches the whole process group: the harness decides what is cancelled.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _raise_file_limit()
    channel = Channel(socket.socket(fileno=fd))
    try:
        while True:
            select.select([channel], [], [])
            for kind, value in channel.receive():
                if kind == "job":
                    _run_job(channel, value)
    except ChannelClosed:
        return
