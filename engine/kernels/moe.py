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
from engine.kernels._launch import arrival_counters, launch, power_of_2
from engine.quant import QuantExperts, dequantize_expert

ExpertWeights = QuantExperts | Tensor

DECODE_TOKENS = 64
"""Up to here the slots' terms are left as partial sums, and 4-bit experts take the kernels for few rows."""
FEW_TOKENS = 8
"""Up to here programs are as many as one token needs to fill the GPU, whatever their number."""


Strip = tuple[int, int]
"""Outputs of a program (16, 32 or 64) and tiles of a chunk of K (4 or more: a warp takes whole ones)."""


@dataclass(frozen=True)
class Launches:
    """How the kernels for few rows are launched; tools/gpu_moe.py --sweep tries other values.

    `few_gate`, `few_down`: for up to FEW_TOKENS, the first whose programs for one token are all `resident` at once,
    else the last. `more`, `wide`: of gate_up and of down beyond, for blocks of 8 and of 16 rows. `direct_tokens`: up to
    here every visit is a block of its own, without grouping. `wide_blocks`: visits an expert from which a block has 16
    rows, else 8.
    """

    few_gate: tuple[Strip, ...] = ((16, 8), (32, 4))
    few_down: tuple[Strip, ...] = ((32, 8), (64, 4))
    more: tuple[Strip, Strip] = ((32, 4), (64, 4))
    wide: tuple[Strip, Strip] = ((32, 4), (32, 4))
    resident: int = 528
    direct_tokens: int = 4
    wide_blocks: float = 4.0


LAUNCHES = Launches()
BLOCK_ROWS = ((16, 16), (40, 32), (96, 64), (float("inf"), 128))
"""(visits an expert on average, up to which a block of a prompt has so many rows)."""
MXFP4_ROWS = 64
"""Most rows of a block of MXFP4 experts: with 128, Triton 3.6 makes a kernel for sm_90 whose products are wrong."""
GROUPED_AT_ONCE, GROUP_CHUNK = 1024, 256
"""Most pairs that are grouped in one launch; pairs of a program beyond."""


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
    def codes(self) -> str:
        return self.gate_up.codes if isinstance(self.gate_up, QuantExperts) else "dense"

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


