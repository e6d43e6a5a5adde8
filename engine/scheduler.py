"""Which request advances by how many tokens in the next step. Pure Python: no torch, no device.

A prompt and a decode are one case: a request has `length` tokens, of which `scheduled` are computed or in flight, and
a step advances it by some of the rest; when all are in, the step samples one more. The scheduler plans ahead of the
device: it needs to know that a token was sampled, not which. With a prompt cache a request begins at the end of what
others have computed of its tokens.

Policy. Requests are admitted first come, first served, while there is a slot and room in the cache. A step is either
of prompts or of decodes; while there are both, they take turns, so at most one step of prompt pieces (`prefill_tokens`
tokens) stands between two tokens of a running answer. Over several stages the decoding requests go round in as many
groups as there are stages, and while prompts are read a decode step enters when the tokens it needs are back, prompt
pieces meanwhile. When pages run out, the request admitted last gives up its own and is computed again later. A
contiguous cache sets `max_model_len` tokens aside for every slot: pages never run out, but there are fewer slots.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from engine.config import EngineError, Switches
from engine.pages import PagePool
from engine.pieces import PieceSizer
from engine.promptcache import Found, Memory, PromptCache
from engine.request import FinishReason, Request


@dataclass(eq=False)
class Track:
    """Where a request stands. `tokens`: the prompt and the answer as far as the host has read it.

    `length`: the same with what is sampled but not read. `in_flight`: steps launched and not over.
    `on_device`: the last token was sampled in this residence, so the device has it. `cached_tokens`: prompt tokens that
    others had computed when the first step of this request was planned; None before.
    """

    request: Request
    tokens: list[int]
    length: int
    seed: int
    slot: int = 0
    scheduled: int = 0
    in_flight: int = 0
    last_step: int = -1
    on_device: bool = False
    reported: bool = False
    finished: FinishReason | None = None
    pages: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    memory: Memory = field(default_factory=Memory)

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def exhausted(self) -> bool:
        """Every token that it may make has been sampled."""
        return self.length - self.prompt_length >= self.request.sampling.max_tokens

    @property
    def decoding(self) -> bool:
        return self.on_device and self.scheduled == self.length - 1 and not self.exhausted

    @property
    def prompting(self) -> bool:
        return not self.on_device


@dataclass(frozen=True)
class Piece:
    """`count` tokens of a request from position `start`; `samples`: the last of them yields a new token."""

    track: Track
    slot: int
    start: int
    count: int
    samples: bool


@dataclass(frozen=True)
class StepPlan:
    """One step. `decode`: every piece is one token whose value the device has in its token pool.

    Before the step the page-table rows of `fresh_slots` are cleared, then `new_pages` written: (slot, index in the
    request's row, page), and recurrent states copied as `restores` says: (from slot, to slot). After it those of
    `snapshots` are copied.
    """

    step: int
    pieces: tuple[Piece, ...]
    decode: bool
    fresh_slots: tuple[int, ...]
    new_pages: tuple[tuple[int, int, int], ...]
    restores: tuple[tuple[int, int], ...] = ()
    snapshots: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a step brought for one request."""

    track: Track
    token: int | None
    finished: FinishReason | None
    index: int = 0


class Scheduler:
    """Plans steps and takes their results. `stop_ids`: the model's end-of-text tokens.

    `prompt_cache`: None with the switch off. `attention_ratio`: of pieces over several stages (`engine/pieces.py`).
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        max_streams: int,
        max_model_len: int,
        prefill_tokens: int,
        switches: Switches,
        stop_ids: frozenset[int] = frozenset(),
        prompt_cache: PromptCache | None = None,
        stages: int = 1,
        attention_ratio: float = 0.0,
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.max_model_len = max_model_len
        self.contiguous = switches.cache == "contiguous"
        self.max_streams = min(max_streams, pool.capacity // self._run) if self.contiguous else max_streams
        self.prefill_tokens = prefill_tokens
        self.switches = switches
        self.stop_ids = stop_ids
        self.stages = stages
        self.sizer = PieceSizer(stages, prefill_tokens, attention_ratio)
        self.prompt_cache = prompt_cache
        self.waiting: deque[Track] = deque()
        self.running: list[Track] = []
        self.step = 0
        self._last_completed = -1
        self._free_slots = deque(range(1, self.max_streams + 1))
        self._fenced_slots: deque[tuple[int, int]] = deque()
        self._tracks: dict[str, Track] = {}
        self._new_pages: list[tuple[int, int, int]] = []
        self._fresh_slots: list[int] = []
        self._restores: list[tuple[int, int]] = []
        self._prompts_ran_last = False
        self._prompt_steps = 0

    # ------------------------------------------------------------------------------------------ requests

    def add(self, request: Request, seed: int) -> None:
        """Queues a request; raises EngineError for one that can never run."""
        self._check(request)
        track = Track(request, list(request.prompt), len(request.prompt), seed)
        self._tracks[request.id] = track
        self.waiting.append(track)

    def _check(self, request: Request) -> None:
        prompt, answer = len(request.prompt), request.sampling.max_tokens
        total = prompt + answer
        if request.id in self._tracks:
            raise EngineError(f"request '{request.id}': that id is already in use")
        if prompt == 0 or answer < 1:
            raise EngineError(f"request '{request.id}': needs at least one prompt token and max_tokens of 1 or more")
        if total > self.max_model_len:
            raise EngineError(
                f"request '{request.id}': {prompt} prompt + {answer} output tokens exceed the limit of "
                f"{self.max_model_len} tokens; shorten the prompt or lower max_tokens"
            )
        if self._pages_for(total) > self.pool.capacity:
            raise EngineError(
                f"request '{request.id}': {total} tokens do not fit the cache of "
                f"{self.pool.capacity * self.page_size} tokens; start the engine with more cache_tokens"
            )

    def cancel(self, request_id: str) -> Outcome | None:
        """Ends a request now; None if there is none of that id."""
        track = self._tracks.get(request_id)
        if track is None:
            return None
        if track in self.running:
            self._retire(track, "cancelled")
        else:
            self.waiting.remove(track)
            track.finished = "cancelled"
            del self._tracks[request_id]
        return Outcome(track, None, "cancelled")

    def requests(self) -> list[str]:
        """The ids of the requests that have not ended."""
        return list(self._tracks)

    def has_work(self) -> bool:
        return bool(self._tracks)

    # ------------------------------------------------------------------------------------------ planning

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can advance before a step in flight is over."""
        self._admit()
        prompts_first = not self._prompts_ran_last
        for prompts in (prompts_first, not prompts_first):
            pieces = self._prompt_pieces() if prompts else self._decode_pieces()
            if pieces:
                self._prompts_ran_last = prompts
                return self._commit(pieces, decode=not prompts)
        return None

    def _admit(self) -> None:
        while self.waiting and self._free_slots and len(self.running) < self.max_streams:
            track = self.waiting[0]
            if track.length > len(track.tokens):
                return
            found = self._find(track)
            if not self._has_room(track, found):
                return
            self.waiting.popleft()
            track.slot = self._free_slots.popleft()
            self._fresh_slots.append(track.slot)
            self.running.append(track)
            if self.contiguous:
                first = 1 + (track.slot - 1) * self._run
                self._own(track, self.pool.take_these(range(first, first + self._run)))
            self._adopt(track, found)

    def _has_room(self, track: Track, found: Found | None) -> bool:
        if self.contiguous:
            return True
        reserved = sum(self._missing_pages(other, other.length) for other in self.running)
        needed = self._pages_for(track.length)
        if found is not None:
            needed += self.pool.unowned(node.page for node in found.nodes) - len(found.nodes)
        return needed + reserved <= self.pool.free

    def _prompt_pieces(self) -> list[Piece]:
        if self._prompt_steps and self.stages > 1 and self.switches.prefill != "pipelined":
            return []
        whole = self.switches.prefill == "whole"
        budget, time = self.prefill_tokens, self._piece_time()
        pieces: list[Piece] = []
        for track in [t for t in self.running if t.prompting]:
            if budget <= 0 or track not in self.running:
                break
            if track.scheduled == track.memory.start:
                self._adopt(track, self._find(track))
            remaining = track.length - track.scheduled
            count = remaining if whole else min(remaining, budget)
            if track.memory.cut > track.scheduled:
                count = min(count, track.memory.cut - track.scheduled)
            if time is not None:
                count = min(count, self.sizer.count(time, track.scheduled) if time > 0 else 0)
            if (pieces and count > budget) or count == 0 or not self._grow(track, track.scheduled + count):
                break
            if time is not None:
                time -= self.sizer.time(track.scheduled, count)
            pieces.append(self._advance(track, count, samples=count == remaining))
            budget -= count
            if self.switches.prefill_batching == "off":
                break
        return pieces

    def _piece_time(self) -> float | None:
        """The time that one prompt step may take where steps should take equal time: pipelined over stages."""
        if self.stages == 1 or self.switches.prefill != "pipelined":
            return None
        waiting = sum(t.length - t.scheduled for t in (*self.running, *self.waiting) if t.prompting)
        return self.sizer.budget(waiting)

    def _decode_pieces(self) -> list[Piece]:
        alone = self.switches.decode_batching == "off"
        ready = [track for track in self.running if track.decoding]
        if alone or self.stages > 1:
            ready.sort(key=lambda track: track.last_step)
        if self.stages > 1:
            cohort = -(-len(ready) // self.stages)
            group = [track for track in ready if track.in_flight < self._decodes_ahead()][:cohort]
            # In the order of admission, or a request could take the pages of one that is already in the step.
            ready = group if alone else [track for track in self.running if track in group]
        pieces: list[Piece] = []
        running = len(self.running)
        for track in ready:
            if track in self.running and self._grow(track, track.length):
                pieces.append(self._advance(track, 1, samples=True))
                if alone:
                    break
        if not pieces and len(self.running) < running:
            return self._decode_pieces()  # the group gave up its own pages: another one's turn
        return pieces

    def _decodes_ahead(self) -> int:
        """Steps of one request that may be in flight over several stages, the new one counted.

        A step that is launched before its token is back keeps the first stage waiting for it: that is no loss only
        where no prompt could be read meanwhile.
        """
        prompts = any(track.prompting for track in self.running)
        return 1 if prompts or self.switches.loop == "driven" else 2

    def _advance(self, track: Track, count: int, samples: bool) -> Piece:
        """The request's next piece, which counts as computed from here on."""
        piece = Piece(track, track.slot, track.scheduled, count, samples)
        if track.cached_tokens is None:
            track.cached_tokens = track.memory.start
        track.scheduled += count
        track.in_flight += 1
        track.last_step = self.step
        self._publish(track)
        if samples:
            track.length += 1
            track.on_device = True
        return piece

    def _commit(self, pieces: list[Piece], decode: bool) -> StepPlan:
        self._prompt_steps += not decode
        plan = StepPlan(
            self.step, tuple(pieces), decode, tuple(self._fresh_slots), tuple(self._new_pages), tuple(self._restores),
            tuple(self._snapshots(pieces, decode)),
        )  # fmt: skip
        self._fresh_slots.clear()
        self._new_pages.clear()
        self._restores.clear()
        self.step += 1
        return plan

    # ------------------------------------------------------------------------------------------ prompt cache

    def _find(self, track: Track) -> Found | None:
        return None if self.prompt_cache is None else self.prompt_cache.find(track.memory, track.tokens)

    def _adopt(self, track: Track, found: Found | None) -> None:
        """Lets a request of which nothing is computed yet begin behind the pages that are found."""
        if self.prompt_cache is None or found is None:
            return
        pages = self.prompt_cache.adopt(track.memory, found)
        if pages:
            self._own(track, pages)
            track.scheduled = track.memory.start
            snapshot = found.nodes[-1].snapshot
            if snapshot is not None:
                self._restores.append((snapshot, track.slot))

    def _publish(self, track: Track) -> None:
        if self.prompt_cache is not None:
            self.prompt_cache.publish(track.memory, track.tokens, track.pages, track.scheduled)

    def _snapshots(self, pieces: list[Piece], decode: bool) -> list[tuple[int, int]]:
        """(slot of the request, slot of the snapshot) for the pieces that end with a page."""
        cache = self.prompt_cache
        if cache is None or not cache.recurrent:
            return []
        ends = [(piece, piece.start + piece.count) for piece in pieces]
        taken = [
            (piece.slot, cache.snapshot(piece.track.memory, end, not decode))
            for piece, end in ends
            if end % self.page_size == 0
        ]
        return [(slot, snapshot) for slot, snapshot in taken if snapshot is not None]

    # ------------------------------------------------------------------------------------------ pages

    @property
    def _run(self) -> int:
        """Pages of one slot of a contiguous cache."""
        return self._pages_for(self.max_model_len)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _missing_pages(self, track: Track, tokens: int) -> int:
        return max(self._pages_for(tokens) - len(track.pages), 0)

    def _grow(self, track: Track, tokens: int) -> bool:
        """Gives the request pages for `tokens` tokens, taking them from later ones if need be; False: not now."""
        missing = self._missing_pages(track, tokens)
        while missing > self.pool.free:
            if missing <= self.pool.free + self.pool.fenced:
                return False
            victim = self.running[-1]
            self._preempt(victim)
            if victim is track:
                return False
        if missing:
            self._own(track, self.pool.take(missing))
        return True

    def _own(self, track: Track, pages: list[int]) -> None:
        """The next pages of a request's row are these."""
        first = len(track.pages)
        self._new_pages += [(track.slot, first + i, page) for i, page in enumerate(pages)]
        track.pages += pages

    def _preempt(self, track: Track) -> None:
        """Back to the head of the queue; its tokens are computed again, sampled ones included."""
        self._vacate(track)
        track.scheduled = 0
        track.on_device = False
        self.waiting.appendleft(track)

    def _vacate(self, track: Track) -> None:
        self.running.remove(track)
        self._publish(track)
        if self.prompt_cache is not None:
            track.memory = self.prompt_cache.leave(track.memory)
        self.pool.release(reversed(track.pages), after=self.step - 1)
        self._fenced_slots.append((self.step - 1, track.slot))
        self._new_pages = [entry for entry in self._new_pages if entry[0] != track.slot]
        self._restores = [entry for entry in self._restores if entry[1] != track.slot]
        track.pages = []
        track.slot = 0
        if self._last_completed == self.step - 1:
            self._release_fences(self._last_completed)

    def _retire(self, track: Track, reason: FinishReason) -> None:
        track.finished = reason
        self._vacate(track)
        del self._tracks[track.request.id]

    # ------------------------------------------------------------------------------------------ results

    def complete(self, plan: StepPlan, tokens: list[int]) -> list[Outcome]:
        """Takes the sampled tokens of a step that is over, one for each piece that samples, in order."""
        self._prompt_steps -= not plan.decode
        outcomes = []
        sampled = iter(enumerate(tokens))
        for piece in plan.pieces:
            track = piece.track
            track.in_flight -= 1
            index, token = next(sampled) if piece.samples else (0, None)
            if token is not None and track.finished is None:
                outcomes.append(self._take(track, token, index))
        self._release_fences(plan.step)
        return outcomes

    def _take(self, track: Track, token: int, index: int) -> Outcome:
        track.tokens.append(token)
        if len(track.tokens) % self.page_size == 0 and track in self.running:
            self._publish(track)
        reason = self._reason_to_stop(track, token)
        if reason is not None:
            if track in self.running:
                self._retire(track, reason)
            else:
                self.waiting.remove(track)
                track.finished = reason
                del self._tracks[track.request.id]
        return Outcome(track, token, reason, index)

    def _reason_to_stop(self, track: Track, token: int) -> FinishReason | None:
        sampling = track.request.sampling
        made = len(track.tokens) - track.prompt_length
        if made >= sampling.min_tokens and token in self.stops(track):
            return "stop"
        return "length" if made >= sampling.max_tokens else None

    def stops(self, track: Track) -> frozenset[int]:
        """The tokens that end this request's answer."""
        sampling = track.request.sampling
        return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.stop_ids)

    def _release_fences(self, step: int) -> None:
        self._last_completed = step
        self.pool.completed(step)
        while self._fenced_slots and self._fenced_slots[0][0] <= step:
            self._free_slots.append(self._fenced_slots.popleft()[1])
