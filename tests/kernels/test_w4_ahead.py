"""Unpacking one matrix ahead: the order of the work on two streams, with streams that only note what they are given."""

import contextlib

import pytest
import torch

from engine.kernels import w4_ahead
from engine.layers.linear import Linear, unpack_ahead
from engine.quant import dequantize, pack

CPU = torch.device("cpu")


class Streams:
    """Stands for torch.cuda's streams. Work is noted as (stream, what); an event is the work noted before it.

    `race` runs the work of the second stream only when it is waited for, as late as a real one may.
    """

    def __init__(self):
        self.late, self.active = [], "main"

    def Stream(self, device):
        return _Stream(self, "second")

    def current_stream(self, device):
        return _Stream(self, self.active)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.active = self.active, stream.name
        yield
        self.active = before

    def run_late(self):
        work, self.late = self.late, []
        for run in work:
            run()


class _Stream:
    def __init__(self, streams, name):
        self.streams, self.name = streams, name

    def record_event(self):
        return self.name

    def wait_event(self, event):
        if event == "second":
            self.streams.run_late()


@pytest.fixture
def streams(monkeypatch):
    streams = Streams()
    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(streams, name))
    unpacked = []

    def unpack(w, dtype, out):
        unpacked.append((streams.active, w.n))
        if streams.active == "second":
            out.fill_(float("nan"))
            streams.late.append(lambda: out.copy_(dequantize(w, dtype)))
        else:
            out.copy_(dequantize(w, dtype))

    monkeypatch.setattr(w4_ahead, "w4_dequantize_triton", unpack)
    streams.unpacked = unpacked
    return streams


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
            x = ahead.product(x, index)
            assert torch.equal(x, expected)
    once = [("main", 64), ("second", 192), ("second", 64), ("second", 128)]
    assert streams.unpacked == once * 2
    assert not streams.late, "a captured graph must end joined"


def test_a_product_out_of_order_is_right(streams):
    order = weights((64, 64), (64, 64), (64, 64))
    ahead = w4_ahead.Ahead(order, torch.float32, CPU)
    x = torch.randn(3, 64)
    for index in (0, 2, 1, 1, 0, 1, 2):
        assert torch.equal(ahead.product(x, index), x @ dequantize(order[index]).T)
    assert not streams.late


def test_only_many_rows_of_the_models_dtype_go_ahead(streams):
    ahead = w4_ahead.Ahead(weights((64, 64)), torch.float16, CPU)
    place = w4_ahead.Place(ahead, 0)
    assert place.takes(torch.empty(513, 64, dtype=torch.float16))
    assert not place.takes(torch.empty(512, 64, dtype=torch.float16))
    assert not place.takes(torch.empty(513, 64))


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


def test_layers_get_their_places_in_order_on_a_gpu_alone(monkeypatch):
    layers = [Linear(torch.empty(64, 64), None, "fused") for _ in range(3)]
    for layer, w in zip(layers, weights((64, 64), (64, 64)), strict=False):
        layer.weight = w
    unpack_ahead([*layers, object()], torch.float16, CPU)
    assert all(layer.place is None for layer in layers)
    monkeypatch.setattr("engine.layers.linear.Ahead", lambda order, dtype, device: order)
    unpack_ahead([*layers, object()], torch.float16, torch.device("cuda"))
    assert [layer.place and layer.place.index for layer in layers] == [0, 1, None]
    assert [w is layer.weight for w, layer in zip(layers[0].place.ahead, layers, strict=False)] == [True, True]
