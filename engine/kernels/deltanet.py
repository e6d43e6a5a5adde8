"""Gated DeltaNet (arXiv 2412.06464): convolution, gates and delta rule over a recurrent state, by slot.

One token, for a value head h with key head h // (value_heads / key_heads), state S [key_dim, value_dim] in float32:
    q, k, v = silu(causal depthwise convolution of the projections); q, k of length 1, q / sqrt(key_dim)
    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q
    with beta = sigmoid(b), g = -exp(A_log) softplus(a + dt_bias)
    y = norm_weight * o / rms(o) * silu(z)

The projections of a token are one row [q | k | v | z | b | a].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import Batch, StateCache
from engine.config import DeltaNet

CHUNK = 64
L2_EPS = 1e-6


@dataclass(frozen=True)
class DeltaWeights:
    """The small tensors of one layer: conv [channels, conv], a_log and dt_bias float32 [value_heads], norm [value_dim],
    and the eps of the output norm."""

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float


def channels(spec: DeltaNet) -> int:
    """Columns that pass through the convolution: q, k and v."""
    return 2 * spec.key_heads * spec.key_dim + spec.value_heads * spec.value_dim


def row_width(spec: DeltaNet) -> int:
    """Columns of a projected row: q, k, v, z, b, a."""
    return channels(spec) + spec.value_heads * (spec.value_dim + 2)


def delta_mix(y: Tensor, spec: DeltaNet, weights: DeltaWeights, batch: Batch, cache: StateCache) -> Tensor:
    """Projected rows y [T, row_width] or Partials -> [T, value_heads * value_dim] in the cache's activation dtype.

    The states of the batch's slots are advanced in place. Prompts in float32 go by the reference: the chunk kernels
    are for 16-bit activations.
    """
    has_kernel = batch.decode or cache.conv.dtype != torch.float32
    if not (y.is_cuda and has_kernel):
        reference = delta_step_reference if batch.decode else delta_prefill_reference
        return reference(y, spec, weights, batch, cache)
    from engine.kernels import deltanet_triton

    launch = deltanet_triton.step if batch.decode else deltanet_triton.prefill
    return launch(y, spec, weights, batch, cache)


def copy_state(cache: StateCache, source: int, target: int) -> None:
    """Copies one slot's state: a snapshot at exactly the position that the request has reached."""
    cache.conv[target].copy_(cache.conv[source])
    cache.state[target].copy_(cache.state[source])


# ---------------------------------------------------------------------------------------------- references


def delta_step_reference(y: Tensor, spec: DeltaNet, weights: DeltaWeights, batch: Batch, cache: StateCache) -> Tensor:
    """One token of every request, by the recurrence."""
    rows = _rounded(y, cache)
    mixed, z, b, a = _split(rows, spec)
    positions, slots = batch.positions.long(), batch.state_slots.long()
    cache.conv[slots, positions % spec.conv] = mixed.to(cache.conv.dtype)
    back = torch.arange(spec.conv - 1, -1, -1, device=y.device)
    past = positions[:, None] - back
    window = cache.conv[slots[:, None], past % spec.conv].float()
    window = torch.where((past >= 0)[..., None], window, 0.0)
    mixed = F.silu((window * weights.conv.float().T).sum(1))
    q, k, v = _heads(mixed, spec)
    beta, g = _gates(b, a, weights)
    state = torch.where((positions > 0)[:, None, None, None], cache.state[slots], 0.0)
    state, out = _delta_token(state, q, k, v, beta, g)
    cache.state[slots] = state
    return _gated_norm(out, z, spec, weights).to(cache.conv.dtype)


def delta_prefill_reference(
    y: Tensor, spec: DeltaNet, weights: DeltaWeights, batch: Batch, cache: StateCache
) -> Tensor:
    """Any number of tokens of every request, in chunks of 64; rows of no request give zeros."""
    rows = _rounded(y, cache)
    out = torch.zeros(rows.shape[0], spec.value_heads * spec.value_dim, dtype=cache.conv.dtype, device=y.device)
    starts = batch.query_start.tolist()
    for request, slot in enumerate(batch.state_slots.tolist()):
        span = slice(starts[request], starts[request + 1])
        if span.stop > span.start:
            first = int(batch.positions[span.start])
            out[span] = _request_reference(rows[span], first, slot, spec, weights, cache).to(out.dtype)
    return out


