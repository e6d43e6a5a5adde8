"""Unpacking one matrix ahead: the order of the work on two streams, with streams that only note what they are given."""

import contextlib
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import w4_ahead
from engine.layers.linear import Linear, unpack_ahead
from engine.quant import dequantize, pack

CPU = torch.device("cpu")


@dataclass
class Stream:
    """`before`: the uses of workspaces that are over when the next work of this stream begins."""

    before: set[int] = field(default_factory=set)
    waits: bool = True

    def record_event(self):
        return frozenset(self.before)

    def wait_event(self, event):
        if self.waits:
            self.before |= event


class Streams:
    """Stands for torch.cuda's streams. Work is done at once, but two uses of a workspace, one of which writes it, must
    be in an order that streams and events guarantee."""

    def __init__(self):
        self.main = self.active = Stream()
        self.second = Stream()
        self.uses = []

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.active = self.active, stream
        yield
        self.active = before

    def use(self, matrix, writes):
        for index, (place, written) in enumerate(self.uses):
            conflict = place == matrix.data_ptr() and (writes or written)
            assert not conflict or index in self.active.before, f"use {len(self.uses)} does not wait for {index}"
        self.active.before.add(len(self.uses))
        self.uses.append((matrix.data_ptr(), writes))

    def unpack(self, w, dtype, out):
        self.use(out, writes=True)
        out.copy_(dequantize(w, dtype))
        self.unpacked.append(("main" if self.active is self.main else "second", w.n))


@dataclass
class Rows:
    """Rows of a step whose products are noted as uses of the matrix."""

    values: torch.Tensor
    streams: Streams
    device = CPU

    def __matmul__(self, matrix):
        self.streams.use(matrix, writes=False)
        return self.values @ matrix


@contextlib.contextmanager
def noted_streams():
    streams = Streams()
    streams.unpacked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", lambda device: streams.second)
        patch.setattr(torch.cuda, "current_stream", lambda device: streams.active)
        patch.setattr(torch.cuda, "stream", streams.stream)
        patch.setattr(w4_ahead, "w4_dequantize_triton", streams.unpack)
        yield streams


@pytest.fixture
def streams():
    with noted_streams() as streams:
        yield streams


def weights(*shapes):
    torch.manual_seed(1)
    return [pack(torch.randint(0, 16, (n, k), dtype=torch.uint8), torch.rand(n, k // 64), None, 64) for n, k in shapes]


def test_each_matrix_is_unpacked_while_the_one_before_multiplies(streams):
    order = weights((64, 128), (192, 64), (64, 192), (128, 64))
    ahead = w4_ahead.Ahead(order, torch.float32, CPU)
    for _ in range(2):
        x = torch.randn(5, 128)
        for index, w in enumerate(order):
            expected = x @ dequantize(w).T
            x = ahead.product(Rows(x, streams), index)
            assert torch.equal(x, expected)
    once = [("main", 64), ("second", 192), ("second", 64), ("second", 128)]
    assert streams.unpacked == once * 2
    assert streams.main.before == set(range(len(streams.uses))), "a captured graph must end joined"


@settings(max_examples=20, deadline=None)
@given(steps=st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_products_in_any_order_are_right_and_never_race(steps):
    order = weights((64, 64), (64, 64), (64, 64))
    with noted_streams() as streams:
        ahead = w4_ahead.Ahead(order, torch.float32, CPU)
        x = torch.randn(3, 64)
        for index in steps:
            assert torch.equal(ahead.product(Rows(x, streams), index), x @ dequantize(order[index]).T)


@pytest.mark.parametrize("stream", ["main", "second"])
def test_a_stream_that_does_not_wait_is_noticed(streams, stream):
    getattr(streams, stream).waits = False
    order = weights((64, 64), (64, 64), (64, 64))
    ahead = w4_ahead.Ahead(order, torch.float32, CPU)
    with pytest.raises(AssertionError, match="does not wait"):
        for index in range(3):
            ahead.product(Rows(torch.randn(3, 64), streams), index)


def test_long_products_of_the_models_dtype_go_ahead(streams):
    ahead = w4_ahead.Ahead(weights((64, 64)), torch.float16, CPU)
    place = w4_ahead.Place(ahead, 0)
    ahead.rows = 700
    assert place.takes(torch.empty(700, 64, dtype=torch.float16))
    assert not place.takes(torch.empty(699, 64, dtype=torch.float16))
    assert not place.takes(torch.empty(700, 64))


@pytest.mark.parametrize(
    ("shapes", "rows"),
    [
        ([(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)], 1866),
        ([(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)], 5920),
        ([(53248, 16384)], 513),
    ],
    ids=["Qwen3-8B", "Llama-3.2-1B", "no fewer rows than are unpacked at all"],
)
def test_rows_from_which_the_gpu_is_the_limit(streams, shapes, rows):
    @dataclass
    class Shape:
        n: int
        k: int

    ahead = w4_ahead.Ahead([Shape(n, k) for n, k in shapes], torch.float16, torch.device("meta"))
    assert ahead.rows == rows


def test_a_linear_layer_goes_ahead_with_fused_kernels_alone():
    class Recorder:
        def __init__(self):
            self.products = 0

        def takes(self, x):
            return x.shape[0] > 512

        def product(self, x):
            self.products += 1
            return x.new_zeros(x.shape[0], 64)

    (w,) = weights((64, 64))
    layer = Linear(torch.empty(64, 64), None, "fused")
    layer.weight, layer.place = w, Recorder()
    layer.partials(torch.randn(513, 64))
    layer(torch.randn(600, 64))
    assert layer.place.products == 2
    layer.partials(torch.randn(512, 64))
    layer.kernels = "standard"
    layer.partials(torch.randn(513, 64))
    assert layer.place.products == 2


def test_four_bit_layers_get_their_places_in_order(streams):
    layers = [Linear(torch.empty(64, 64), None, "fused") for _ in range(3)]
    for layer, w in zip(layers, weights((64, 64), (64, 64)), strict=False):
        layer.weight = w
    unpack_ahead([layers[2]], torch.float16, CPU)
    assert layers[2].place is None
    unpack_ahead([*layers, object()], torch.float16, CPU)
    assert [layer.place and layer.place.index for layer in layers] == [0, 1, None]
    assert layers[0].place.ahead is layers[1].place.ahead
    assert [w is layer.weight for w, layer in zip(layers[0].place.ahead.order, layers, strict=False)] == [True, True]
