"""The prompt cache end to end: hits change no token, are counted exactly, and never cross from other tokens."""

import pytest

from engine.request import Request, SamplingParams
from tests.caching.helpers import check_rest, poison, poison_states, serve
from tests.engine.helpers import load, prompt_of

ON = {"prompt_cache": "on"}
PAGE = 16


def tokens_of(answers):
    return [answer.tokens for answer in answers]


def cold(folder, prompts, **options):
    """What each prompt gives without a prompt cache."""
    return tokens_of(serve(load(folder), prompts, **options))


@pytest.fixture(scope="module")
def shared():
    return prompt_of(50, 1)


@pytest.mark.parametrize("family", ["qwen3", "glm4_moe_lite", "gpt_oss"])
@pytest.mark.parametrize("loop", ["driven", "inverted"])
def test_a_prompt_that_comes_again_starts_behind_its_full_pages(folders, family, loop, shared):
    engine = load(folders[family], switches={**ON, "loop": loop})
    poison(engine)
    (first,) = serve(engine, [shared])
    (again,) = serve(engine, [shared])
    assert (first.cached, again.cached) == (0, 48)
    assert [again.tokens, first.tokens] == cold(folders[family], [shared] * 2)


@pytest.mark.parametrize("length", [PAGE, 2 * PAGE, 3 * PAGE])
def test_the_last_token_of_a_full_hit_is_computed(folders, length):
    prompt = prompt_of(length, 2)
    engine = load(folders["qwen3"], switches=ON)
    (first,) = serve(engine, [prompt])
    (again,) = serve(engine, [prompt])
    assert (first.cached, again.cached) == (0, length - PAGE)
    assert len(again.tokens) == 8
    assert again.tokens == first.tokens


@pytest.mark.parametrize(("common", "cached"), [(0, 0), (15, 0), (16, 16), (17, 16), (31, 16), (32, 32), (50, 48)])
def test_only_whole_pages_of_equal_tokens_are_shared(folders, shared, common, cached):
    other = shared[:common] + [(token + 1) % 96 for token in shared[common:]] + prompt_of(20, 3)
    engine = load(folders["qwen3"], switches=ON)
    serve(engine, [shared])
    (found,) = serve(engine, [other])
    assert found.cached == cached
    assert [found.tokens] == cold(folders["qwen3"], [other])


def test_a_growing_conversation_starts_behind_its_last_answer(folders):
    engine = load(folders["qwen3"], switches=ON)
    said, expected_cached = prompt_of(20, 4), []
    for turn in range(5):
        (answer,) = serve(engine, [said], tokens=10)
        expected_cached.append(answer.cached)
        assert [answer.tokens] == cold(folders["qwen3"], [said], tokens=10)
        said = said + answer.tokens + prompt_of(13, 10 + turn)
    # A turn leaves 20, 43, 66, ... + 10 tokens, of which the last was never an input: 29, 52, 75, 98 computed.
    assert expected_cached == [0, 16, 48, 64, 96]


@pytest.mark.parametrize("batching", ["on", "off"])
def test_requests_of_one_step_share_what_it_computes(folders, shared, batching):
    prompts = [shared + prompt_of(5 + i, i) for i in range(6)]
    engine = load(folders["qwen3"], switches={**ON, "prefill_batching": batching})
    poison(engine)
    answers = serve(engine, prompts)
    assert [answer.cached for answer in answers] == [0, 48, 48, 48, 48, 48]
    assert tokens_of(answers) == cold(folders["qwen3"], prompts)


@pytest.mark.parametrize("prefill_tokens", [1, 7, 16, 33])
def test_pieces_of_prompts_are_found_as_they_are_written(folders, shared, prefill_tokens):
    prompts = [shared, shared + prompt_of(9, 1), shared[:40]]
    engine = load(folders["qwen3"], switches=ON, prefill_tokens=prefill_tokens)
    assert tokens_of(serve(engine, prompts)) == cold(folders["qwen3"], prompts)
    assert [answer.cached for answer in serve(engine, prompts)] == [48, 48, 32]


# ---------------------------------------------------------------------------------------------- collisions


