"""The sampler: known Philox words, exact sets, distributions, awkward rows; both forms give the same tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.sample import (
    SamplingTensors,
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
