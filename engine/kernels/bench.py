"""Single kernels of the engine, timed on a GPU, each beside the limit of the memory or of the matrix units.

Timing: a CUDA graph of one launch for every set of inputs, the sets together larger than the L2 cache, replayed; the
median. The whole operation counts: a 4-bit product includes the sum of its parts and its output in bf16. The limits are
measured in the same process: the rate of a device-to-device copy (bytes read plus bytes written) and of a bf16 product.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from engine.batch import Batch, LayerCache
from engine.config import Attention, EngineError, Rope
from engine.kernels import activation, attention_decode, attention_library, attention_prefill, norm, rope, sample, w4
from engine.quant import QuantWeight, group_for

BF16, FP8, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
DEVICE = "cuda"
ROTATED_BYTES = 250e6
"""Inputs that a timing rotates over: four times the largest L2 cache."""

MOST_SETS = 24
TINYGEMM_ROWS = 64
"""Most rows at which PyTorch's int4 product is timed: its time grows with the rows."""

SHAPES = ((34816, 5120), (5120, 17408))
QWEN3_32B = Attention(64, 8, 128, Rope(rotary_dim=128, theta=1e6), 128**-0.5, qk_norm=True)
CONTEXT = 4000
PROMPT = 2048

Launch = Callable[[], object]
Row = dict[str, Any]


def measure(part: str, rows: Sequence[int], device: str) -> list[Row]:
    """One row a kernel, shape and number of rows of `part` ("products", "attention" or "small").

    Keys: kernel, shape, rows, us, limit_us, fraction_of_limit, and for references measured in the same run
    cublas_bf16_us, tinygemm_us, dequantize_us, standard_us (products) or pytorch_us (prompts); None where not measured.
    Raises EngineError off the GPU and for an unknown part.
    """
    if part not in PARTS:
        raise EngineError(f"kernel bench: no part '{part}'; there are {', '.join(PARTS)}")
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        raise EngineError(f"kernel bench: single kernels are timed on an NVIDIA GPU, not on '{device}'; leave them out")
    return list(PARTS[part](rows))


