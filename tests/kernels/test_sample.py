"""The sampler: known Philox words, exact sets, distributions, awkward rows; both forms give the same tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.sample import (
    SamplingTensors,
    TokenPlaces,
    exponential_noise,
    philox,
    sample,
    sample_reference,
    sample_triton,
)

BOTH = pytest.mark.parametrize("function", [sample, sample_triton])


def params(rows, temperature=1.0, top_k=0, top_p=1.0, seed=0, position=0, **more):
    def column(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(rows).contiguous()

    return SamplingTensors(
        column(temperature, torch.float32), column(top_k, torch.int32), column(top_p, torch.float32),
        column(seed, torch.int64), column(position, torch.int32), **more,
    )  # fmt: skip


def first_rows(wanted, rows):
    names = ("temperature", "top_k", "top_p", "seed", "position")
    return SamplingTensors(*(getattr(wanted, name)[:rows] for name in names), wanted.greedy)


def test_philox_gives_the_published_words():
    zero, ones = torch.tensor([0]), torch.tensor([0xFFFFFFFF])
    assert [int(w) for w in philox(0, (zero,) * 4)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [int(w) for w in philox(-1, (ones,) * 4)] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_noise_is_positive_and_finite_and_exponential():
    noise = exponential_noise(3, 5, 200_000)
    assert noise.min() > 0 and noise.max() < 17
    assert abs(noise.mean() - 1) < 0.01 and abs(noise.var() - 1) < 0.03


@BOTH
@pytest.mark.parametrize("greedy", [False, True])
def test_greedy_takes_the_lowest_of_equal_logits(function, greedy):
    logits = torch.full((4, 5000), -1.0)
    logits[0, [7, 4900]] = 2.0
    logits[1, [3000, 3001]] = 2.0
    logits[2, 4999] = 0.0
    assert function(logits, params(4, temperature=0.0, greedy=greedy)).tolist() == [7, 3000, 4999, 0]
    assert function(logits, params(4, temperature=0.0, greedy=greedy)).dtype == torch.int32


@BOTH
def test_partials_are_summed(function):
    logits = torch.zeros((3, 1, 10))
    logits[0, 0, 4], logits[1, 0, 6], logits[2, 0, 6] = 1.5, 1.0, 1.0
    assert function(logits, params(1, temperature=0.0)).tolist() == [6]


@BOTH
def test_tokens_of_no_probability_are_never_drawn(function):
    logits = torch.full((20, 3000), float("-inf"))
    logits[:, 1234] = 0.0
    assert function(logits, params(20, seed=torch.arange(20))).tolist() == [1234] * 20


@pytest.mark.parametrize("top_k,top_p,kept", [
    (0, 1.0, 6), (1, 1.0, 1), (3, 1.0, 4), (0, 0.0, 1), (0, 0.3, 1), (0, 0.45, 2), (0, 0.65, 4), (0, 0.97, 6),
    (2, 0.7, 2), (2, 0.6, 1), (4, 0.625, 2), (100, 0.99, 6),
])  # fmt: skip
def test_draws_follow_the_renormalised_distribution(top_k, top_p, kept):
    """Six tokens, two of them tied: the first `kept` of 0.4, 0.2, 0.12, 0.12, 0.1, 0.06 may be drawn."""
    probabilities = torch.zeros(8)
    probabilities[torch.tensor([5, 0, 2, 7, 1, 4])] = torch.tensor([0.4, 0.2, 0.12, 0.12, 0.1, 0.06])
    rows = 600
    logits = probabilities.log().expand(rows, 8).contiguous()
    wanted = params(rows, 1.0, top_k, top_p, seed=11, position=torch.arange(rows))
    tokens = sample(logits, wanted)
    assert sample_triton(logits[:4], first_rows(wanted, 4)).tolist() == tokens[:4].tolist()
    counts = torch.bincount(tokens.long(), minlength=8).double()
    allowed = torch.zeros(8).double()
    order = torch.tensor([5, 0, 2, 7, 1, 4])[:kept]
    allowed[order] = probabilities[order].double()
    expected = rows * allowed / allowed.sum()
    assert counts[allowed == 0].sum() == 0
    chi_square = ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    assert chi_square < 25


@settings(max_examples=15, deadline=None)
@given(vocab=st.integers(1, 5000), seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 2**31 - 1),
       temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]), top_k=st.sampled_from([0, 1, 5, 64, 10_000]),
       top_p=st.sampled_from([0.1, 0.8, 0.95, 1.0]))  # fmt: skip
def test_the_kernel_draws_what_sorting_draws(vocab, seed, position, temperature, top_k, top_p):
    logits = torch.randn((2, vocab), generator=torch.Generator().manual_seed(vocab)) * 4
    wanted = params(2, temperature, top_k, top_p, seed, torch.tensor([position, 1]))
    assert sample_triton(logits, wanted).tolist() == sample_reference(logits, wanted).tolist()


def test_a_row_draws_the_same_alone_and_in_a_batch():
    logits = torch.randn((6, 3000), generator=torch.Generator().manual_seed(0))
    temperature, top_k = torch.tensor([0.0, 1, 1, 1, 2, 0.5]), torch.tensor([0, 0, 9, 0, 9, 50])
    top_p = torch.tensor([1, 1, 1, 0.9, 0.9, 0.5])
    wanted = params(6, temperature, top_k, top_p, torch.arange(6), torch.arange(6) + 9)
    together = sample_triton(logits, wanted).tolist()
    for rows in (1, 2, 5):
        assert sample_triton(logits[:rows], first_rows(wanted, rows)).tolist() == together[:rows]


@pytest.mark.parametrize("top_k,top_p,spread", [(20, 0.95, 12.0), (40, 1.0, 1.0), (0, 0.9, 12.0), (0, 0.9, 1.0),
                                                (3, 0.0, 1.0), (200, 0.8, 1.0)])  # fmt: skip
def test_large_rows_draw_what_sorting_draws_from_a_few_groups_or_from_all(top_k, top_p, spread):
    """272 groups of tokens, more than are held: flat rows and large sets are finished by passes over all values."""
    logits = torch.randn((2, 34_816), generator=torch.Generator().manual_seed(top_k)) * spread
    wanted = params(2, 0.7, top_k, top_p, torch.tensor([3, 2**40]), torch.tensor([17, 1]))
    assert sample_triton(logits, wanted).tolist() == sample_reference(logits, wanted).tolist()


@pytest.mark.parametrize("vocab", [6144, 8192, 8193])
def test_a_set_reaches_below_the_largest_values_of_all_groups_held(vocab):
    """48, 64 and 80 groups of tokens of nearly equal probability, where 64 are held: a set has tokens of every rank."""
    logits = torch.randn((4, vocab), generator=torch.Generator().manual_seed(vocab)) * 0.1
    wanted = params(4, 1.0, 0, 0.98, torch.arange(4))
    assert sample_triton(logits, wanted).tolist() == sample_reference(logits, wanted).tolist()


def test_banned_tokens_are_in_no_set():
    """All but three tokens of two groups at -inf: fewer groups with a value than are held, and fewer tokens than k."""
    logits = torch.full((3, 20_000), float("-inf"))
    logits[:, [3, 4, 19_999]] = torch.tensor([1.0, 0.5, 0.9])
    wanted = params(3, 1.0, torch.tensor([5, 2, 0]), torch.tensor([1.0, 1.0, 0.9]), torch.arange(3))
    assert sample_triton(logits, wanted).tolist() == sample_reference(logits, wanted).tolist()


def test_equal_values_in_more_groups_than_are_held():
    logits = torch.full((3, 34_816), -5.0)
    logits[:, [0, 30_000]] = 9.0
    wanted = params(3, 0.5, torch.tensor([5, 5, 0]), torch.tensor([1.0, 0.4, 0.4]), torch.arange(3))
    drawn = sample_triton(logits, wanted).tolist()
    assert drawn == sample_reference(logits, wanted).tolist() and set(drawn) <= {0, 30_000}


def test_zeros_of_both_signs_are_equal():
    logits = torch.full((4, 600), -9.0)
    logits[:, ::2], logits[:, 1:599:2] = 0.0, -0.0
    wanted = params(4, 1.0, 2, 1.0, torch.arange(4))
    assert sample_triton(logits, wanted).tolist() == sample_reference(logits, wanted).tolist()


@BOTH
def test_tokens_are_kept_for_the_next_step_and_for_the_host(function):
    logits = torch.zeros((3, 700))
    logits[0, 5], logits[1, 600], logits[2, 7] = 1.0, 1.0, 1.0
    pool, ring = torch.full((6,), -1, dtype=torch.int32), torch.full((3, 4), -1, dtype=torch.int32)
    places = TokenPlaces(pool, torch.tensor([4, 1, 2]), ring, torch.tensor([2]))
    assert function(logits, params(3, temperature=0.0, greedy=True), places).tolist() == [5, 600, 7]
    assert pool.tolist() == [-1, 600, 7, -1, 5, -1]
    assert ring.tolist() == [[-1] * 4, [-1] * 4, [5, 600, 7, -1]]