def choose_experts(
    x: Tensor, router: Tensor, spec: MoeFfn, bias: Tensor | None, selection_bias: Tensor | None, shared: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The router: (logits float32 [T, outputs], experts int32 [T, slots], their weights float32 [T, slots])."""
    if not x.is_cuda:
        logits = router_logits_reference(x, router)
        return logits, *route_reference(logits, spec, bias, selection_bias, shared)
    return choose_experts_triton(x, router, spec, bias, selection_bias, shared)


def choose_experts_triton(
    x: Tensor, router: Tensor, spec: MoeFfn, bias: Tensor | None, selection_bias: Tensor | None, shared: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`choose_experts` in one launch for a decode step, else in two."""
    from engine.kernels.moe_route_triton import few_route_kernel, route_kernel, router_logits_kernel

    (tokens, k), outputs, slots = x.shape, router.shape[0], spec.top_k + shared
    logits = torch.empty(tokens, outputs, dtype=torch.float32, device=x.device)
    ids = torch.empty(tokens, slots, dtype=torch.int32, device=x.device)
    weights = torch.empty(tokens, slots, dtype=torch.float32, device=x.device)
    rule = {
        "OUTPUTS": outputs, "EXPERTS": spec.experts, "BINS": power_of_2(spec.experts), "TOP_K": spec.top_k,
        "SLOTS": slots, "RULE": spec.router, "RENORMALIZE": spec.renormalize, "SCALE": spec.routed_scale,
        "HAS_BIAS": bias is not None, "HAS_SELECTION": selection_bias is not None, "SHARED": shared,
        "SHARED_GATE": spec.shared_gate,
    }  # fmt: skip
    if tokens <= DECODE_TOKENS:
        rows, warps, inputs = 8, 4, 64
        splits = -(-k // (warps * inputs))
        parts = torch.empty(splits, tokens, outputs, dtype=torch.float32, device=x.device)
        grid = (-(-outputs // 16), splits, -(-tokens // rows))
        launch(
            few_route_kernel, grid, x, router, bias, selection_bias, parts, arrival_counters(x), logits, ids, weights,
            tokens, k, M=rows, CHOOSE=min(rows, power_of_2(tokens)), W=warps, BLOCK_K=inputs, SPLITS=splits,
            num_warps=warps, num_stages=1, **rule,
        )  # fmt: skip
        return logits, ids, weights
    grid = (-(-tokens // 64), -(-outputs // 32))
    launch(
        router_logits_kernel, grid, x, router, logits, tokens, outputs, k, M=64, N=32, BLOCK_K=128,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    rows = 4
    launch(
        route_kernel, (-(-tokens // rows),), logits, bias, selection_bias, ids, weights, tokens, M=rows,
        num_warps=4, **rule,
    )  # fmt: skip
    return logits, ids, weights


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


def group_pairs_triton(ids: Tensor, experts: int, size: int) -> Groups:
    """`group_pairs_reference` in one launch for a decode step, else in two; the order of a block without expert is
    undefined.
    """
    from engine.kernels.moe_route_triton import count_kernel, group_few_kernel, place_kernel

    pairs, bins = ids.numel(), power_of_2(experts + 1)
    blocks = block_bound(pairs, experts, size)
    order = torch.empty(blocks * size, dtype=torch.int32, device=ids.device)
    expert = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    if pairs <= GROUPED_AT_ONCE:
        most = max(power_of_2(pairs), 128)
        launch(
            group_few_kernel, (experts,), ids, order, expert, pairs, blocks, EXPERTS=experts, BINS=bins, PAIRS=most,
            M=size, FILL=32, num_warps=max(1, most // 256),
        )  # fmt: skip
        return Groups(order, expert, size)
    chunks = -(-pairs // GROUP_CHUNK)
    counts = torch.empty(chunks, bins, dtype=torch.int32, device=ids.device)
    shared = {"EXPERTS": experts, "BINS": bins, "CHUNK": GROUP_CHUNK}
    launch(count_kernel, (chunks,), ids, counts, pairs, num_warps=4, **shared)
    launch(
        place_kernel, (max(chunks, -(-blocks // 16)),), ids, counts, order, expert, pairs, chunks, blocks,
        M=size, FILL=16, num_warps=8, **shared,
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
    """As the reference; for up to DECODE_TOKENS tokens the terms are left as Partials [slots, T, H].

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
    packed = isinstance(experts.gate_up, QuantExperts)
    decode = tokens <= DECODE_TOKENS
    direct = tokens <= (LAUNCHES.direct_tokens if packed else 1) or (decode and not grouped)
    size = block_size(tokens, slots, experts.count, experts.codes)
    groups = None if direct else group_pairs_triton(ids, experts.count, size)
    if decode and packed:
        return _few_rows(x, ids, groups, 8 if direct else size, weights, experts, spec, asm)
    y = _many_rows(x, ids, groups, size, weights, experts, spec, asm, torch.float32 if decode else x.dtype)
    return y if decode else _sum_slots(y)


def block_size(tokens: int, slots: int, experts: int, codes: str) -> int:
    """Rows of a block, from what an expert gets on average; `codes`: as of QuantExperts, or "dense"."""
    mean = tokens * slots / experts
    if tokens <= DECODE_TOKENS:
        return 8 if codes != "dense" and mean <= LAUNCHES.wide_blocks else 16
    rows = next(rows for most, rows in BLOCK_ROWS if mean <= most)
    return min(rows, MXFP4_ROWS) if codes == "mxfp4" else rows


def few_strips(tokens: int, slots: int, size: int, gate_tiles: int, down_tiles: int) -> tuple[Strip, Strip]:
    """How gate_up and down, of so many tiles of 64 outputs, are dealt to programs for blocks of `size` rows."""
    if tokens > FEW_TOKENS:
        return LAUNCHES.more if size == 8 else LAUNCHES.wide

    def fitting(strips: tuple[Strip, ...], tiles: int) -> Strip:
        return next((s for s in strips if slots * tiles * 64 // s[0] <= LAUNCHES.resident), strips[-1])

    return fitting(LAUNCHES.few_gate, gate_tiles), fitting(LAUNCHES.few_down, down_tiles)


def _few_rows(
    x: Tensor, ids: Tensor, groups: Groups | None, size: int, weights: Tensor, experts: Experts, spec: MoeFfn,
    asm: bool,
) -> Tensor:  # fmt: skip
    """The slots' terms, float32 [slots, T, H]; a row's bits depend on it and on whether there are FEW_TOKENS."""
    from engine.kernels.moe_decode_triton import few_down_kernel, few_gate_up_kernel

    (tokens, slots), hidden = ids.shape, x.shape[1]
    where = (ids, None, None) if groups is None else (ids, groups.order, groups.expert)
    blocks = ids.numel() if groups is None else groups.expert.shape[0]
    packed, scales, n_tiles, k_tiles, group, groups_n, codes = _operands(experts.gate_up)
    half = n_tiles // 2
    (gate_rows, gate_chunk), (down_rows, down_chunk) = few_strips(tokens, slots, size, half, -(-hidden // 64))
    h = torch.empty(ids.numel(), half * 64, dtype=x.dtype, device=x.device)
    shared = {"TOP_K": slots, "M": size, "DIRECT": groups is None, "ASM": asm, "num_warps": 4, "num_stages": 1}
    launch(
        few_gate_up_kernel, (blocks, half * 64 // gate_rows), x, packed, scales, experts.gate_up_bias, *where, h,
        hidden, groups_n, spec.alpha, spec.clamp or 0.0, K_TILES=k_tiles, HALF_TILES=half, GROUP=group, R=gate_rows,
        T=gate_chunk, HAS_BIAS=experts.gate_up_bias is not None, CLAMPED=spec.clamp is not None, CODES=codes, **shared,
    )  # fmt: skip
    packed, scales, n_tiles, k_tiles, group, groups_n, codes = _operands(experts.down)
    y = torch.empty(slots, tokens, hidden, dtype=torch.float32, device=x.device)
    launch(
        few_down_kernel, (blocks, n_tiles * 64 // down_rows), h, packed, scales, experts.down_bias, *where, weights, y,
        tokens, hidden, groups_n, K_TILES=k_tiles, N_TILES=n_tiles, GROUP=group, R=down_rows, T=down_chunk,
        HAS_BIAS=experts.down_bias is not None, CODES=codes, **shared,
    )  # fmt: skip
    return y


def _many_rows(
    x: Tensor, ids: Tensor, groups: Groups | None, size: int, weights: Tensor, experts: Experts, spec: MoeFfn,
    asm: bool, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The slots' terms [slots, T, H] of many rows, or of dense weights."""
    from engine.kernels.moe_prompt_triton import down_kernel, gate_up_kernel

    (tokens, slots), hidden = ids.shape, x.shape[1]
    where = (ids, None, None) if groups is None else (ids, groups.order, groups.expert)
    blocks = ids.numel() if groups is None else groups.expert.shape[0]
    packed, scales, n_tiles, k_tiles, group, groups_n, codes = _operands(experts.gate_up)
    rows, stages = (16, 6) if codes == "dense" and tokens <= FEW_TOKENS else (64, 3)
    shared = {"TOP_K": slots, "M": size, "R": rows, "DIRECT": groups is None, "ASM": asm, "num_warps": 4}
    shared["num_stages"] = stages
    half = n_tiles * 64 // (2 * rows)
    h = torch.empty(ids.numel(), half * rows, dtype=x.dtype, device=x.device)
    launch(
        gate_up_kernel, (blocks, half), x, packed, scales, experts.gate_up_bias, *where, h, hidden, groups_n,
        spec.alpha, spec.clamp or 0.0, K_TILES=k_tiles, HALF_TILES=half, GROUP=group,
        HAS_BIAS=experts.gate_up_bias is not None, CLAMPED=spec.clamp is not None, CODES=codes, **shared,
    )  # fmt: skip
    packed, scales, n_tiles, k_tiles, group, groups_n, codes = _operands(experts.down)
    y = torch.empty(slots, tokens, hidden, dtype=out_dtype, device=x.device)
    n_tiles = n_tiles * 64 // rows
    launch(
        down_kernel, (blocks, n_tiles), h, packed, scales, experts.down_bias, *where, weights, y, tokens, hidden,
        groups_n, K_TILES=k_tiles, N_TILES=n_tiles, GROUP=group, HAS_BIAS=experts.down_bias is not None, CODES=codes,
        **shared,
    )  # fmt: skip
    return y


def _sum_slots(y: Tensor) -> Tensor:
    """[slots, T, H] -> [T, H], summed in float32 and rounded once."""
    from engine.kernels.moe_prompt_triton import sum_slots_kernel

    out = torch.empty(y.shape[1:], dtype=y.dtype, device=y.device)
    grid = (-(-out.numel() // 1024),)
    launch(sum_slots_kernel, grid, y, out, out.numel(), SLOTS=y.shape[0], BLOCK=1024, num_warps=4)
    return out


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


def _clamped(gate: Tensor, up: Tensor, spec: MoeFfn) -> Tensor:
    gate = gate.clamp(max=spec.clamp)
    up = up.clamp(-spec.clamp, spec.clamp)
    return (up + 1) * gate * torch.sigmoid(spec.alpha * gate)
