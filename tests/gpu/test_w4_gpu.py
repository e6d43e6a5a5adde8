"""The 4-bit products on a GPU: against float64 over awkward shapes, and the same bits whatever else happens."""

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from engine.kernels import w4
from engine.quant import QuantWeight, dequantize, pack

pytestmark = pytest.mark.gpu
ROWS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 127, 128, 129, 200, 256, 257, 1000)
SHAPES = [(200, 576, 64), (130, 2880, 64), (1024, 4096, 128), (640, 5120, 128), (72, 17408, 128), (100, 208, 64),
          (70, 192, 128), (64, 64, 64), (96, 328, 32), (48, 48, 32), (1, 256, 64), (34816, 512, 128)]  # fmt: skip
PRODUCTS = {"matmul": w4.w4_matmul, "partials": w4.w4_partials, "standard": w4.w4_standard}


def random_weight(n, k, group, zeros=False, dtype=torch.bfloat16, seed=0) -> QuantWeight:
    generator = torch.Generator("cuda").manual_seed(seed)
    groups = -(-k // group)
    codes = torch.randint(0, 16, (n, k), device="cuda", dtype=torch.uint8, generator=generator)
    scales = (torch.rand(n, groups, device="cuda", generator=generator) * 0.02 - 0.01).to(dtype)
    zero = torch.randint(0, 16, (n, groups), device="cuda", generator=generator).to(dtype) if zeros else None
    return pack(codes, scales, zero, group)


def inputs(rows, k, dtype=torch.bfloat16, seed=1):
    return torch.randn(rows, k, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


def whole(y):
    return y.double().sum(0) if y.dim() == 3 else y.double()


def error(y, x, w) -> float:
    exact = x.double() @ dequantize(w, torch.float64).T
    return float((whole(y) - exact).norm() / exact.norm())


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_against_float64(n, k, group, product):
    w = random_weight(n, k, group)
    for rows in ROWS:
        x = inputs(rows, k)
        y = PRODUCTS[product](x, w)
        assert y.shape[-2:] == (rows, n)
        assert error(y, x, w) < 4e-3, rows


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(("n", "k", "group"), [(130, 2880, 64), (640, 5120, 128), (96, 320, 32)])
@pytest.mark.parametrize("rows", [1, 8, 16, 33, 129, 300])
def test_zero_points(n, k, group, rows, product):
    w, x = random_weight(n, k, group, zeros=True, dtype=torch.float16), inputs(rows, k)
    assert error(PRODUCTS[product](x, w), x, w) < 5e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 16, 40, 200])
def test_types_of_inputs_and_of_scales(dtype, scales, rows):
    w, x = random_weight(320, 1024, 128, dtype=scales), inputs(rows, 1024, dtype)
    y = w4.w4_matmul(x, w)
    assert y.dtype == dtype
    assert error(y, x, w) < {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-6}[dtype]


@pytest.mark.parametrize("rows", [1, 7, 16, 33, 129])
def test_inputs_that_are_not_contiguous_or_not_aligned(rows):
    w = random_weight(256, 1024, 128)
    x = inputs(rows, 1024)
    for offset, width in ((0, 1032), (1, 1040), (16, 1056), (0, 2048)):
        wide = torch.full((rows, width + offset), float("nan"), device="cuda", dtype=torch.bfloat16)
        wide[:, offset : offset + 1024] = x
        assert torch.equal(w4.w4_matmul(wide[:, offset : offset + 1024], w), w4.w4_matmul(x, w))
    assert torch.equal(w4.w4_matmul(x.t().contiguous().t(), w), w4.w4_matmul(x, w))
    flat = torch.empty(rows * 1024 + 1, device="cuda", dtype=torch.bfloat16)
    flat[1:] = x.flatten()
    assert torch.equal(w4.w4_matmul(flat[1:].view(rows, 1024), w), w4.w4_matmul(x, w))
    one = x[:1].expand(rows, 1024)
    assert torch.equal(w4.w4_matmul(one, w), w4.w4_matmul(one.contiguous(), w))


@pytest.mark.parametrize("rows", [1, 5, 12, 20, 50, 100, 200])
@pytest.mark.parametrize(("n", "k", "group"), [(200, 576, 64), (640, 5120, 128), (100, 208, 64)])
def test_a_row_depends_on_its_bucket_alone_and_poison_around_x_never_shows(n, k, group, rows):
    w, x = random_weight(n, k, group), inputs(rows, k)
    clean = w4.w4_matmul(x, w)
    poisoned = torch.full((rows + 64, k), float("nan"), device="cuda", dtype=torch.bfloat16)
    poisoned[32 : 32 + rows] = x
    assert torch.equal(w4.w4_matmul(poisoned[32 : 32 + rows], w), clean)
    bucket = w4.row_bucket(rows)
    other = torch.full((bucket, k), float("nan"), device="cuda", dtype=torch.bfloat16)
    other[rows - 1] = x[rows - 1]
    assert torch.equal(w4.w4_matmul(other, w)[rows - 1], clean[rows - 1])


