"""Rotary position embedding: tables, and the step between the q/k/v projection and attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.batch import Batch, LayerCache
from engine.config import Attention, Rope
from engine.kernels._launch import launch, partials_of, power_of_2, whole
from engine.kernels.activation import output_dtype
from engine.kernels.norm import rms_norm_reference

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest stored value of the 8-bit cache dtypes: a (token, head) has scale = max|value| / LARGEST."""

MANY_ROWS = 256
"""Rows from which the kernel's programs are larger."""


def inverse_frequencies(rope: Rope) -> Tensor:
    """Radians a position of every pair, float64 [rotary_dim / 2]."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64) / rope.rotary_dim
    base = rope.theta**-exponents
    if rope.kind == "llama3":
        return _llama3(rope, base)
    if rope.kind == "yarn":
        return _yarn(rope, base)
    return base


def _llama3(rope: Rope, base: Tensor) -> Tensor:
    """Llama 3.1: low frequencies divided by the factor, high ones kept, a linear blend in the turns between."""
    turns = rope.original_max * base / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return base * (keep + (1 - keep) / rope.factor)


def _yarn(rope: Rope, base: Tensor) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): a linear blend between the dimensions that turn beta_fast and beta_slow
    times within the original context; `truncate` rounds these outwards to whole dimensions."""

    def dimension(turns: float) -> float:
        return rope.rotary_dim * math.log(rope.original_max / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    steps = torch.arange(rope.rotary_dim // 2, dtype=torch.float64)
    divide = ((steps - low) / (high - low or 1e-3)).clamp(0, 1)
    return base * (1 - divide + divide / rope.factor)


def rope_table(rope: Rope, positions: int, device: torch.device | str) -> Tensor:
    """float32 [positions, rotary_dim]: cos of every pair, then sin of every pair, computed in float64 on the CPU.

    With `query_scale_beta` there is one more column, the factor of the rotated query at that position.
    """
    position = torch.arange(positions, dtype=torch.float64)
    angles = torch.outer(position, inverse_frequencies(rope))
    columns = [angles.cos() * rope.cos_sin_scale, angles.sin() * rope.cos_sin_scale]
    if rope.query_scale_beta:
        growth = torch.log1p(torch.floor(position / rope.original_max))
        columns.append((1 + rope.query_scale_beta * growth)[:, None])
    return torch.cat(columns, dim=1).float().to(device)


def rotate(x: Tensor, rows: Tensor, rope: Rope) -> Tensor:
    """Rotates the first rotary_dim values of x [T, heads, D] by rows [T, >= rotary_dim] of a table, in float32."""
    x = x.float()
    cos, sin = rows[:, None, : rope.rotary_dim].chunk(2, dim=-1)
    turned, passed = x[..., : rope.rotary_dim], x[..., rope.rotary_dim :]
    if rope.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([turned, passed], dim=-1)


def write_cache_reference(cache: Tensor, scale: Tensor | None, slots: Tensor, values: Tensor) -> None:
    """Writes values [T, kv_heads, D] into cache [pages, kv_heads, page_size, D] at the slots [T].

    An 8-bit cache takes value * LARGEST / max|value| of its (token, head), rounded half up for int8, and the scale.
    """
    pages, offsets = slots.long() // cache.shape[2], slots.long() % cache.shape[2]
    if scale is None:
        cache[pages, :, offsets] = values.to(cache.dtype)
        return
    largest = LARGEST[cache.dtype]
    extreme = values.float().abs().amax(-1)
    inverse = torch.where(extreme > 0, largest / extreme, torch.zeros_like(extreme))
    stored = values.float() * inverse[..., None]
    stored = torch.floor(stored + 0.5) if cache.dtype == torch.int8 else stored
    cache[pages, :, offsets] = stored.clamp(-largest, largest).to(cache.dtype)
    scale[pages, :, offsets] = extreme / largest


def projection_width(spec: Attention) -> int:
    """Columns of the merged projection: q (with the gate, head by head, where there is one), k, v."""
    return ((2 if spec.output_gate else 1) * spec.heads + 2 * spec.kv_heads) * spec.head_dim


def query_dtype(y: Tensor, cache: LayerCache, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype asked for, that of y [T, N], or for Partials that of a 16- or 32-bit cache (bfloat16 for 8 bits)."""
    if dtype is None and y.dim() == 3 and cache.k_scale is None:
        return cache.k.dtype
    return output_dtype(y, dtype)


def qk_norm_rope_write_reference(
    y: Tensor,
    spec: Attention,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    plus_one: bool,
    table: Tensor,
    batch: Batch,
    cache: LayerCache,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """From the merged projection to what attention needs.

    y [T, (heads + 2 kv_heads) * D] or Partials, ordered q, k, v; with `spec.output_gate` every query head is
    [q (D) | gate (D)]. Adds bias [N], normalises q and k of every head with q_weight and k_weight [D] (None: no norm),
    rotates by the table's rows at batch.positions, scales q (see rope_table), and writes k and v into the cache at
    batch.slots. Returns q [T, heads, D] and the gate [T, heads, D] (before its sigmoid) or None, in `dtype` (see
    query_dtype). Arithmetic in float32, rounded once.
    """
    dtype = query_dtype(y, cache, dtype)
    wide = whole(y).float()
    if bias is not None:
        wide = wide + bias.float()
    rows, dim = wide.shape[0], spec.head_dim
    kv_width = spec.kv_heads * dim
    q, k, v = wide.split([projection_width(spec) - 2 * kv_width, kv_width, kv_width], dim=1)
    q, k, v = (part.reshape(rows, -1, dim) for part in (q, k, v))
    gate = None
    if spec.output_gate:
        q, gate = q.reshape(rows, spec.heads, 2, dim).unbind(2)
        gate = gate.to(dtype)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm_reference(q, q_weight, eps, plus_one), rms_norm_reference(k, k_weight, eps, plus_one)
    at = table[batch.positions.long()]
    q, k = rotate(q, at, spec.rope), rotate(k, at, spec.rope)
    if spec.rope.query_scale_beta:
        q = q * at[:, None, spec.rope.rotary_dim :]
    write_cache_reference(cache.k, cache.k_scale, batch.slots, k)
    write_cache_reference(cache.v, cache.v_scale, batch.slots, v)
    return q.to(dtype), gate


def qk_norm_rope_write(
    y: Tensor,
    spec: Attention,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    plus_one: bool,
    table: Tensor,
    batch: Batch,
    cache: LayerCache,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See qk_norm_rope_write_reference."""
    function = qk_norm_rope_write_triton if y.is_cuda else qk_norm_rope_write_reference
    return function(y, spec, q_weight, k_weight, bias, eps, plus_one, table, batch, cache, dtype)


def qk_norm_rope_write_triton(
    y: Tensor,
    spec: Attention,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    plus_one: bool,
    table: Tensor,
    batch: Batch,
    cache: LayerCache,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """qk_norm_rope_write in one launch: reads y once, writes q, the gate and the cache once."""
    from engine.kernels.rope_triton import qk_norm_rope_write_kernel

    rows, dim = y.shape[-2], spec.head_dim
    dtype = query_dtype(y, cache, dtype)
    q = torch.empty((rows, spec.heads, dim), dtype=dtype, device=y.device)
    gate = torch.empty_like(q) if spec.output_gate else None
    if not rows:
        return q, gate
    splits, split_stride, row_stride = partials_of(y)
    # One warp takes 512 values. With many rows four warps share a program, or too few would fit a multiprocessor.
    warps = 4 if rows >= MANY_ROWS else 1
    per_program = max(1, warps * 512 // power_of_2(dim))
    query_blocks, key_blocks = -(-spec.heads // per_program), -(-spec.kv_heads // per_program)
    blocks = (2 if spec.output_gate else 1) * query_blocks + 2 * key_blocks
    half = spec.rope.rotary_dim // 2
    launch(
        qk_norm_rope_write_kernel, (rows, blocks),
        y, q, gate, bias, q_weight, k_weight, table, batch.positions, batch.slots,
        cache.k, cache.v, cache.k_scale, cache.v_scale, split_stride, row_stride, table.stride(0), eps,
        HEADS=spec.heads, KV_HEADS=spec.kv_heads, DIM=dim, PAGE=cache.page_size, SPLITS=splits, PER_PROGRAM=per_program,
        HALF=half, HALF_BLOCK=power_of_2(half), REST=dim - 2 * half, REST_BLOCK=power_of_2(dim - 2 * half),
        INTERLEAVED=spec.rope.interleaved, QUERY_SCALE=spec.rope.query_scale_beta != 0.0, GATE=spec.output_gate,
        BIAS=bias is not None, NORM=q_weight is not None, PLUS_ONE=plus_one,
        LARGEST=LARGEST.get(cache.k.dtype, 0.0), num_warps=warps,
    )  # fmt: skip
    return q, gate
