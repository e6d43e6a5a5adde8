"""Which stage worked on which piece when: recorded on every stage, joined by stage 0, one JSON line a piece."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from engine.scheduler import StepPlan


@dataclass(frozen=True)
class Span:
    """A step's work on one stage, seconds on the clock of its machine (time.monotonic)."""

    step: int
    start_s: float
    end_s: float


class SpanLog:
    """The spans of one stage; on a GPU they are taken on the device, and nothing waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[int, float | torch.cuda.Event, float | torch.cuda.Event]] = []
        if self._on_gpu:
            self._zero = torch.cuda.Event(enable_timing=True)
            self._zero.record()
            self._zero.synchronize()
            self._zero_s = time.monotonic()

    def mark(self) -> float | torch.cuda.Event:
        """Now, as the device sees it."""
        if not self._on_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, step: int, start: float | torch.cuda.Event) -> None:
        self._marks.append((step, start, self.mark()))

    def take(self) -> list[Span]:
        """What was recorded since the last call; waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        spans = [Span(step, self._seconds(start), self._seconds(end)) for step, start, end in self._marks]
        self._marks.clear()
        return spans

    def _seconds(self, mark: float | torch.cuda.Event) -> float:
        if isinstance(mark, float):
            return mark
        return self._zero_s + self._zero.elapsed_time(mark) / 1000


@dataclass(frozen=True)
class StageSpans:
    """The spans of a stage and its clock at the moment at which they were sent, seconds."""

    host: str
    now_s: float
    spans: list[Span]


class Pieces:
    """What the steps since the last report worked on. Requests are numbered in the order in which they appear."""

    def __init__(self) -> None:
        self._steps: dict[int, list[tuple[str, int, int | None, int]]] = {}
        self._requests: dict[str, int] = {}
        self._read: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, plan: StepPlan) -> None:
        parts = []
        for piece in plan.pieces:
            name = piece.track.request.id
            request = self._requests.setdefault(name, len(self._requests))
            number = None
            if not plan.decode:
                number = self._read.get(name, 0)
                self._read[name] = number + 1
            parts.append(("decode" if plan.decode else "prefill", request, number, piece.count))
        self._steps[plan.step] = parts

    def lines(self, stage: int, spans: list[Span], offset_s: float) -> list[dict[str, object]]:
        """Pieces that share a step share its time by their tokens; a decode step is one line, of its first request.

        `offset_s` turns the stage's clock into that of stage 0.
        """
        lines = []
        for span in spans:
            parts = self._steps[span.step]
            parts = parts[:1] if parts[0][0] == "decode" else parts
            start, total = span.start_s + offset_s, sum(count for *_, count in parts)
            for kind, request, number, count in parts:
                end = start + (span.end_s - span.start_s) * count / total
                lines.append(
                    {"stage": stage, "kind": kind, "request": request, "piece": number, "start_s": start, "end_s": end}
                )
                start = end
        return lines

    def clear(self) -> None:
        self._steps.clear()
        self._requests.clear()
        self._read.clear()