@pytest.mark.parametrize("rows", [1, 16, 32, 64, 128, 256])
@pytest.mark.parametrize(("n", "k"), [(640, 5120), (1024, 4096)])
def test_repeated_runs_are_bit_equal(n, k, rows):
    w, x = random_weight(n, k, 128), inputs(rows, k)
    first = w4.w4_matmul(x, w)
    for _ in range(30):
        assert torch.equal(w4.w4_matmul(x, w), first)


def in_kernel_sum(rows: int) -> w4.Plan:
    """A plan whose last program adds the parts."""
    return w4.Plan("tile", min(rows, 128), 64, 1, 3, programs=33, parts=False)


def hopper() -> bool:
    return torch.cuda.get_device_capability()[0] == 9


@pytest.mark.skipif(not hopper(), reason="plans are those of Hopper")
@pytest.mark.parametrize("rows", [8, 32, 64, 256])
@pytest.mark.parametrize("own_sum", [False, True])
def test_a_replayed_graph_with_a_poisoned_workspace_is_bit_equal(monkeypatch, rows, own_sum):
    """Outputs and parts are filled with NaN before every launch, in the graph too."""
    w, x = random_weight(640, 5120, 128), inputs(rows, 5120)
    plan = in_kernel_sum(rows) if own_sum else w4.plan(10, 80, 2, rows, "none", 132)
    outputs = w4._outputs

    def poisoned(*arguments):
        found = outputs(*arguments)
        for tensor in found[:3]:
            tensor.fill_(float("nan"))
        return found

    monkeypatch.setattr(w4, "_outputs", poisoned)
    eager = w4.launch_plan(x, w, plan)
    assert error(eager, x, w) < 4e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = w4.launch_plan(x, w, plan)
    for _ in range(100):
        graph.replay()
        assert torch.equal(y, eager)


@pytest.mark.skipif(not hopper(), reason="plans are those of Hopper")
def test_two_streams_at_once():
    """Eagerly and as two graphs captured on one stream: no launch waits for the counters of another."""
    weights = [random_weight(4096, 5120, 128, seed=seed) for seed in range(2)]
    x, plan = inputs(32, 5120), in_kernel_sum(32)
    expected = [w4.launch_plan(x, w, plan) for w in weights]
    graphs, outputs = [torch.cuda.CUDAGraph() for _ in weights], []
    for graph, w in zip(graphs, weights, strict=True):
        with torch.cuda.graph(graph):
            outputs.append([w4.launch_plan(x, w, plan) for _ in range(20)])
    streams = [torch.cuda.Stream() for _ in weights]
    torch.cuda.synchronize()
    for _ in range(20):
        eager = []
        for stream, graph, w in zip(streams, graphs, weights, strict=True):
            with torch.cuda.stream(stream):
                eager.append(w4.launch_plan(x, w, plan))
                graph.replay()
        torch.cuda.synchronize()
        for wanted, one, many in zip(expected, eager, outputs, strict=True):
            assert torch.equal(one, wanted) and all(torch.equal(y, wanted) for y in many)


@pytest.mark.skipif(not hopper(), reason="plans are those of Hopper")
@pytest.mark.parametrize("k", [128, 640, 5120])
def test_every_kind_of_plan(k):
    """Slices of unequal length, one group, odd row tiles, rings deeper than the work, shares that cut blocks."""
    for n in (64, 250):
        w = random_weight(n, k, 128)
        for rows, splits, stages, block in [(8, 1, 4, 64), (16, 3, 3, 64), (16, 2, 2, 64), (8, 1, 3, 128)]:
            splits = w4._without_empty(k // 128, splits)
            if w.n_tiles * 64 % block:
                block = 64
            plans = []
            for kind, depth in (("tile", max(stages, 3)), ("stream", stages)):
                plans += [w4.Plan(kind, rows, block, splits, depth, programs=programs) for programs in (0, 2)]
                plans += [replace(plans[-1], programs=programs, parts=False) for programs in (0, 1, 2, 3, 7, 50)]
            for plan in plans:
                for count in (1, rows - 3, rows):
                    x = inputs(count, k)
                    assert error(w4.launch_plan(x, w, plan), x, w) < 4e-3, (n, plan, count)


def test_no_rows_at_all():
    assert w4.w4_matmul(inputs(0, 128), random_weight(64, 128, 128)).shape == (0, 64)
