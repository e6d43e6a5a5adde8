"""Prompts: exact length, distinct from the first token, the same for the same seed."""

from hypothesis import given, settings
from hypothesis import strategies as st

from arkbench import prompts


@settings(max_examples=60, deadline=None)
@given(
    number=st.integers(0, 5000),
    length=st.integers(8, 300),
    vocab=st.integers(64, 200_000),
    seed=st.integers(0, 2**31),
)
def test_length_range_and_seed(number, length, vocab, seed):
    made = prompts.prompt(number, length, vocab, seed)
    assert len(made) == length
    assert all(type(t) is int and 0 <= t < vocab for t in made)
    assert made == prompts.prompt(number, length, vocab, seed)


def test_first_tokens_are_distinct_while_the_vocabulary_lasts():
    for vocab, count in ((96, 96), (49_152, 20_000)):
        assert len({prompts.prompt(n, 16, vocab)[0] for n in range(count)}) == count


def test_small_vocabularies_differ_in_their_first_two_tokens():
    assert len({tuple(prompts.prompt(n, 16, 96)[:2]) for n in range(5000)}) == 5000


def test_another_seed_begins_otherwise():
    assert prompts.prompt(0, 16, 49_152, 0)[0] != prompts.prompt(0, 16, 49_152, 1)[0]


def test_control_tokens_of_real_vocabularies_are_left_out():
    assert min(min(prompts.prompt(n, 64, 49_152)) for n in range(50)) >= 1000


def test_too_many_short_prompts_are_refused():
    try:
        prompts.prompt(96, 1, 96)
    except ValueError as error:
        assert "cannot differ" in str(error)
    else:
        raise AssertionError("97 prompts of one token cannot differ in 96 ids")


def test_mixed_lengths_keep_their_shares():
    lengths = prompts.mixed_lengths([(256, 5), (1024, 3), (4096, 2)], 10)
    assert sorted(lengths) == [256] * 5 + [1024] * 3 + [4096] * 2
    assert lengths[:3] == [256, 1024, 4096]