def test_a_constant_hash_gives_misses_and_never_another_requests_page(folders, shared):
    engine = load(folders["qwen3"], switches=ON)
    engine.scheduler.prompt_cache.index._hash = lambda data: b"same"
    prompts = [shared, prompt_of(50, 7), shared[:16] + prompt_of(40, 8), prompt_of(33, 9)]
    expected = cold(folders["qwen3"], prompts)
    for _ in range(2):
        for i, prompt in enumerate(prompts):
            (found,) = serve(engine, [prompt])
            assert found.tokens == expected[i]
            # One page can be known by one digest: the first page of the first prompt, to those that share it.
            assert found.cached in ((0, 16) if prompt[:16] == shared[:16] else (0,))
    assert len(engine.scheduler.prompt_cache.index) == 1


def test_a_page_whose_beginning_differs_is_not_used_though_its_own_tokens_are_equal(folders, shared):
    engine = load(folders["qwen3"], switches=ON)
    engine.scheduler.prompt_cache.index._hash = lambda data: data[-4 * PAGE :]  # of a page's own tokens alone
    serve(engine, [shared])
    other = prompt_of(16, 5) + shared[16:]
    (found,) = serve(engine, [other])
    assert found.cached == 0
    assert [found.tokens] == cold(folders["qwen3"], [other])


def test_a_page_that_is_given_away_is_not_found_any_more(folders, shared):
    engine = load(folders["qwen3"], switches=ON, cache_tokens=96, max_streams=1)
    poison(engine)
    other = prompt_of(70, 6)
    expected = cold(folders["qwen3"], [shared, other])
    for _ in range(3):
        for prompt, tokens in zip([shared, other], expected, strict=True):
            (found,) = serve(engine, [prompt])
            assert found.tokens == tokens
    # Six pages: beside the four kept of `other`, whose run took five, there is room for the first page of `shared`.
    assert serve(engine, [other])[0].cached == 64
    assert serve(engine, [shared])[0].cached == 16


# ---------------------------------------------------------------------------------------------- scarce pages


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("loop", ["driven", "inverted"])
def test_preemption_and_resumption_from_the_cache_change_no_token(folders, family, loop):
    """A pool of seven pages, requests that outgrow it."""
    prompts = [prompt_of(30, 1), prompt_of(37, 2), prompt_of(30, 1) + prompt_of(4, 3)]
    engine = load(folders[family], switches={**ON, "loop": loop}, cache_tokens=7 * PAGE, max_streams=3)
    poison(engine)
    preempted = []
    inner = engine.scheduler._preempt
    engine.scheduler._preempt = lambda track: (preempted.append(track.request.id), inner(track))
    answers = serve(engine, prompts, tokens=40)
    assert preempted
    assert tokens_of(answers) == cold(folders[family], prompts, tokens=40)
    assert [answer.cached for answer in answers][:2] == [0, 0]


def test_requests_that_share_fit_where_they_would_not_alone(folders, shared):
    """Three requests of four pages in six: three pages are common, so all run at once."""
    prompts = [[*shared, i] for i in range(3)]
    engine = load(folders["qwen3"], switches=ON, cache_tokens=6 * PAGE, max_streams=3)
    serve(engine, [shared], tokens=1)
    most = 0
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), prompt, SamplingParams(max_tokens=8, ignore_eos=True)))
    while engine.has_work():
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert most == 3
    check_rest(engine)


def test_the_page_released_longest_ago_is_given_away_first(folders):
    engine = load(folders["qwen3"], switches=ON, cache_tokens=8 * PAGE, max_streams=1)
    a, b, c = (prompt_of(33, seed) for seed in (1, 2, 3))
    for prompt in (a, b, a):
        serve(engine, [prompt], tokens=2)
    serve(engine, [c + prompt_of(55, 4)], tokens=2)
    assert serve(engine, [a], tokens=2)[0].cached == 32
    assert serve(engine, [b], tokens=2)[0].cached == 0


