"""Rotary position embedding: tables, and the step between the q/k/v projection and attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.batch import Batch, LayerCache
from engine.config import Attention, Rope
from engine.kernels.norm import rms_norm_reference, whole


def inverse_frequencies(rope: Rope) -> Tensor:
    """float64 [rotary_dim / 2]."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64) / rope.rotary_dim
    base = rope.theta**-exponents
    if rope.kind == "llama3":
        return _llama3(rope, base)
    if rope.kind == "yarn":
        return _yarn(rope, base)
    return base


def _llama3(rope: Rope, base: Tensor) -> Tensor:
    """Low frequencies divided by the factor, high ones kept, a linear blend between (Llama 3.1)."""
    turns = rope.original_max * base / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0, 1)
    return base * keep + base / rope.factor * (1 - keep)


def _yarn(rope: Rope, base: Tensor) -> Tensor:
    """YaRN's blend by the number of turns within the original context (arXiv 2309.00071, 3.2)."""

    def dimension(turns: float) -> float:
        return rope.rotary_dim * math.log(rope.original_max / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    steps = torch.arange(rope.rotary_dim // 2, dtype=torch.float64)
    interpolate = ((steps - low) / max(high - low, 1e-3)).clamp(0, 1)
    return base / rope.factor * interpolate + base * (1 - interpolate)


def rope_table(rope: Rope, positions: int, device: torch.device | str) -> Tensor:
    """float32 [positions, rotary_dim]: cos of every pair, then sin of every pair."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), inverse_frequencies(rope))
    return (torch.cat([angles.cos(), angles.sin()], dim=1) * rope.cos_sin_scale).float().to(device)


def rotate(x: Tensor, table: Tensor, rope: Rope) -> Tensor:
    """Rotates the first rotary_dim values of x [T, heads, D] by the rows of table [T, rotary_dim], in float32."""
    turned, passed = x[..., : rope.rotary_dim], x[..., rope.rotary_dim :]
    cos, sin = table[:, None, :].chunk(2, dim=-1)
    if rope.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([turned, passed], dim=-1)


def _store(cache: Tensor, scale: Tensor | None, slots: Tensor, values: Tensor) -> None:
    """values [T, kv_heads, D] into cache [pages, kv_heads, page_size, D]; quantized where there are scales."""
    pages, offsets = slots.long() // cache.shape[2], slots.long() % cache.shape[2]
    if scale is None:
        cache[pages, :, offsets] = values.to(cache.dtype)
        return
    largest = 127.0 if cache.dtype == torch.int8 else 448.0
    step = values.abs().amax(-1) / largest
    stored = (values / torch.where(step == 0, torch.ones_like(step), step)[..., None]).clamp(-largest, largest)
    cache[pages, :, offsets] = (stored.round() if cache.dtype == torch.int8 else stored).to(cache.dtype)
    scale[pages, :, offsets] = step


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
) -> tuple[Tensor, Tensor | None]:
    """Splits y [T, (heads (x2 with a gate) + 2 kv_heads) * D] (or Partials), adds the bias, normalises q and k per
    head, rotates them, writes k and v into the cache; returns (q [T, heads, D], gate [T, heads, D] or None)."""
    dtype = y.dtype if y.dim() == 2 else cache.k.dtype
    wide = whole(y).float() if bias is None else whole(y).float() + bias.float()
    rows, dim = wide.shape[0], spec.head_dim
    query_width = spec.heads * dim * (2 if spec.output_gate else 1)
    q, k, v = (
        part.reshape(rows, -1, dim)
        for part in wide.split([query_width, spec.kv_heads * dim, spec.kv_heads * dim], dim=1)
    )
    gate = None
    if spec.output_gate:
        q, gate = q.reshape(rows, spec.heads, 2, dim).unbind(2)
    if spec.qk_norm:
        q, k = rms_norm_reference(q, q_weight, eps, plus_one), rms_norm_reference(k, k_weight, eps, plus_one)
    at = table[batch.positions.long()]
    q, k = rotate(q, at, spec.rope), rotate(k, at, spec.rope)
    if spec.rope.query_scale_beta:
        steps = torch.floor(batch.positions.double() / spec.rope.original_max)
        q = q * (1 + spec.rope.query_scale_beta * torch.log1p(steps)).float()[:, None, None]
    _store(cache.k, cache.k_scale, batch.slots, k)
    _store(cache.v, cache.v_scale, batch.slots, v)
    return q.to(dtype), None if gate is None else gate.to(dtype)


qk_norm_rope_write = qk_norm_rope_write_reference
