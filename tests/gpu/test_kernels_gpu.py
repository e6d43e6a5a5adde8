"""The kernels on a GPU: against float64, bit-equal between runs, under graphs, with and without dependent launch."""

import itertools

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from engine.batch import LayerCache
from engine.kernels import attention_decode, attention_prefill, norm, sample
from engine.kernels._launch import launch_options
from tools import gpu_kernels as cases

pytestmark = pytest.mark.gpu
SPEC = cases.QWEN3
CHECKED = [
    case
    for case in itertools.chain(
        cases.norm_cases(), cases.activation_cases(), cases.rope_cases(), cases.sample_cases(),
        cases.start_cases(), cases.decode_cases(False), cases.prefill_cases(False),
    )
    if case.check is not None
]  # fmt: skip


@pytest.mark.parametrize("case", CHECKED, ids=lambda case: case.name)
def test_within_its_bound(case):
    torch.manual_seed(1)
    assert case.check() <= 1


def decode_inputs(lengths, dtype=torch.bfloat16):
    batch, pages = cases.make_batch(1, lengths)
    cache = cases.make_cache(pages, SPEC.kv_heads, SPEC.head_dim, dtype)
    return cases.random(len(lengths), SPEC.heads, SPEC.head_dim), cache, batch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_decode_of_a_row_is_bit_equal_alone_and_in_a_batch(dtype):
    q, cache, batch = decode_inputs([4000, 1, 130, 64, 999], dtype)
    together = attention_decode.decode_attention(q, cache, batch, SPEC.scale)
    for r in range(5):
        alone, _ = cases.make_batch(1, [int(batch.kv_len[r])])
        alone.page_table, alone.max_kv = batch.page_table[r : r + 1], 32768
        assert torch.equal(attention_decode.decode_attention(q[r : r + 1], cache, alone, SPEC.scale)[0], together[r])


@pytest.mark.parametrize("function", [attention_decode.decode_attention, attention_prefill.prefill_attention])
def test_poison_behind_the_last_token_never_shows(function):
    q, cache, batch = decode_inputs([70, 1, 127])
    clean = function(q, cache, batch, SPEC.scale)
    for r, length in enumerate((70, 1, 127)):
        page = int(batch.page_table[r, (length - 1) // 64])
        cache.k[page, :, length % 64 :], cache.v[page, :, length % 64 :] = float("nan"), float("nan")
    cache.k[0], cache.v[0] = float("nan"), float("nan")
    assert torch.equal(function(q, cache, batch, SPEC.scale), clean)


def test_a_captured_decode_serves_other_lengths():
    q, cache, batch = decode_inputs([3000] * 4)
    attention_decode.decode_attention(q, cache, batch, SPEC.scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_decode.decode_attention(q, cache, batch, SPEC.scale)
    for lengths in ([1, 0, 3000, 257], [256, 255, 64, 2999]):
        batch.kv_len.copy_(torch.tensor(lengths, dtype=torch.int32))
        eager = attention_decode.decode_attention(q, cache, batch, SPEC.scale).clone()
        for _ in range(20):
            graph.replay()
            assert torch.equal(out, eager)


def test_page_offsets_beyond_32_bits():
    """An int8 pool of more than 2^31 elements: the pages of the request stand at its end."""
    pages = 2**31 // (SPEC.kv_heads * 64 * SPEC.head_dim) + 8
    shape = (pages, SPEC.kv_heads, 64, SPEC.head_dim)
    k, v = (torch.zeros(shape, dtype=torch.int8, device="cuda") for _ in range(2))
    scales = [torch.ones(shape[:3], device="cuda") * 0.02 for _ in range(2)]
    cache = LayerCache(k, v, *scales)
    batch, _ = cases.make_batch(1, [256])
    batch.page_table.copy_(torch.arange(pages - 4, pages, dtype=torch.int32)[None])
    for stored in (k, v):
        stored[-4:] = torch.randint(-100, 100, (4, *shape[1:]), device="cuda").to(torch.int8)
    q = cases.random(1, SPEC.heads, SPEC.head_dim)
    expected = cases.dense(q, cache, batch, SPEC, [(0, 0, 256)])
    for function in (attention_decode.decode_attention, attention_prefill.prefill_attention):
        assert cases.error(function(q, cache, batch, SPEC.scale), expected, 0.005) < 1


def test_dependent_launch_changes_no_bit():
    """A chain of kernels that each read what the one before wrote, replayed under a graph."""
    q, cache, batch = decode_inputs([3000] * 8)
    weight = cases.random(SPEC.heads * SPEC.head_dim)

    def chain(x):
        for _ in range(6):
            attended = attention_decode.decode_attention(x.view_as(q), cache, batch, SPEC.scale).flatten(1)
            x = norm.add_rms_norm(attended, x.flatten(1).clone(), weight, 1e-6)
        return x

    results = []
    for pdl in (False, True):
        with launch_options(pdl=pdl):
            chain(q)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = chain(q)
            for _ in range(50):
                graph.replay()
            results.append(out.clone())
    assert torch.equal(*results)


@pytest.mark.parametrize("top_k,top_p", [(0, 1.0), (50, 1.0), (0, 0.9), (50, 0.9)])
def test_draws_of_a_large_vocabulary_stay_in_their_set_and_repeat(top_k, top_p):
    rows, vocab = 32, 248_320
    logits = cases.random(1, vocab, dtype=torch.float32).expand(rows, vocab).contiguous() * 5
    logits[:, ::2] = float("-inf")

    def column(value, dtype):
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    wanted = sample.SamplingTensors(
        column(1.0, torch.float32), column(top_k, torch.int32), column(top_p, torch.float32),
        torch.arange(rows, device="cuda"), column(17, torch.int32),
    )  # fmt: skip
    tokens = sample.sample(logits, wanted)
    assert torch.equal(tokens, sample.sample(logits, wanted))
    assert (tokens % 2 == 1).all()
    assert (tokens == sample.sample_reference(logits, wanted)).float().mean() > 0.9