def test_cancelled_requests_leave_what_they_computed_and_nothing_owned(folders, shared):
    engine = load(folders["qwen3"], switches=ON)
    engine.add(Request("a", shared, SamplingParams(max_tokens=50, ignore_eos=True)))
    for _ in range(4):
        engine.step()
    engine.cancel("a")
    while engine.has_work():
        engine.step()
    check_rest(engine)
    (found,) = serve(engine, [shared])
    assert found.cached == 48
    assert [found.tokens] == cold(folders["qwen3"], [shared])


# ---------------------------------------------------------------------------------------------- recurrent states


def test_recurrent_states_come_back_only_at_exact_positions(folders, shared):
    """The first request leaves no snapshot, the second cuts its prompt where they part, the third starts there."""
    engine = load(folders["qwen3_5"], switches=ON)
    poison(engine)
    poison_states(engine)
    prompts = [shared + prompt_of(5 + i, 20 + i) for i in range(4)]
    answers = [serve(engine, [prompt], tokens=4)[0] for prompt in prompts]
    assert [answer.cached for answer in answers] == [0, 0, 48, 48]
    assert tokens_of(answers) == cold(folders["qwen3_5"], prompts, tokens=4)


def test_an_answer_leaves_a_snapshot_for_the_next_turn(folders):
    engine = load(folders["qwen3_5"], switches=ON)
    said, found = prompt_of(20, 4), []
    for turn in range(4):
        (answer,) = serve(engine, [said], tokens=20)
        found.append(answer.cached)
        assert [answer.tokens] == cold(folders["qwen3_5"], [said], tokens=20)
        said = said + answer.tokens + prompt_of(3, 10 + turn)
    # 39, 62 and 85 tokens were computed; an answer passes the ends of its pages at 32, 48 and 80.
    assert found == [0, 32, 48, 80]


@pytest.mark.parametrize("boundary", [64, 128])
def test_cold_and_hit_agree_around_the_ends_of_chunks(folders, boundary):
    text = prompt_of(boundary + 20, 9)
    engine = load(folders["qwen3_5"], switches=ON, page_size=16)
    lengths = range(boundary - 10, boundary + 11)
    expected = cold(folders["qwen3_5"], [text[:length] for length in lengths], tokens=3)
    for _ in range(2):
        answers = [serve(engine, [text[:length]], tokens=3)[0] for length in lengths]
        assert tokens_of(answers) == expected
        for length, answer in zip(lengths, answers, strict=True):
            assert answer.cached % 16 == 0
            assert answer.cached < length


def test_scarce_snapshots_are_given_up_least_recently_used_first(folders, shared):
    engine = load(folders["qwen3_5"], switches=ON, max_streams=1)
    index = engine.scheduler.prompt_cache.index
    del index._free_snapshots[2:]
    slots = sorted(index._free_snapshots)
    prompts = [prompt_of(33, seed) for seed in range(4)]
    for prompt in prompts:
        for _ in range(3):
            (found,) = serve_without_check(engine, prompt)
        assert found.cached == 32
    assert sorted(index._free_snapshots + [node.snapshot for node in index._snapshots]) == slots
    assert serve_without_check(engine, prompts[3])[0].cached == 32
    assert serve_without_check(engine, prompts[0])[0].cached == 0


def serve_without_check(engine, prompt):
    engine.add(Request("x", prompt, SamplingParams(max_tokens=2, ignore_eos=True)))
    events = []
    while engine.has_work():
        events += engine.step()
    return [type("Found", (), {"cached": events[0].cached_tokens})]


# ---------------------------------------------------------------------------------------------- the switch


def test_the_switch_is_off_by_default_and_then_nothing_is_kept(folders, shared):
    engine = load(folders["qwen3"])
    assert engine.scheduler.prompt_cache is None
    answers = [serve(engine, [shared])[0] for _ in range(2)]
    assert [answer.cached for answer in answers] == [0, 0]
    assert engine.pool.kept == 0


def test_turning_the_switch_off_forgets_everything(folders, shared):
    engine = load(folders["qwen3"], switches=ON)
    serve(engine, [shared])
    on = engine.config.switches
    engine.set_switches(on.with_({"prompt_cache": "off"}))
    assert serve(engine, [shared])[0].cached == 0
    engine.set_switches(on)
    assert serve(engine, [shared])[0].cached == 0
    assert serve(engine, [shared])[0].cached == 48
