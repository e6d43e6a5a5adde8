"""Latent attention over the paged latent cache, in the absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1).

The cache holds, for each token, kv_rank latents c (in LayerCache.k) and rope_dim rotated values r (in LayerCache.v),
shared by all heads; the first members of the rotated pairs stand before the second ones. With the key's up-projection
absorbed into the query, head h has
    score = (q_latent[h] . c + q_rope[h] . r) * scale,   out[h] = softmax(score) c.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch import Batch, LayerCache
from engine.config import LatentAttention

FEW_ROWS = 256
"""Rows up to which a kernel of ours absorbs: it takes part in dependent launches and reads its weights ahead."""


def latent_write(
    y: Tensor, spec: LatentAttention, q_weight: Tensor, kv_weight: Tensor, table: Tensor, batch: Batch,
    cache: LayerCache, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Splits y [T, q_rank + kv_rank + rope_dim] (or Partials), normalises both latents, rotates the shared key and
    writes latents and key into the cache; returns the query's normalised latents [T, q_rank] in `dtype`."""
    if not y.is_cuda:
        return latent_write_reference(y, spec, q_weight, kv_weight, table, batch, cache, dtype)
    from engine.kernels import mla_triton

    return mla_triton.latent_write(y, spec, q_weight, kv_weight, table, batch, cache, dtype)


def absorb(nope: Tensor, key_up: Tensor) -> Tensor:
    """nope [T, heads, nope_dim] times key_up [heads, nope_dim, kv_rank] -> [T, heads, kv_rank], head by head."""
    if nope.is_cuda and nope.shape[0] <= FEW_ROWS:
        from engine.kernels import mla_triton

        return mla_triton.absorb(nope, key_up)
    return torch.bmm(nope.transpose(0, 1), key_up).transpose(0, 1)


def latent_values(
    q_latent: Tensor, q_rope: Tensor, value_down: Tensor, spec: LatentAttention, table: Tensor, batch: Batch,
    cache: LayerCache,
) -> Tensor:  # fmt: skip
    """latent_attention, then value_down [heads, kv_rank, value_dim] head by head: [T, heads * value_dim]."""
    if q_latent.is_cuda and batch.decode:
        from engine.kernels import mla_triton

        return mla_triton.latent_decode(q_latent, q_rope, value_down, spec, table, batch, cache)
    mixed = latent_attention(q_latent, q_rope, spec, table, batch, cache)
    return torch.bmm(mixed.transpose(0, 1), value_down).transpose(0, 1).reshape(mixed.shape[0], -1)


def latent_attention(
    q_latent: Tensor, q_rope: Tensor, spec: LatentAttention, table: Tensor, batch: Batch, cache: LayerCache
) -> Tensor:
    """q_latent [T, heads, kv_rank], q_rope [T, heads, rope_dim] (rotated here) -> [T, heads, kv_rank]; causal.

    On a GPU for prompts alone: decode steps take latent_values.
    """
    if not q_latent.is_cuda:
        return latent_attention_reference(q_latent, q_rope, spec, table, batch, cache)
    from engine.kernels import mla_triton

    return mla_triton.latent_attention(q_latent, q_rope, spec, table, batch, cache)


# ---------------------------------------------------------------------------------------------- references


def latent_write_reference(
    y: Tensor, spec: LatentAttention, q_weight: Tensor, kv_weight: Tensor, table: Tensor, batch: Batch,
    cache: LayerCache, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    rows = (y.sum(0) if y.dim() == 3 else y).float()
    q, latent, key = rows.split([spec.q_rank, spec.kv_rank, spec.rope_dim], dim=1)
    latent = _rms_norm(latent, kv_weight, spec.latent_eps)
    key = _rotate(key[:, None], table[batch.positions.long()], spec.rope.interleaved)[:, 0]
    _store(cache.k, cache.k_scale, batch.slots, latent)
    _store(cache.v, cache.v_scale, batch.slots, key)
    return _rms_norm(q, q_weight, spec.latent_eps).to(dtype)


def latent_attention_reference(
    q_latent: Tensor, q_rope: Tensor, spec: LatentAttention, table: Tensor, batch: Batch, cache: LayerCache
) -> Tensor:
    """Request by request in float32; rows of no request, and of requests without cached tokens, give zeros."""
    out = torch.zeros(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    q_rope = _rotate(q_rope.float(), table[batch.positions.long()], spec.rope.interleaved).to(q_rope.dtype)
    starts = batch.query_start.tolist()
    for request, length in enumerate(batch.kv_len.tolist()):
        span = slice(starts[request], starts[request + 1])
        if span.stop == span.start or length == 0:
            continue
        latents = _gather(cache.k, cache.k_scale, batch.page_table[request], length)
        keys = _gather(cache.v, cache.v_scale, batch.page_table[request], length)
        scores = torch.einsum("thd,sd->ths", q_latent[span].float(), latents)
        scores += torch.einsum("thd,sd->ths", q_rope[span].float(), keys)
        hidden = torch.arange(length, device=out.device) > batch.positions[span].long()[:, None]
        weights = torch.softmax((scores * spec.scale).masked_fill(hidden[:, None], float("-inf")), dim=-1)
        out[span] = torch.einsum("ths,sd->thd", weights, latents).to(out.dtype)
    return out


def _gather(cache: Tensor, scale: Tensor | None, pages: Tensor, length: int) -> Tensor:
    """The first `length` tokens of a request, float32 [length, D]."""
    values = cache[pages.long(), 0].float().flatten(0, 1)
    if scale is not None:
        values = values * scale[pages.long(), 0].flatten()[:, None]
    return values[:length]


def _store(cache: Tensor, scale: Tensor | None, slots: Tensor, values: Tensor) -> None:
    """values [T, D] into cache [pages, 1, page_size, D] at the slots; 8-bit forms get one scale a token."""
    pages, offsets = slots.long() // cache.shape[2], slots.long() % cache.shape[2]
    if scale is None:
        cache[pages, 0, offsets] = values.to(cache.dtype)
        return
    largest = 127.0 if cache.dtype == torch.int8 else 448.0
    step = values.abs().amax(-1) / largest
    stored = (values / torch.where(step == 0, 1.0, step)[:, None]).clamp(-largest, largest)
    cache[pages, 0, offsets] = (stored.round() if cache.dtype == torch.int8 else stored).to(cache.dtype)
    scale[pages, 0, offsets] = step


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rotate(x: Tensor, at: Tensor, interleaved: bool) -> Tensor:
    """x [T, heads, D] rotated by at [T, D] (cos of every pair, then sin), float32: [first of every pair, second ...].

    That order is the cache's for interleaved pairs too: a score is the same in any order.
    """
    cos, sin = at[:, None, : x.shape[-1]].chunk(2, dim=-1)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
