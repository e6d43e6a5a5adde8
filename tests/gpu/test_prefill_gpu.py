"""Reading prompts on a GPU: PyTorch's attention over gathered pages, and DeltaNet chunks at true sizes."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from engine.batch import StateCache
from engine.config import DeltaNet
from engine.kernels import attention_library, attention_prefill, deltanet
from engine.kernels.bench import random_weight
from engine.layers.linear import Linear, unpack_ahead
from tools import gpu_kernels as cases
from tools.gpu_moe import batch_of, delta_cache, delta_weights, relative_error

pytestmark = pytest.mark.gpu


def prompt(query, length, heads=32, kv_heads=8, dim=128):
    batch, pages = cases.make_batch(query, [length])
    return cases.random(query, heads, dim), cases.make_cache(pages, kv_heads, dim, cases.BF16), batch


def agree(got, expected):
    return (got.float() - expected.float()).abs().max() < 0.02 * expected.float().abs().max()


@pytest.mark.parametrize("backend", ["cudnn", "flash"])
@pytest.mark.parametrize(("query", "length"), [(2048, 2048), (1000, 1000), (2049, 2049), (1500, 5000), (1, 700)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_library_agrees_with_the_paged_kernel(backend, query, length, dim):
    if backend == "cudnn" and query < length:
        pytest.skip("cuDNN's causal mask begins at the first key")
    q, cache, batch = prompt(query, length, dim=dim)
    if not attention_library.supported(backend, 32, 8, dim, q.dtype, q.device):
        pytest.skip(f"no {backend} here")
    out = attention_library.prefill_attention_library(q, cache, batch, dim**-0.5, backend)
    assert agree(out, attention_prefill.prefill_attention_triton(q, cache, batch, dim**-0.5))


def test_poison_in_pages_behind_the_prompt_never_shows():
    q, cache, batch = prompt(2049, 2049)
    clean = attention_prefill.prefill_attention(q, cache, batch, 0.1)
    last = int(batch.page_table[0, 2048 // 64])
    for stored in (cache.k, cache.v):
        stored[last, :, 1:], stored[0] = float("nan"), float("nan")
    assert torch.equal(attention_prefill.prefill_attention(q, cache, batch, 0.1), clean)


def test_a_captured_prompt_is_read_by_the_paged_kernel():
    q, cache, batch = prompt(2048, 2048)
    expected = attention_prefill.prefill_attention_triton(q, cache, batch, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_prefill.prefill_attention(q, cache, batch, 0.1)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("heads", [(16, 32), (16, 48)])
@pytest.mark.parametrize(("requests", "rows"), [(1, 1), (1, 65), (1, 2048), (3, 700)])
def test_deltanet_prompts_at_true_sizes(heads, requests, rows):
    torch.manual_seed(3)
    spec = DeltaNet(*heads, 128, 128)
    weights, batch = delta_weights(spec), batch_of(requests, rows, rows)
    batch.decode = False
    y = torch.randn(requests * rows, deltanet.row_width(spec), device="cuda", dtype=torch.bfloat16)
    cache, twin = delta_cache(spec, requests + 1), delta_cache(spec, requests + 1)
    expected = deltanet.delta_prefill_reference(y, spec, weights, batch, twin)
    got = deltanet.delta_mix(y, spec, weights, batch, cache)
    assert relative_error(got, expected) < 3e-2 and relative_error(cache.state, twin.state) < 2e-2
    assert torch.equal(cache.conv, twin.conv)
    again = StateCache(torch.zeros_like(cache.conv), torch.zeros_like(cache.state))
    assert torch.equal(deltanet.delta_mix(y, spec, weights, batch, again), got)
    assert torch.equal(again.state, cache.state)


def test_deltanet_prompts_of_nearly_equal_keys():
    """beta near 1 and no decay: the worst case of the triangular inverse.

    The same chunks computed on a CPU with keys, values, u, w and state rounded to bf16 where the kernels store them so
    err by 3.4% (outputs) and 4.7% (state); the inverse in tf32 adds 0.3% to exact arithmetic.
    """
    torch.manual_seed(5)
    spec = DeltaNet(16, 32, 128, 128)
    weights, batch = delta_weights(spec), batch_of(1, 300, 300)
    keys = slice(16 * 128, 2 * 16 * 128)
    weights.conv[keys] = 0
    weights.conv[keys, -1] = 1
    y = torch.randn(300, deltanet.row_width(spec), device="cuda", dtype=torch.bfloat16)
    y[:, keys] = torch.randn(16 * 128, device="cuda") + 0.05 * torch.randn(300, 16 * 128, device="cuda")
    y[:, -64:-32], y[:, -32:] = 5.0, -9.0
    cache, twin = delta_cache(spec, 2), delta_cache(spec, 2)
    expected = deltanet.delta_prefill_reference(y, spec, weights, batch, twin)
    assert relative_error(deltanet.delta_mix(y, spec, weights, batch, cache), expected) < 5e-2
    assert relative_error(cache.state, twin.state) < 7e-2


def test_deltanet_pieces_continue_each_other():
    torch.manual_seed(4)
    spec = DeltaNet(16, 48, 128, 128)
    weights, whole = delta_weights(spec), batch_of(1, 1000, 1000)
    y = torch.randn(1000, deltanet.row_width(spec), device="cuda", dtype=torch.bfloat16)
    once, pieces = delta_cache(spec, 2), delta_cache(spec, 2)
    expected = deltanet.delta_mix(y, spec, weights, whole, once)
    got = []
    for first, end in ((0, 64), (64, 600), (600, 1000)):
        got.append(deltanet.delta_mix(y[first:end], spec, weights, batch_of(1, end - first, end), pieces))
    assert relative_error(torch.cat(got), expected) < 3e-2
    assert relative_error(pieces.state, once.state) < 2e-2


def unpacked_ahead(layers, x, graph):
    """Twenty passes through the layers, each product's first columns the next one's input."""

    def forward():
        y = x
        for layer in layers:
            y = layer.partials(y[:, : layer.in_features].contiguous())
        return y

    if not graph:
        return [forward().clone() for _ in range(20)]
    forward()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        y = forward()
    out = []
    for _ in range(20):
        captured.replay()
        out.append(y.clone())
    return out


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("rows", [1999, 2048])
def test_unpacking_ahead_changes_no_bit(graph, rows):
    torch.manual_seed(6)
    shapes = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)] * 2
    layers = [Linear(random_weight(n, k), None, "fused") for n, k in shapes]
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
    expected = unpacked_ahead(layers, x, False)[0]
    unpack_ahead(layers, torch.bfloat16, torch.device("cuda"))
    for out in unpacked_ahead(layers, x, graph):
        assert torch.equal(out, expected)
