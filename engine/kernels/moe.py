"""Mixture of experts: routing, grouping by expert, and the experts' products over 4-bit or dense weights.

A token visits `slots` experts: its `top_k` chosen ones and, where the shared expert is stored as one more expert, that
one. A *pair* is one visit, numbered token * slots + slot. All steps stay on the device, and the order in which anything
is summed is fixed by shapes alone, so that results repeat bit for bit and may be captured in a graph.

Weights of E experts: `gate_up` [E, 2 * I, H] (all rows of gate, then all of up; I a multiple of 64, padded with rows of
zeros) and `down` [E, H, I], as QuantExperts or dense tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import MoeFfn
from engine.quant import QuantExperts, dequantize_expert

ExpertWeights = QuantExperts | Tensor

DECODE_TOKENS = 64
MAX_SORTED_PAIRS = 1024
MIN_PROGRAMS = 264
SEGMENTS = 4


@dataclass(frozen=True)
class Experts:
    """The weights of all experts of one layer; `shared`: the last one is the expert that every token visits.

    Biases: `gate_up_bias` [E, 2 * I] and `down_bias` [E, H], or None.
    """

    gate_up: ExpertWeights
    down: ExpertWeights
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    shared: bool = False

    @property
    def count(self) -> int:
        return self.gate_up.count if isinstance(self.gate_up, QuantExperts) else self.gate_up.shape[0]

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(w) for w in (self.gate_up, self.down, self.gate_up_bias, self.down_bias) if w is not None)


@dataclass(frozen=True)
class Groups:
    """Pairs in blocks of `size`, one expert a block: order int32 [blocks * size] (-1: none), expert int32 [blocks]."""

    order: Tensor
    expert: Tensor
    size: int


def _nbytes(weight: ExpertWeights) -> int:
    return weight.nbytes if isinstance(weight, QuantExperts) else weight.numel() * weight.element_size()


# ---------------------------------------------------------------------------------------------- router


def router_logits_reference(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, H], weight [outputs, H] -> float32 [T, outputs]."""
    return x.float() @ weight.float().T


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    if not x.is_cuda:
        return router_logits_reference(x, weight)
    from engine.kernels.moe_triton import router_logits_kernel

    (tokens, k), outputs = x.shape, weight.shape[0]
    logits = torch.empty(tokens, outputs, dtype=torch.float32, device=x.device)
    m, n = (16, 16) if tokens <= DECODE_TOKENS else (64, 32)
    grid = (-(-tokens // m), -(-outputs // n))
    router_logits_kernel[grid](x, weight, logits, tokens, outputs, k, m, n, 128, num_warps=4, num_stages=3)
    return logits


def route_reference(
    logits: Tensor, spec: MoeFfn, bias: Tensor | None, selection_bias: Tensor | None, shared: bool
) -> tuple[Tensor, Tensor]:
    """The experts of every token, int32 [T, slots], and their weights, float32 [T, slots].

    logits [T, experts], or [T, experts + 1] with the shared expert's gate last. Equal scores go to the lower expert.
    """
    scores = logits[:, : spec.experts]
    if bias is not None:
        scores = scores + bias.float()
    if spec.router == "softmax":
        scores = torch.softmax(scores, dim=-1)
    elif spec.router == "sigmoid":
        scores = torch.sigmoid(scores)
    choice = scores if selection_bias is None else scores + selection_bias.float()
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_k]
    weights = scores.gather(1, ids)
    if spec.router == "topk_softmax":
        weights = torch.softmax(weights, dim=-1)
    elif spec.renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    weights = weights * spec.routed_scale
    if shared:
        gate = torch.sigmoid(logits[:, spec.experts :]) if spec.shared_gate else torch.ones_like(weights[:, :1])
        ids = torch.cat([ids, torch.full_like(ids[:, :1], spec.experts)], dim=1)
        weights = torch.cat([weights, gate], dim=1)
    return ids.to(torch.int32), weights.contiguous()


def route(
    logits: Tensor, spec: MoeFfn, bias: Tensor | None, selection_bias: Tensor | None, shared: bool
) -> tuple[Tensor, Tensor]:
    if not logits.is_cuda:
        return route_reference(logits, spec, bias, selection_bias, shared)
    from engine.kernels.moe_triton import route_kernel

    tokens, outputs = logits.shape
    slots = spec.top_k + shared
    ids = torch.empty(tokens, slots, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, slots, dtype=torch.float32, device=logits.device)
    route_kernel[(tokens,)](
        logits, bias, selection_bias, ids, weights, spec.experts, _power_of_two(spec.experts), spec.top_k, slots,
        outputs, spec.router, spec.renormalize, spec.routed_scale, bias is not None, selection_bias is not None,
        shared, spec.shared_gate, num_warps=1,
    )  # fmt: skip
    return ids, weights


# ---------------------------------------------------------------------------------------------- grouping


def block_bound(pairs: int, experts: int, size: int) -> int:
    """The most blocks of `size` that `pairs` pairs over `experts` experts can need."""
    return min(pairs, experts + pairs // size)


def group_pairs_reference(ids: Tensor, experts: int, size: int) -> Groups:
    """Pairs sorted by expert (stable) into blocks of `size`; device operations only, any device."""
    flat = ids.reshape(-1).long()
    pairs = flat.shape[0]
    blocks = block_bound(pairs, experts, size)
    by_expert, pair = flat.sort(stable=True)
    all_experts = torch.arange(experts, device=ids.device)
    first = torch.searchsorted(by_expert, all_experts)
    counts = torch.searchsorted(by_expert, all_experts, right=True) - first
    needed = (counts + size - 1) // size
    first_block = needed.cumsum(0) - needed
    rank = torch.arange(pairs, device=ids.device) - first[by_expert]
    block = first_block[by_expert] + rank // size
    order = torch.full((blocks * size,), -1, dtype=torch.int32, device=ids.device)
    order[block * size + rank % size] = pair.to(torch.int32)
    expert = torch.full((blocks,), -1, dtype=torch.int32, device=ids.device)
    expert[block] = by_expert.to(torch.int32)
    return Groups(order, expert, size)


def group_pairs(ids: Tensor, experts: int, size: int) -> Groups:
    pairs = ids.numel()
    if not ids.is_cuda or pairs > MAX_SORTED_PAIRS:
        return group_pairs_reference(ids, experts, size)
    from engine.kernels.moe_triton import group_kernel

    blocks = block_bound(pairs, experts, size)
    order = torch.empty(blocks * size, dtype=torch.int32, device=ids.device)
    expert = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    group_kernel[(1,)](
        ids, order, expert, pairs, blocks,
        _power_of_two(pairs), experts, _power_of_two(experts + 1), _power_of_two(blocks), size, num_warps=8,
    )  # fmt: skip
    return Groups(order, expert, size)


# ---------------------------------------------------------------------------------------------- experts


def moe_experts_reference(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, spec: MoeFfn) -> Tensor:
    """The weighted sum of every token's experts: x [T, H], ids and weights [T, slots] -> [T, H] in the dtype of x."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        token, slot = torch.where(ids == expert)
        gate_up = x[token].float() @ _dense(experts.gate_up, expert).T
        if experts.gate_up_bias is not None:
            gate_up = gate_up + experts.gate_up_bias[expert].float()
        gate, up = gate_up.chunk(2, dim=-1)
        h = torch.nn.functional.silu(gate) * up if spec.clamp is None else _clamped(gate, up, spec)
        y = h.to(x.dtype).float() @ _dense(experts.down, expert).T
        if experts.down_bias is not None:
            y = y + experts.down_bias[expert].float()
        total.index_add_(0, token, y * weights[token, slot, None])
    return total.to(x.dtype)


def moe_experts(
    x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, spec: MoeFfn, grouped: bool = True
) -> Tensor:
    """As the reference; for up to DECODE_TOKENS tokens the slots' terms are left as Partials [slots, T, H].

    `grouped` False reads an expert's weights anew for every token of a decode step, as a kernel made for one request.
    """
    if not x.is_cuda:
        return moe_experts_reference(x, ids, weights, experts, spec)
    return moe_experts_triton(x, ids, weights, experts, spec, grouped)


def moe_experts_triton(
    x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, spec: MoeFfn, grouped: bool = True,
    asm: bool | None = None,
) -> Tensor:  # fmt: skip
    """`moe_experts` with the Triton kernels. `asm` False unpacks without PTX (the interpreter has none)."""
    asm = x.dtype == torch.bfloat16 if asm is None else asm
    tokens, slots = ids.shape
    size = block_size(tokens, slots, experts.count)
    decode = tokens <= DECODE_TOKENS
    direct = tokens == 1 or (decode and not grouped)
    groups = None if direct else group_pairs(ids, experts.count, size)
    h, split = _gate_up(x, ids, groups, size, experts, spec, asm)
    out_dtype = torch.float32 if decode else x.dtype
    y = torch.empty(slots, tokens, x.shape[1], dtype=out_dtype, device=x.device)
    _down(h, split, y, ids, groups, size, weights, experts, spec, x.dtype, asm)
    return y if decode else y.sum(0)


def block_size(tokens: int, slots: int, experts: int) -> int:
    """Rows of a block: what an expert gets on average, between 16 and 64."""
    if tokens <= DECODE_TOKENS:
        return 16
    mean = tokens * slots / experts
    return 16 if mean <= 16 else 32 if mean <= 48 else 64


def _launch_options(size: int, activates: bool = False) -> dict[str, int]:
    """`activates`: the kernel reads partial sums, which take much shared memory a stage."""
    if size > 16:
        return {"num_warps": 4, "num_stages": 3}
    return {"num_warps": 2, "num_stages": 2 if activates else 4}


def _gate_up(
    x: Tensor, ids: Tensor, groups: Groups | None, size: int, experts: Experts, spec: MoeFfn, asm: bool
) -> tuple[Tensor, bool]:
    """Activated values [pairs, I], or (True) float32 partial sums [SEGMENTS, pairs, 2 * I] of too small a grid."""
    from engine.kernels.moe_triton import gate_up_kernel

    pairs, slots = ids.numel(), ids.shape[1]
    packed, scales, n_tiles, k_tiles, group, groups_n, codes = _operands(experts.gate_up)
    half = n_tiles // 2
    segments = max(1, min(SEGMENTS, k_tiles // 4)) if size == 16 else 1
    blocks = pairs if groups is None else groups.expert.shape[0]
    split = segments > 1 and blocks * half < MIN_PROGRAMS
    shape = (segments, pairs, 2 * half * 64) if split else (pairs, half * 64)
    h = torch.empty(shape, dtype=torch.float32 if split else x.dtype, device=x.device)
    order, expert = (None, None) if groups is None else (groups.order, groups.expert)
    gate_up_kernel[(blocks, half, segments if split else 1)](
        x, packed, scales, experts.gate_up_bias, ids, order, expert, h, pairs, x.shape[1], groups_n, spec.alpha,
        spec.clamp or 0.0, slots, k_tiles, half, group, size, segments, split, groups is None,
        experts.gate_up_bias is not None, spec.clamp is not None, codes, asm, **_launch_options(size),
    )  # fmt: skip
    return h, split


def _down(
    h: Tensor, split: bool, y: Tensor, ids: Tensor, groups: Groups | None, size: int, weights: Tensor,
    experts: Experts, spec: MoeFfn, dtype: torch.dtype, asm: bool,
) -> None:  # fmt: skip
    import triton.language as tl

    from engine.kernels.moe_triton import down_kernel

    slots, tokens, hidden = y.shape
    packed, scales, n_tiles, k_tiles, group, groups_n, codes = _operands(experts.down)
    blocks = ids.numel() if groups is None else groups.expert.shape[0]
    order, expert = (None, None) if groups is None else (groups.order, groups.expert)
    triton_dtype = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]
    down_kernel[(blocks, n_tiles)](
        h, packed, scales, experts.gate_up_bias, experts.down_bias, ids, order, expert, weights, y,
        ids.numel(), tokens, hidden, groups_n, spec.alpha, spec.clamp or 0.0,
        slots, k_tiles, n_tiles, group, size, h.shape[0] if split else 1, split, groups is None,
        experts.down_bias is not None, spec.clamp is not None, codes, asm, triton_dtype, **_launch_options(size, split),
    )  # fmt: skip


def _operands(weight: ExpertWeights) -> tuple[Tensor, Tensor, int, int, int, int, str]:
    """(packed words or dense values, scales, n_tiles, k_tiles, group, groups, codes) of a kernel's launch."""
    if isinstance(weight, QuantExperts):
        packed = weight.packed.view(torch.int32)
        return packed, weight.scales, weight.n_tiles, weight.k_tiles, weight.group, weight.scales.shape[2], weight.codes
    _, n, k = weight.shape
    if n % 64:
        raise ValueError(f"dense experts need a multiple of 64 outputs, not {n}")
    return weight, weight, -(-n // 64), -(-k // 64), 64, 0, "dense"


def _dense(weight: ExpertWeights, expert: int) -> Tensor:
    return dequantize_expert(weight, expert) if isinstance(weight, QuantExperts) else weight[expert].float()


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _clamped(gate: Tensor, up: Tensor, spec: MoeFfn) -> Tensor:
    gate = gate.clamp(max=spec.clamp)
    up = up.clamp(-spec.clamp, spec.clamp)
    return (up + 1) * gate * torch.sigmoid(spec.alpha * gate)
