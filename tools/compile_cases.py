"""The launches that compile_offline.py compiles: real launch functions on shapes without data (device "meta").

To add a kernel, add a function to CASES that launches it; nothing runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.batch import Batch, LayerCache, StateCache
from engine.config import Attention, DeltaNet, LatentAttention, Rope
from engine.kernels import w4
from engine.kernels.activation import clamped_swiglu_triton, silu_mul_triton
from engine.kernels.attention_decode import decode_attention_gluon, decode_attention_triton
from engine.kernels.attention_library import gather_pages_triton
from engine.kernels.attention_prefill import prefill_attention_triton
from engine.kernels.deltanet import DeltaWeights, channels, row_width
from engine.kernels.deltanet_triton import prefill as delta_prefill
from engine.kernels.deltanet_triton import step
from engine.kernels.mla_triton import absorb, latent_attention, latent_decode, latent_write
from engine.kernels.moe import Experts, choose_experts_triton, moe_experts_triton
from engine.kernels.norm import add_rms_norm_triton, rms_norm_triton
from engine.kernels.rope import projection_width, qk_norm_rope_write_triton
from engine.kernels.sample import SamplingTensors, TokenPlaces, sample_triton
from engine.kernels.start import start_decode_triton
from engine.models import model_config
from engine.quant import QuantExperts, QuantWeight, group_for

BF16, FP8, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
QWEN3 = Attention(32, 8, 128, Rope(rotary_dim=128), 128**-0.5, qk_norm=True)
QWEN3_5 = Attention(16, 2, 256, Rope(rotary_dim=64), 1 / 16, qk_norm=True, output_gate=True)
GPT_OSS = Attention(64, 8, 64, Rope("yarn", rotary_dim=64), 1 / 8, window=128, sinks=True, bias=True)


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def batch(rows: int, requests: int, max_kv: int = 4096) -> Batch:
    def ints(*shape: int) -> Tensor:
        return empty(*shape, dtype=torch.int32)

    return Batch(
        ints(rows), ints(rows), ints(rows), ints(requests + 1), ints(requests), ints(requests, max_kv // 64),
        ints(requests), ints(requests), rows == requests, rows // requests, max_kv,
    )  # fmt: skip


def cache(spec: Attention, dtype: torch.dtype) -> LayerCache:
    shape = (1024, spec.kv_heads, 64, spec.head_dim)
    scales = [empty(*shape[:3], dtype=torch.float32) if dtype in (FP8, INT8) else None for _ in range(2)]
    return LayerCache(empty(*shape, dtype=dtype), empty(*shape, dtype=dtype), *scales)


def decode(spec: Attention, dtype: torch.dtype, max_kv: int = 4096, rows: int = 16) -> None:
    sinks = empty(spec.heads) if spec.sinks else None
    q = empty(rows, spec.heads, spec.head_dim)
    decode_attention_triton(q, cache(spec, dtype), batch(rows, rows, max_kv), spec.scale, spec.window, sinks)


def decode_gluon(spec: Attention, dtype: torch.dtype, rows: int = 16) -> None:
    sinks = empty(spec.heads) if spec.sinks else None
    q = empty(rows, spec.heads, spec.head_dim)
    decode_attention_gluon(q, cache(spec, dtype), batch(rows, rows), spec.scale, spec.window, sinks)


def prefill(spec: Attention, dtype: torch.dtype, rows: int = 2048, requests: int = 2) -> None:
    sinks = empty(spec.heads) if spec.sinks else None
    q = empty(rows, spec.heads, spec.head_dim)
    prefill_attention_triton(q, cache(spec, dtype), batch(rows, requests), spec.scale, spec.window, sinks)


def gather(spec: Attention) -> None:
    gather_pages_triton(cache(spec, BF16), empty(32, dtype=torch.int32), 2000, 2048)


def rope(spec: Attention, dtype: torch.dtype, splits: int, rows: int = 16) -> None:
    width = projection_width(spec)
    weights = [empty(spec.head_dim) if spec.qk_norm else None for _ in range(2)]
    y = empty(splits, rows, width, dtype=torch.float32) if splits else empty(rows, width)
    bias = empty(width) if spec.bias else None
    table = empty(4096, spec.rope.rotary_dim, dtype=torch.float32)
    qk_norm_rope_write_triton(y, spec, *weights, bias, 1e-6, False, table, batch(rows, rows), cache(spec, dtype))


def sample(greedy: bool, rows: int = 16) -> None:
    columns = [empty(rows, dtype=d) for d in (torch.float32, torch.int32, torch.float32, torch.int64, torch.int32)]
    places = TokenPlaces(
        empty(65, dtype=torch.int32), empty(rows, dtype=torch.int64),
        empty(4, 64, dtype=torch.int32), empty(1, dtype=torch.int64),
    )  # fmt: skip
    sample_triton(empty(rows, 151936), SamplingTensors(*columns, greedy), places)


def partials(splits: int, rows: int, width: int) -> Tensor:
    return empty(splits, rows, width, dtype=torch.float32)


def experts(name: str, tokens: int) -> None:
    """The experts of one layer; `name` is a published model's."""
    spec = model_config(name).layers[-1].ffn
    hidden, count = model_config(name).hidden, spec.experts + (spec.shared > 0)
    scale = torch.uint8 if spec.codes == "mxfp4" else BF16

    def weight(n: int, k: int) -> QuantExperts:
        group = 32 if spec.codes == "mxfp4" else group_for(k)
        packed = empty(count, n // 64, k // 64, 2048, dtype=torch.uint8)
        return QuantExperts(packed, empty(count, n // 64, k // group, 64, dtype=scale), n, k, group, spec.codes)

    biases = [empty(count, n) if spec.bias else None for n in (2 * spec.intermediate, hidden)]
    weights = Experts(weight(2 * spec.intermediate, hidden), weight(hidden, spec.intermediate), *biases)
    slots = spec.top_k + (spec.shared > 0)
    ids = empty(tokens, slots, dtype=torch.int32)
    moe_experts_triton(empty(tokens, hidden), ids, empty(tokens, slots, dtype=torch.float32), weights, spec)


def dense_experts(name: str, tokens: int) -> None:
    spec, hidden = model_config(name).layers[-1].ffn, model_config(name).hidden
    weights = Experts(
        empty(spec.experts, 2 * spec.intermediate, hidden), empty(spec.experts, hidden, spec.intermediate)
    )
    ids = empty(tokens, spec.top_k, dtype=torch.int32)
    moe_experts_triton(empty(tokens, hidden), ids, empty(tokens, spec.top_k, dtype=torch.float32), weights, spec)


def router(name: str, tokens: int) -> None:
    spec, hidden = model_config(name).layers[-1].ffn, model_config(name).hidden
    bias = empty(spec.experts) if spec.router_bias else None
    selection = empty(spec.experts, dtype=torch.float32) if spec.selection_bias else None
    weight = empty(spec.experts + spec.shared_gate, hidden)
    choose_experts_triton(empty(tokens, hidden), weight, spec, bias, selection, spec.shared > 0)


def delta(launch: Callable[..., Tensor], rows: int, requests: int) -> None:
    spec = DeltaNet(16, 32, 128, 128)
    real = [empty(spec.value_heads, dtype=torch.float32) for _ in range(2)]
    weights = DeltaWeights(empty(channels(spec), spec.conv), *real, empty(spec.value_dim), 1e-6)
    state = StateCache(empty(65, spec.conv, channels(spec)), empty(65, 32, 128, 128, dtype=torch.float32))
    launch(empty(rows, row_width(spec)), spec, weights, batch(rows, requests), state)


def latent(dtype: torch.dtype, rows: int, requests: int) -> None:
    spec = LatentAttention(20, 768, 512, 192, 64, 256, Rope(rotary_dim=64, interleaved=True), 1 / 16)
    scales = [empty(1024, 1, 64, dtype=torch.float32) if dtype in (FP8, INT8) else None for _ in range(2)]
    pages = LayerCache(empty(1024, 1, 64, 512, dtype=dtype), empty(1024, 1, 64, 64, dtype=dtype), *scales)
    table, one = empty(4096, 64, dtype=torch.float32), batch(rows, requests)
    latent_write(partials(4, rows, 1344), spec, empty(768), empty(512), table, one, pages, BF16)
    query = empty(rows, 20, 256)
    absorb(query[..., :192], empty(20, 192, 512))
    if rows == requests:
        latent_decode(empty(rows, 20, 512), query[..., 192:], empty(20, 512, 256), spec, table, one, pages)
    else:
        latent_attention(empty(rows, 20, 512), query[..., 192:], spec, table, one, pages)


def weight(n: int, k: int, group: int, dtype: torch.dtype = BF16, zeros: bool = False) -> QuantWeight:
    packed = empty(-(-n // 64), k // 64, 2048, dtype=torch.uint8)
    scales = [empty(packed.shape[0], k // group, 64, dtype=dtype) for _ in range(2)]
    return QuantWeight(packed, scales[0], scales[1] if zeros else None, n, k, group)


def hopper(rows: int, n: int, k: int, group: int = 128, **plan: object) -> None:
    """The wgmma kernel that a plan names."""
    chosen = w4.Plan(rows=min(w4.row_bucket(rows), 128), **plan)
    w4.launch_plan(empty(rows, k), weight(n, k, group), chosen)


CASES: dict[str, Callable[[], object]] = {
    "rms_norm": lambda: rms_norm_triton(empty(16, 5120), empty(5120), 1e-6),
    "add_rms_norm": lambda: add_rms_norm_triton(partials(4, 16, 5120), empty(16, 5120), empty(5120), 1e-6),
    "add_rms_norm of many parts": lambda: add_rms_norm_triton(partials(9, 8, 5120), empty(8, 5120), empty(5120), 1e-6),
    "silu_mul": lambda: silu_mul_triton(partials(4, 16, 34816)),
    "clamped_swiglu": lambda: clamped_swiglu_triton(empty(16, 5760), 7.0, 1.702),
    "rope qwen3": lambda: rope(QWEN3, BF16, 4),
    "rope qwen3.5 int8": lambda: rope(QWEN3_5, INT8, 0),
    "rope qwen3 2048": lambda: rope(QWEN3, BF16, 0, 2048),
    "rope gpt-oss fp8": lambda: rope(GPT_OSS, FP8, 0),
    "decode qwen3": lambda: decode(QWEN3, BF16),
    "decode qwen3 int8": lambda: decode(QWEN3, INT8),
    "decode qwen3 fp8": lambda: decode(QWEN3, FP8),
    "decode qwen3.5": lambda: decode(QWEN3_5, BF16),
    "decode qwen3.5 long": lambda: decode(QWEN3_5, BF16, 65536),
    "decode gluon qwen3": lambda: decode_gluon(QWEN3, BF16),
    "decode gluon qwen3 int8": lambda: decode_gluon(QWEN3, INT8),
    "decode gluon qwen3 fp8": lambda: decode_gluon(QWEN3, FP8),
    "decode gluon gpt-oss": lambda: decode_gluon(GPT_OSS, BF16),
    "decode gluon gpt-oss fp8": lambda: decode_gluon(GPT_OSS, FP8),
    "decode gpt-oss": lambda: decode(GPT_OSS, BF16),
    "prefill qwen3": lambda: prefill(QWEN3, BF16),
    "prefill qwen3 int8": lambda: prefill(QWEN3, INT8),
    "prefill qwen3.5": lambda: prefill(QWEN3_5, BF16),
    "gather pages qwen3": lambda: gather(QWEN3),
    "gather pages qwen3.5": lambda: gather(QWEN3_5),
    "prefill gpt-oss": lambda: prefill(GPT_OSS, BF16),
    "start decode": lambda: start_decode_triton(
        empty(65, dtype=torch.int32),
        empty(16, dtype=torch.int32),
        empty(65, 640, dtype=torch.int32),
        empty(151936, 5120),
        2.0,
    ),
    "sample": lambda: sample(False),
    "sample greedy": lambda: sample(True),
    "router qwen3.6 1": lambda: router("Qwen3.6-35B-A3B", 1),
    "router gpt-oss 64": lambda: router("gpt-oss-20b", 64),
    "router glm 2048": lambda: router("GLM-4.7-Flash", 2048),
    "experts qwen3.6 1": lambda: experts("Qwen3.6-35B-A3B", 1),
    "experts qwen3.5 8": lambda: experts("Qwen3.5-122B-A10B", 8),
    "experts qwen3.6 64": lambda: experts("Qwen3.6-35B-A3B", 64),
    "experts qwen3.6 2048": lambda: experts("Qwen3.6-35B-A3B", 2048),
    "experts gpt-oss 1": lambda: experts("gpt-oss-20b", 1),
    "experts gpt-oss 64": lambda: experts("gpt-oss-20b", 64),
    "experts dense 1": lambda: dense_experts("Qwen3-Coder-30B", 1),
    "experts gpt-oss 2048": lambda: experts("gpt-oss-20b", 2048),
    "deltanet step": lambda: delta(step, 16, 16),
    "deltanet prefill": lambda: delta(delta_prefill, 2048, 2),
    "latent decode": lambda: latent(BF16, 16, 16),
    "latent decode int8": lambda: latent(INT8, 16, 16),
    "latent prefill": lambda: latent(BF16, 2048, 2),
    "w4 plain": lambda: w4.plain_partials(empty(16, 5120), weight(5120, 5120, 128)),
    "w4 plain group 32 zeros": lambda: w4.plain_partials(empty(64, 5120), weight(5120, 5120, 32, zeros=True)),
    "w4 gemv": lambda: w4.gemv_partials(empty(1, 5120), weight(5120, 5120, 128)),
    "w4 dequantize": lambda: w4.w4_dequantize_triton(weight(5120, 5120, 128), BF16),
    "w4 sum": lambda: w4.sum_partials_triton(partials(4, 16, 34816), BF16),
    # one row, one request: Triton makes an integer argument of 1 a Python number
    "one row norm": lambda: add_rms_norm_triton(partials(4, 1, 5120), empty(1, 5120), empty(5120), 1e-6),
    "one row silu_mul": lambda: silu_mul_triton(partials(4, 1, 34816)),
    "one row rope": lambda: rope(QWEN3, BF16, 4, rows=1),
    "one row sample": lambda: sample(False, rows=1),
    "one row decode": lambda: decode(QWEN3_5, BF16, rows=1),
    "one row decode gluon": lambda: decode_gluon(QWEN3, BF16, rows=1),
    "one row prefill": lambda: prefill(QWEN3, BF16, rows=1, requests=1),
    "one row deltanet step": lambda: delta(step, 1, 1),
    "one row deltanet prefill": lambda: delta(delta_prefill, 1, 1),
    "one row latent decode": lambda: latent(BF16, 1, 1),
    "one row w4 plain": lambda: w4.plain_partials(empty(1, 5120), weight(5120, 5120, 128)),
    "hopper stream 8": lambda: hopper(8, 34816, 5120, kind="stream", block=128, splits=4, stages=3),
    "hopper stream 16": lambda: hopper(16, 34816, 5120, kind="stream", block=128, splits=4, stages=3, programs=91),
    "hopper stream 16 group 64": lambda: hopper(16, 2880, 2880, 64, kind="stream", block=64, splits=5, stages=3),
    "hopper tile 32": lambda: hopper(32, 34816, 5120, kind="tile", block=128, splits=3, stages=3, parts=False),
    "hopper stream 8 shares": lambda: hopper(
        8, 34816, 5120, kind="stream", block=128, splits=2, stages=3, programs=198, parts=False
    ),
    "hopper tile 32 shares": lambda: hopper(
        32, 34816, 5120, kind="tile", block=128, splits=1, stages=3, programs=396, parts=False
    ),
    "hopper tile 64 shares": lambda: hopper(
        64, 34816, 5120, kind="tile", block=64, splits=1, stages=3, programs=396, parts=False
    ),
    "hopper stream 8 of two tiles": lambda: hopper(8, 64, 128, 64, kind="stream", block=64, splits=1, stages=3),
    "hopper tile 32 of two tiles": lambda: hopper(32, 64, 128, 64, kind="tile", block=64, splits=1, stages=3),
    "hopper tile 64": lambda: hopper(64, 34816, 5120, kind="tile", block=64, splits=1, stages=3),
    "hopper tile 128": lambda: hopper(128, 5120, 17408, kind="tile", block=64, splits=3, stages=3),
    "hopper tile 256": lambda: hopper(256, 34816, 5120, kind="tile", block=64, splits=1, stages=3),
    "hopper tile 128 of 8 warps": lambda: hopper(128, 9728, 5120, kind="tile", block=128, splits=1, stages=3, warps=8),
}
