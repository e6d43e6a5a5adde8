"""Random traffic against a simulated device that knows what every page and state holds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import Switches
from engine.pages import PagePool
from engine.prefix import PrefixIndex, sha256
from engine.promptcache import PromptCache
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler

PAGE, SLOTS, SNAPSHOTS, LONGEST = 4, 3, 4, 40


class Device:
    """Executes plans at once, as a device does in order. A cell holds the tokens up to and with its own."""

    def __init__(self, recurrent):
        self.recurrent = recurrent
        self.cells, self.states, self.rows, self.texts = {}, {}, {}, {}

    def run(self, plan):
        for slot in plan.fresh_slots:
            self.rows[slot] = {}
        for slot, index, page in plan.new_pages:
            self.rows[slot][index] = page
        for source, target in plan.restores:
            self.states[target] = self.states[source]
        for piece in plan.pieces:
            self._write(piece)
        sampled = [self._read(piece) for piece in plan.pieces]
        for source, target in plan.snapshots:
            self.states[target] = self.states[source]
        return [token for token in sampled if token is not None]

    def _text(self, piece):
        return self.texts.setdefault(piece.track.request.id, list(piece.track.request.prompt))

    def _write(self, piece):
        text = self._text(piece)
        for position in range(piece.start, piece.start + piece.count):
            page = self.rows[piece.slot][position // PAGE]
            self.cells[page, position % PAGE] = tuple(text[: position + 1])

    def _read(self, piece):
        text, end = self._text(piece), piece.start + piece.count
        for position in range(end):
            assert self.cells[self.rows[piece.slot][position // PAGE], position % PAGE] == tuple(text[: position + 1])
        if self.recurrent:
            if piece.start:
                assert self.states[piece.slot] == tuple(text[: piece.start])
            self.states[piece.slot] = tuple(text[:end])
        if not piece.samples:
            return None
        if len(text) == end:
            text.append((sum(text) + len(text)) % 3)
        return text[end]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_what_a_request_reads_is_always_its_own_beginning(data):
    recurrent = data.draw(st.booleans(), label="recurrent")
    contiguous = not recurrent and data.draw(st.booleans(), label="contiguous")
    hashes = {"sha256": sha256, "constant": lambda d: b"x", "weak": lambda d: bytes([sum(d) % 4])}
    pages = data.draw(st.integers(LONGEST // PAGE, 30), label="pages") + 1
    pool = PagePool(pages)
    cache = None
    if not contiguous:
        slots = range(SLOTS + 1, SLOTS + 1 + SNAPSHOTS) if recurrent else ()
        index = PrefixIndex(PAGE, slots, hashes[data.draw(st.sampled_from(sorted(hashes)))])
        pool.keeper, cache = index, PromptCache(index, pool, recurrent)
    switches = Switches().with_(
        {
            "cache": "contiguous" if contiguous else "paged",
            "prefill": data.draw(st.sampled_from(["whole", "sequential"])),
            "prefill_batching": data.draw(st.sampled_from(["on", "off"])),
            "decode_batching": data.draw(st.sampled_from(["on", "off"])),
        }
    )
    budget = data.draw(st.integers(1, 20))
    scheduler = Scheduler(pool, PAGE, SLOTS, LONGEST, budget, switches, frozenset(), cache)
    device, depth = Device(recurrent), data.draw(st.integers(1, 3))
    flying, wanted, answers, prompts = [], {}, {}, {}
    common = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=20))
    left = data.draw(st.integers(1, 10))
    for _ in range(2000):
        if left and (data.draw(st.booleans()) or not scheduler.has_work()):
            name, left = str(left), left - 1
            prompt = common[: data.draw(st.integers(0, len(common)))]
            prompt = prompt + data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=8))
            prompts[name] = prompt
            wanted[name], answers[name] = data.draw(st.integers(1, LONGEST - len(prompt))), []
            scheduler.add(Request(name, prompt, SamplingParams(max_tokens=wanted[name], ignore_eos=True)), 0)
        if not left and not scheduler.has_work() and not flying:
            break
        if data.draw(st.integers(0, 25)) == 0 and answers:
            gone = data.draw(st.sampled_from(sorted(answers)))
            if scheduler.cancel(gone) is not None:
                wanted[gone] = len(answers[gone])
        while len(flying) < depth and (plan := scheduler.plan()) is not None:
            flying.append((plan, device.run(plan)))
        if flying:
            for outcome in scheduler.complete(*flying.pop(0)):
                track = outcome.track
                answers[track.request.id].append(outcome.token)
                assert track.cached_tokens % PAGE == 0
                assert track.cached_tokens < track.prompt_length
    else:
        raise AssertionError("the scheduler never came to an end")
    for name, tokens in answers.items():
        assert len(tokens) == wanted[name]
        prompt = prompts[name]
        assert tokens == device.texts.get(name, prompt)[len(prompt) :][: len(tokens)]
    assert pool.free == pool.capacity and not any(pool._references)
    assert sorted(scheduler._free_slots) == list(range(1, scheduler.max_streams + 1))
    if cache is not None:
        held = [node.snapshot for node in cache.index._snapshots]
        assert sorted(cache.index._free_snapshots + held) == (list(slots) if recurrent else [])
        assert pool.kept == len(cache.index)