def _request_reference(
    rows: Tensor, first: int, slot: int, spec: DeltaNet, weights: DeltaWeights, cache: StateCache
) -> Tensor:
    mixed, z, b, a = _split(rows, spec)
    count = mixed.shape[0]
    past = torch.arange(first - spec.conv + 1, first, device=rows.device)
    before = torch.where((past >= 0)[:, None], cache.conv[slot, past % spec.conv].float(), 0.0)
    column = torch.cat([before, mixed]).T[None]
    convolved = F.conv1d(column, weights.conv.float()[:, None, :], groups=mixed.shape[1])[0].T
    kept = torch.arange(first + max(count - spec.conv, 0), first + count, device=rows.device)
    cache.conv[slot, kept % spec.conv] = mixed[-len(kept) :].to(cache.conv.dtype)
    q, k, v = _heads(F.silu(convolved), spec)
    beta, g = _gates(b, a, weights)
    state = cache.state[slot] if first > 0 else torch.zeros_like(cache.state[slot])
    state, out = delta_rule_chunked(q, k, v, beta, g, state)
    cache.state[slot] = state
    return _gated_norm(out, z, spec, weights)


def delta_rule_recurrent(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The delta rule token by token: q, k [T, V, dk], v [T, V, dv], beta, g [T, V], state [V, dk, dv], float32.

    Returns (state after the last token, outputs [T, V, dv])."""
    outputs = []
    for t in range(q.shape[0]):
        state, out = _delta_token(state, q[t], k[t], v[t], beta[t], g[t])
        outputs.append(out)
    return state, torch.stack(outputs)


def delta_rule_chunked(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The same in chunks of 64 tokens (section 3.3 of the paper): within a chunk a unit lower triangular solve."""
    outputs = []
    for parts in zip(*(t.split(CHUNK) for t in (q, k, v, beta, g)), strict=True):
        cq, ck, cv = (p.transpose(0, 1) for p in parts[:3])
        cbeta, total = parts[3].T[..., None], parts[4].T.cumsum(1)
        decay = torch.exp((total[:, :, None] - total[:, None, :]).tril()).tril()
        system = (cbeta * ck) @ ck.mT * decay
        right = torch.cat([cbeta * cv, cbeta * ck * total.exp()[..., None]], dim=-1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        value, key = solved.split([cv.shape[-1], ck.shape[-1]], dim=-1)
        fresh = value - key @ state
        outputs.append(((cq * total.exp()[..., None]) @ state + (cq @ ck.mT * decay) @ fresh).transpose(0, 1))
        left = (total[:, -1:] - total).exp()[..., None]
        state = state * total[:, -1].exp()[:, None, None] + (ck * left).mT @ fresh
    return state, torch.cat(outputs)


def _delta_token(state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """One token: state [..., dk, dv], q, k [..., dk], v [..., dv], beta, g [...]."""
    state = state * g.exp()[..., None, None]
    delta = beta[..., None] * (v - (state * k[..., None]).sum(-2))
    state = state + k[..., None] * delta[..., None, :]
    return state, (state * q[..., None]).sum(-2)


def _rounded(y: Tensor, cache: StateCache) -> Tensor:
    """The rows of y (Partials summed) as float32 of values that the activation dtype can hold."""
    return (y.sum(0) if y.dim() == 3 else y).to(cache.conv.dtype).float()


def _split(rows: Tensor, spec: DeltaNet) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads = spec.value_heads
    return rows.split([channels(spec), heads * spec.value_dim, heads, heads], dim=-1)


def _heads(mixed: Tensor, spec: DeltaNet) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [T, value_heads, key_dim] normalised, v [T, value_heads, value_dim]."""
    width, repeat = spec.key_heads * spec.key_dim, spec.value_heads // spec.key_heads
    q, k, v = mixed.split([width, width, spec.value_heads * spec.value_dim], dim=-1)
    q, k = (t.reshape(-1, spec.key_heads, spec.key_dim) for t in (q, k))
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + L2_EPS) for t in (q, k))
    q, k = (t.repeat_interleave(repeat, dim=1) for t in (q * spec.key_dim**-0.5, k))
    return q, k, v.reshape(-1, spec.value_heads, spec.value_dim)


def _gates(b: Tensor, a: Tensor, weights: DeltaWeights) -> tuple[Tensor, Tensor]:
    return torch.sigmoid(b), -weights.a_log.exp() * F.softplus(a + weights.dt_bias)


def _gated_norm(out: Tensor, z: Tensor, spec: DeltaNet, weights: DeltaWeights) -> Tensor:
    z = z.reshape(out.shape)
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + weights.eps)
    return (weights.norm.float() * normed * F.silu(z)).reshape(-1, spec.value_heads * spec.value_dim)
