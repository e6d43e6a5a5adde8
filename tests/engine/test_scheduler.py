"""The scheduler alone: plans against literal expectations, and random traffic that must leave nothing behind."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import Switches
from engine.pages import PagePool
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler


def make(pages=100, page_size=4, max_streams=4, prefill_tokens=16, stages=1, **switches):
    return Scheduler(
        PagePool(pages),
        page_size,
        max_streams,
        64,
        prefill_tokens,
        Switches().with_(switches),
        frozenset({0}),
        stages=stages,
    )


def add(scheduler, name, prompt, tokens=4):
    scheduler.add(Request(name, list(range(1, prompt + 1)), SamplingParams(max_tokens=tokens, ignore_eos=True)), 0)


def shape(plan):
    """(kind, [(request, start, count, samples)])"""
    kind = "decode" if plan.decode else "prompt"
    return kind, [(p.track.request.id, p.start, p.count, p.samples) for p in plan.pieces]


def test_prompts_share_the_budget_and_decodes_take_turns_with_them():
    scheduler = make()
    for name, prompt in (("a", 6), ("b", 20), ("c", 3)):
        add(scheduler, name, prompt)
    assert shape(scheduler.plan()) == ("prompt", [("a", 0, 6, True), ("b", 0, 10, False)])
    assert shape(scheduler.plan()) == ("decode", [("a", 6, 1, True)])
    assert shape(scheduler.plan()) == ("prompt", [("b", 10, 10, True), ("c", 0, 3, True)])
    assert shape(scheduler.plan()) == ("decode", [("a", 7, 1, True), ("b", 20, 1, True), ("c", 3, 1, True)])


def test_whole_prompts_are_never_cut_and_alone_without_batching():
    scheduler = make(prefill="whole", prefill_batching="off")
    add(scheduler, "a", 20)
    add(scheduler, "b", 2)
    assert shape(scheduler.plan()) == ("prompt", [("a", 0, 20, True)])
    assert shape(scheduler.plan()) == ("decode", [("a", 20, 1, True)])
    assert shape(scheduler.plan()) == ("prompt", [("b", 0, 2, True)])


def test_without_decode_batching_requests_take_turns():
    scheduler = make(decode_batching="off")
    add(scheduler, "a", 2)
    add(scheduler, "b", 2)
    scheduler.plan()
    order = [shape(scheduler.plan())[1][0][0] for _ in range(4)]
    assert order == ["a", "b", "a", "b"]


def test_nothing_is_planned_past_max_tokens():
    scheduler = make()
    add(scheduler, "a", 2, tokens=2)
    plans = [scheduler.plan(), scheduler.plan()]
    assert scheduler.plan() is None
    assert [o.finished for plan in plans for o in scheduler.complete(plan, [7])] == [None, "length"]
    assert not scheduler.has_work()


def test_pages_of_a_finished_request_wait_for_the_step_in_flight():
    scheduler = make(pages=9)
    scheduler.add(Request("a", [1, 2, 3, 4], SamplingParams(max_tokens=8)), 0)
    first, second = scheduler.plan(), scheduler.plan()
    assert scheduler.pool.free == 6
    (outcome,) = scheduler.complete(first, [0])
    assert outcome.finished == "stop"
    assert scheduler.pool.free == 6
    assert scheduler.complete(second, [9]) == []
    assert scheduler.pool.free == 8


def test_the_request_admitted_last_gives_up_its_pages():
    scheduler = make(pages=5, max_streams=2)
    add(scheduler, "a", 7, tokens=8)
    add(scheduler, "b", 7, tokens=8)
    tokens = iter(range(50, 90))
    kinds = []
    for _ in range(60):
        plan = scheduler.plan()
        if plan is None:
            break
        kinds.append(shape(plan))
        scheduler.complete(plan, [next(tokens) for piece in plan.pieces if piece.samples])
    again = [pieces for kind, pieces in kinds if kind == "prompt"]
    assert again[0] == [("a", 0, 7, True), ("b", 0, 7, True)]
    assert [pieces[0][0] for pieces in again[1:]] == ["b"]
    assert not scheduler.has_work()
    assert scheduler.pool.free == 4


def test_a_plan_tells_the_page_table_what_is_new():
    scheduler = make(page_size=4)
    add(scheduler, "a", 6)
    plan = scheduler.plan()
    assert plan.fresh_slots == (1,)
    assert plan.new_pages == ((1, 0, 1), (1, 1, 2))
    assert scheduler.plan().new_pages == ()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_random_traffic_answers_everything_and_leaves_nothing(data):
    """Random lengths, cancellations, stops and depths: every answer is its request's own, in order."""
    pages = data.draw(st.integers(6, 20), label="pages")
    switches = {
        "prefill": data.draw(st.sampled_from(["whole", "sequential", "pipelined"])),
        "prefill_batching": data.draw(st.sampled_from(["on", "off"])),
        "decode_batching": data.draw(st.sampled_from(["on", "off"])),
    }
    stages = data.draw(st.integers(1, 3), label="stages")
    scheduler = make(pages=pages, prefill_tokens=data.draw(st.integers(1, 12)), stages=stages, **switches)
    depth = data.draw(st.integers(1, 3), label="depth")
    most = (pages - 1) * 4
    answers, finished, flying, wanted = {}, {}, [], {}
    for i in range(data.draw(st.integers(1, 8), label="requests")):
        prompt = data.draw(st.integers(1, min(most - 1, 30)))
        wanted[str(i)] = data.draw(st.integers(1, min(most - prompt, 12)))
        add(scheduler, str(i), prompt, wanted[str(i)])
        answers[str(i)] = []
    for _ in range(1500):
        if not scheduler.has_work() and not flying:
            break
        if data.draw(st.integers(0, 30)) == 0:
            outcome = scheduler.cancel(data.draw(st.sampled_from(sorted(answers))))
            if outcome is not None:
                finished[outcome.track.request.id] = "cancelled"
        while len(flying) < depth and (plan := scheduler.plan()) is not None:
            owners = [page for track in scheduler.running for page in track.pages]
            assert len(owners) == len(set(owners)) and 0 not in owners
            assert all(piece.track in scheduler.running for piece in plan.pieces)
            flying.append(plan)
        assert flying or not scheduler.has_work()
        if flying:
            plan = flying.pop(0)
            tokens = [1000 + p.start + p.count - p.track.prompt_length for p in plan.pieces if p.samples]
            for outcome in scheduler.complete(plan, tokens):
                answers[outcome.track.request.id].append(outcome.token)
                if outcome.finished:
                    finished[outcome.track.request.id] = outcome.finished
    assert set(finished) == set(answers)
    for name, tokens in answers.items():
        assert tokens == [1000 + i for i in range(len(tokens))]
        assert finished[name] == "cancelled" or len(tokens) == wanted[name]
    assert scheduler.pool.free == scheduler.pool.capacity
    assert len(scheduler._free_slots) == scheduler.max_streams