def timed(launches: Sequence[Launch], replays: int = 7) -> float:
    """Microseconds of one launch: the median over replays of a graph that holds all of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for launch in launches:
                launch()
        times = []
        for _ in range(replays + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            stream.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / len(launches))
    return statistics.median(times[1:])


def sets_for(nbytes: float) -> int:
    """How many sets of inputs of `nbytes` a timing rotates over."""
    return int(min(MOST_SETS, max(2, ROTATED_BYTES // max(nbytes, 1) + 1)))


@lru_cache(maxsize=4)
def rates(device: int) -> tuple[float, float]:
    """(bytes/s of a copy, read plus written; FLOP/s of a bf16 product) of a GPU."""
    source = torch.empty(1 << 29, dtype=torch.uint8, device=f"cuda:{device}")
    target = torch.empty_like(source)
    copy_us = timed([lambda: target.copy_(source)] * 4)
    a, b = (torch.randn(8192, 8192, dtype=BF16, device=source.device) for _ in range(2))
    product_us = timed([lambda: a @ b] * 2)
    return 2 * source.numel() / copy_us * 1e6, 2 * 8192**3 / product_us * 1e6


def row_of(kernel: str, shape: str, rows: int, us: float, nbytes: float, flops: float = 0.0) -> Row:
    """A row with its limit: the longer of moving `nbytes` and computing `flops`."""
    bandwidth, matrix_rate = rates(torch.cuda.current_device())
    limit = max(nbytes / bandwidth, flops / matrix_rate) * 1e6
    return {
        "kernel": kernel,
        "shape": shape,
        "rows": rows,
        "us": us,
        "limit_us": limit,
        "fraction_of_limit": limit / us,
    }


# ------------------------------------------------------------------------------------------------------ products


def random_weight(n: int, k: int, group: int | None = None) -> QuantWeight:
    """Random codes and positive scales."""
    group = group or group_for(k)
    packed = torch.randint(0, 256, (-(-n // 64), -(-k // 64), 2048), dtype=torch.uint8, device=DEVICE)
    scales = torch.rand((packed.shape[0], -(-k // group), 64), device=DEVICE).mul_(0.02).add_(0.001).to(BF16)
    return QuantWeight(packed, scales, None, n, k, group)


def dense_forms(weights: Sequence[QuantWeight]) -> list[Tensor]:
    """The first weights in bf16, enough of them to exceed the L2 cache."""
    needed = max(2, -(-len(weights) // 4))
    return [w4.w4_dequantize(w, BF16) for w in weights[:needed]]


def tinygemm_forms(weights: Sequence[QuantWeight]) -> tuple[list[Tensor], Tensor]:
    """Random weights of the same shapes in the form of PyTorch's int4 product, and their scales and zeros."""
    n, k = weights[0].n, weights[0].k
    form = (n // 8, k // 128, 32, 4)
    packed = [torch.randint(0, 2**31 - 1, form, dtype=torch.int32, device=DEVICE) for _ in weights]
    return packed, torch.rand(k // 128, n, 2, device=DEVICE, dtype=BF16)


def references(x: Tensor, weights: Sequence[QuantWeight], dense: Sequence[Tensor], tinygemm: tuple) -> dict[str, Any]:
    """Microseconds of the same product by other means; None where a means is not timed at so many rows."""
    found: dict[str, Any] = {"cublas_bf16_us": timed([lambda d=d: x @ d.T for d in dense]), "tinygemm_us": None}
    found["dequantize_us"] = timed([lambda w=w: w4.w4_dequantize(w, x.dtype) for w in weights])
    found["standard_us"] = timed([lambda w=w: w4.w4_standard(x, w) for w in weights])
    if x.shape[0] <= TINYGEMM_ROWS:
        packed, scales = tinygemm
        product = torch.ops.aten._weight_int4pack_mm
        found["tinygemm_us"] = timed([lambda p=p: product(x, p, 128, scales) for p in packed])
    return found


def _products(rows: Sequence[int]) -> Iterator[Row]:
    for n, k in SHAPES:
        first = random_weight(n, k)
        weights = [first, *(random_weight(n, k) for _ in range(sets_for(first.nbytes) - 1))]
        dense, tinygemm = dense_forms(weights), tinygemm_forms(weights)
        for m in rows:
            x = random(m, k)
            us = timed([lambda w=w, x=x: w4.w4_matmul(x, w) for w in weights])
            moved = first.nbytes + 2 * m * (n + k)
            yield row_of("w4 fused", f"{n}x{k}", m, us, moved, 2.0 * m * n * k) | references(
                x, weights, dense, tinygemm
            )


# ----------------------------------------------------------------------------------------------------- attention


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def make_batch(query: int, lengths: list[int], page: int = 64) -> tuple[Batch, int]:
    """Requests with `query` new rows each and shuffled pages; (batch, pages of the pool)."""
    counts = [-(-n // page) for n in lengths]
    pages = torch.randperm(sum(counts)).int() + 1
    table = torch.zeros((len(lengths), max(counts)), dtype=torch.int32)
    for r, (count, piece) in enumerate(zip(counts, pages.split(counts), strict=True)):
        table[r, :count] = piece
    positions = torch.cat([torch.arange(n - query, n) for n in lengths]).int()
    owner = torch.arange(len(lengths)).repeat_interleave(query)
    slots = table[owner, positions // page] * page + positions % page
    ints = [torch.arange(0, query * len(lengths) + 1, query), torch.tensor(lengths), torch.zeros(len(lengths))]
    start, kv_len, states = (t.int().to(DEVICE) for t in ints)
    batch = Batch(
        positions.to(DEVICE), positions.to(DEVICE), slots.int().to(DEVICE), start, kv_len, table.to(DEVICE),
        states, states, query == 1, query, max(lengths),
    )  # fmt: skip
    return batch, sum(counts) + 1


def make_cache(pages: int, kv_heads: int, dim: int, dtype: torch.dtype, page: int = 64) -> LayerCache:
    """A pool of random keys and values."""
    shape = (pages, kv_heads, page, dim)
    if dtype not in (INT8, FP8):
        return LayerCache(random(*shape, dtype=dtype), random(*shape, dtype=dtype))
    k, v = (torch.randint(-100, 101, shape, dtype=torch.int8, device=DEVICE) for _ in range(2))
    scales = [torch.rand(shape[:3], device=DEVICE) * 0.01 + 0.01 for _ in range(2)]
    return LayerCache(*((t if dtype == INT8 else t.to(torch.float16).to(FP8)) for t in (k, v)), *scales)


def _decode(requests: int, dtype: torch.dtype) -> Row:
    spec = QWEN3_32B
    size = torch.empty((), dtype=dtype).element_size()
    moved = requests * CONTEXT * spec.kv_heads * 2 * (spec.head_dim * size + (4 if size == 1 else 0))

    def launch() -> Launch:
        batch, pages = make_batch(1, [CONTEXT] * requests)
        cache, q = make_cache(pages, spec.kv_heads, spec.head_dim, dtype), random(requests, spec.heads, spec.head_dim)
        return lambda: attention_decode.decode_attention(q, cache, batch, spec.scale)

    us = timed([launch() for _ in range(sets_for(moved))])
    shape = f"{spec.heads}/{spec.kv_heads}x{spec.head_dim}, {CONTEXT} tokens, {str(dtype).removeprefix('torch.')}"
    return row_of("decode attention", shape, requests, us, moved)


def _prefill() -> Row:
    spec = QWEN3_32B
    batch, pages = make_batch(PROMPT, [PROMPT])
    cache, q = make_cache(pages, spec.kv_heads, spec.head_dim, BF16), random(PROMPT, spec.heads, spec.head_dim)
    # A capture would keep the engine's choice from PyTorch's kernel: it is made here.
    backend = attention_library.library_backend(q, cache, batch, None, None)
    if backend is None:
        launch = partial(attention_prefill.prefill_attention, q, cache, batch, spec.scale)
    else:
        launch = partial(attention_library.prefill_attention_library, q, cache, batch, spec.scale, backend)
    us = timed([launch] * 3)
    fresh = random(1, spec.heads, PROMPT, spec.head_dim)
    k, v = (random(1, spec.kv_heads, PROMPT, spec.head_dim) for _ in range(2))
    library = torch.nn.functional.scaled_dot_product_attention
    library_us = timed([lambda: library(fresh, k, v, is_causal=True, enable_gqa=True)] * 3)
    flops = 4.0 * spec.heads * spec.head_dim * PROMPT * (PROMPT + 1) / 2
    moved = 4.0 * PROMPT * spec.head_dim * (spec.heads + spec.kv_heads)
    shape = f"{spec.heads}/{spec.kv_heads}x{spec.head_dim}, one prompt, bfloat16"
    return row_of("prefill attention", shape, PROMPT, us, moved, flops) | {"pytorch_us": library_us}


def _attention(rows: Sequence[int]) -> Iterator[Row]:
    for dtype in (BF16, INT8):
        yield from (_decode(m, dtype) for m in rows)
    yield _prefill()


# --------------------------------------------------------------------------------------------------------- small


def _small(rows: Sequence[int]) -> Iterator[Row]:
    """The kernels between the products of Qwen3-32B, fed with the parts that those leave."""
    for m in rows:
        yield _norm(m)
        yield _activation(m)
        yield _rope(m)
        yield _sample(m)


def _norm(m: int, width: int = 5120, splits: int = 4) -> Row:
    def launch() -> Launch:
        y, residual, weight = random(splits, m, width, dtype=torch.float32), random(m, width), random(width)
        return lambda: norm.add_rms_norm(y, residual, weight, 1e-6)

    moved = m * width * (4 * splits + 6)
    us = timed([launch() for _ in range(MOST_SETS)])
    return row_of("add_rms_norm", f"{width}, {splits} parts", m, us, moved)


def _activation(m: int, width: int = 25600, splits: int = 2) -> Row:
    def launch() -> Launch:
        y = random(splits, m, 2 * width, dtype=torch.float32)
        return lambda: activation.silu_mul(y)

    moved = m * width * (8 * splits + 2)
    us = timed([launch() for _ in range(MOST_SETS)])
    return row_of("silu_mul", f"{width}, {splits} parts", m, us, moved)


def _rope(m: int, splits: int = 4) -> Row:
    spec, width = QWEN3_32B, rope.projection_width(QWEN3_32B)

    def launch() -> Launch:
        batch, pages = make_batch(1, [100] * m)
        cache, y = make_cache(pages, spec.kv_heads, spec.head_dim, BF16), random(splits, m, width, dtype=torch.float32)
        table, weights = rope.rope_table(spec.rope, 128, DEVICE), [random(spec.head_dim) for _ in range(2)]
        return lambda: rope.qk_norm_rope_write(y, spec, *weights, None, 1e-6, False, table, batch, cache, dtype=BF16)

    moved = m * width * (4 * splits + 2)
    us = timed([launch() for _ in range(MOST_SETS)])
    return row_of("qk_norm_rope_write", f"{width}, {splits} parts", m, us, moved)


def _sample(m: int, vocab: int = 151936) -> Row:
    def column(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((m,), value, dtype=dtype, device=DEVICE)

    columns = column(0.0, torch.float32), column(0, torch.int32), column(1.0, torch.float32)
    greedy = sample.SamplingTensors(*columns, column(0, torch.int64), column(0, torch.int32), True)

    def launch() -> Launch:
        logits = random(m, vocab, dtype=BF16)
        return lambda: sample.sample(logits, greedy)

    moved = m * vocab * 2
    us = timed([launch() for _ in range(sets_for(moved))])
    return row_of("sample greedy", str(vocab), m, us, moved)


PARTS: dict[str, Callable[[Sequence[int]], Iterator[Row]]] = {
    "products": _products,
    "attention": _attention,
    "small": _small,
}
