"""The canonical 4-bit form: packing, unpacking and the reference dequantization (torch only: the oracle).

A weight [N, K] is stored as 4-bit codes 0..15 with one scale (and, for asymmetric checkpoints, one zero point) for
every `group` consecutive inputs of an output row: w = (code - zero) * scale, zero = 8 when there are no zero points.

Bytes are stored in the order in which the matrix instructions of NVIDIA GPUs want them, so that every thread of a
kernel reads 16 consecutive bytes straight into registers. N is padded to tiles of 64 rows and K to tiles of 64
inputs; tile (n, k) is 2,048 contiguous bytes at ((n * K_TILES + k) * 2048). Within a tile a byte holds two inputs of
one row: column j of its 32 byte columns has input j in the low and input j + 32 in the high nibble. Byte (row r,
column j) stands at

    thread * 16 + block * 8 + half * 4 + pair * 2 + row_half,
    thread = warp * 32 + lane_row * 4 + quad,
    r = 16 * warp + 8 * row_half + lane_row,    j = 16 * block + 8 * half + 2 * quad + pair,

which is the A fragment of mma.m16n8k16 (and of wgmma with A in registers) with its two middle bytes exchanged: then
`word & 0x000F000F` is a register of two consecutive inputs and no byte permutation is needed.

Scales and zeros: [N_TILES, K / group, 64] (rows of a tile consecutive); rows of padding have scale 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

TILE_N = 64
TILE_K = 64
TILE_BYTES = TILE_N * TILE_K // 2


def group_for(k: int) -> int:
    """The group of a matrix with K inputs: 128, or 64 or 32 where 128 does not divide it."""
    for group in (128, 64, 32):
        if k % group == 0:
            return group
    return 32


@dataclass(frozen=True)
class QuantWeight:
    """A weight [n, k] in the canonical form (see the module's text).

    packed uint8 [n_tiles, k_tiles, 2048]; scales [n_tiles, groups, 64] in bf16, fp16 or fp32; zeros the same shape
    and dtype, or None for symmetric weights (zero point 8).
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    n: int
    k: int
    group: int

    @property
    def n_tiles(self) -> int:
        return self.packed.shape[0]

    @property
    def k_tiles(self) -> int:
        return self.packed.shape[1]

    @cached_property
    def nbytes(self) -> int:
        """Bytes that one product must read."""
        tensors = [self.packed, self.scales] + ([] if self.zeros is None else [self.zeros])
        return sum(t.numel() * t.element_size() for t in tensors)

    def to(self, device: str | torch.device) -> QuantWeight:
        zeros = None if self.zeros is None else self.zeros.to(device)
        return QuantWeight(self.packed.to(device), self.scales.to(device), zeros, self.n, self.k, self.group)


@lru_cache(maxsize=8)
def _tile_order(device: torch.device) -> Tensor:
    """[2048] int64: position p of a stored tile holds byte (row, column) = divmod(order[p], 32)."""
    axes = torch.arange(TILE_BYTES, device=device).reshape(4, 8, 4, 2, 2, 2, 2)
    warp, lane_row, quad, block, half, pair, row_half = torch.meshgrid(
        *(torch.arange(n, device=device) for n in axes.shape), indexing="ij"
    )
    row = 16 * warp + 8 * row_half + lane_row
    column = 16 * block + 8 * half + 2 * quad + pair
    return (row * 32 + column).reshape(-1)


def pack(codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int) -> QuantWeight:
    """Packs codes [N, K] (0..15, any integer dtype), scales and zeros [N, ceil(K / group)] into the canonical form."""
    n, k = codes.shape
    n_tiles, k_tiles = -(-n // TILE_N), -(-k // TILE_K)
    groups = max(-(-k_tiles * TILE_K // group), 1)
    full = codes.new_zeros((n_tiles * TILE_N, k_tiles * TILE_K), dtype=torch.uint8)
    full[:n, :k] = codes.to(torch.uint8)
    tiles = full.reshape(n_tiles, TILE_N, k_tiles, 2, TILE_K // 2).permute(0, 2, 1, 3, 4)
    tile_bytes = (tiles[:, :, :, 0] | (tiles[:, :, :, 1] << 4)).reshape(n_tiles, k_tiles, TILE_BYTES)
    packed = tile_bytes[:, :, _tile_order(codes.device)].contiguous()
    return QuantWeight(
        packed, _tile_vectors(scales, n_tiles, groups), _tile_vectors(zeros, n_tiles, groups), n, k, group
    )


def _tile_vectors(values: Tensor | None, n_tiles: int, groups: int) -> Tensor | None:
    """[N, groups] -> [n_tiles, groups, 64], padded with zeros."""
    if values is None:
        return None
    full = values.new_zeros((n_tiles * TILE_N, groups))
    full[: values.shape[0], : values.shape[1]] = values
    return full.reshape(n_tiles, TILE_N, groups).transpose(1, 2).contiguous()


def unpack(weight: QuantWeight) -> Tensor:
    """The codes of a packed weight, uint8 [n, k]."""
    order = _tile_order(weight.packed.device)
    tile_bytes = torch.empty_like(weight.packed)
    tile_bytes[:, :, order] = weight.packed
    tile_bytes = tile_bytes.reshape(weight.n_tiles, weight.k_tiles, TILE_N, TILE_K // 2)
    codes = torch.cat([tile_bytes & 15, tile_bytes >> 4], dim=-1)
    codes = codes.permute(0, 2, 1, 3).reshape(weight.n_tiles * TILE_N, weight.k_tiles * TILE_K)
    return codes[: weight.n, : weight.k]


def expand_groups(values: Tensor, weight: QuantWeight) -> Tensor:
    """Scales or zeros [n_tiles, groups, 64] spread over the inputs: [n, k]."""
    rows = values.transpose(1, 2).reshape(weight.n_tiles * TILE_N, -1)
    return rows.repeat_interleave(weight.group, dim=1)[: weight.n, : weight.k]


def dequantize(weight: QuantWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The reference dequantization, [n, k]: (code - zero) * scale in float32, rounded once to dtype."""
    codes = unpack(weight).float()
    zero = 8.0 if weight.zeros is None else expand_groups(weight.zeros.float(), weight)
    return ((codes - zero) * expand_groups(weight.scales.float(), weight)).to(dtype)


def quantize(w: Tensor, group: int | None = None, scale_dtype: torch.dtype = torch.bfloat16) -> QuantWeight:
    """Symmetric round-to-nearest quantization of w [N, K] (any float dtype) to the canonical form.

    scale = max|w| of the group / 8 with the sign that puts the largest value on code 0, rounded to scale_dtype before
    the codes are taken, so that a code never pays for the scale's rounding.
    """
    n, k = w.shape
    group = group or group_for(k)
    groups = -(-k // group)
    padded = torch.nn.functional.pad(w.float(), (0, groups * group - k)).reshape(n, groups, group)
    extreme = padded.gather(2, padded.abs().argmax(dim=2, keepdim=True))
    scales = (extreme / -8.0).to(scale_dtype)
    divisor = torch.where(scales == 0, torch.ones_like(scales), scales).float()
    codes = torch.clamp(torch.round(padded / divisor) + 8, 0, 15).to(torch.uint8)
    return pack(codes.reshape(n, groups * group)[:, :k], scales.squeeze(2), None, group)


# ---------------------------------------------------------------------------------------------- experts

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class QuantExperts:
    """The same matrix of E experts, one after the other in the canonical form.

    packed uint8 [E, n_tiles, k_tiles, 2048]; scales [E, n_tiles, groups, 64]. `codes`:
    "int4": w = (code - 8) * scale, scales in bf16, fp16 or fp32;
    "mxfp4": w = e2m1(code) * 2^(scale - 127), scales uint8 (e8m0), group 32 (OCP Microscaling Formats 1.0).
    """

    packed: Tensor
    scales: Tensor
    n: int
    k: int
    group: int
    codes: str = "int4"

    @property
    def count(self) -> int:
        return self.packed.shape[0]

    @property
    def n_tiles(self) -> int:
        return self.packed.shape[1]

    @property
    def k_tiles(self) -> int:
        return self.packed.shape[2]

    @property
    def expert_nbytes(self) -> int:
        """Bytes of one expert."""
        total = self.packed.numel() + self.scales.numel() * self.scales.element_size()
        return total // self.count

    @property
    def nbytes(self) -> int:
        return self.expert_nbytes * self.count

    def to(self, device: str | torch.device) -> QuantExperts:
        return QuantExperts(self.packed.to(device), self.scales.to(device), self.n, self.k, self.group, self.codes)

    def expert(self, index: int) -> QuantWeight:
        """One expert's codes and scales, sharing this memory (for mxfp4 only `unpack` of it has a meaning)."""
        return QuantWeight(self.packed[index], self.scales[index], None, self.n, self.k, self.group)


def permute_rows(weight: QuantWeight, order: Tensor) -> QuantWeight:
    """The weight whose row i is row order[i] of `weight`; order int64 [n]."""

    def rows(values: Tensor) -> Tensor:
        return values.transpose(1, 2).reshape(weight.n_tiles * TILE_N, -1)[order]

    zeros = None if weight.zeros is None else rows(weight.zeros)
    return pack(unpack(weight)[order], rows(weight.scales), zeros, weight.group)


def pad_tiles(weight: QuantWeight, n_tiles: int, k_tiles: int) -> QuantWeight:
    """The weight with tiles of zeros added until it has n_tiles x k_tiles of them; n and k count them all."""
    groups = -(-k_tiles * TILE_K // weight.group)
    packed = weight.packed.new_zeros((n_tiles, k_tiles, TILE_BYTES))
    packed[: weight.n_tiles, : weight.k_tiles] = weight.packed
    scales = weight.scales.new_zeros((n_tiles, groups, TILE_N))
    scales[: weight.n_tiles, : weight.scales.shape[1]] = weight.scales
    return QuantWeight(packed, scales, None, n_tiles * TILE_N, k_tiles * TILE_K, weight.group)


def stack_experts(weights: list[QuantWeight], codes: str = "int4") -> QuantExperts:
    """Stacks equally shaped symmetric weights; raises ValueError where they differ or have zero points."""
    first = weights[0]
    for w in weights:
        if w.zeros is not None or (w.n, w.k, w.group) != (first.n, first.k, first.group):
            raise ValueError("stacked experts must be symmetric and of one shape and group")
    packed = torch.stack([w.packed for w in weights])
    return QuantExperts(packed, torch.stack([w.scales for w in weights]), first.n, first.k, first.group, codes)


def dequantize_expert(experts: QuantExperts, index: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The reference dequantization of one expert, [n, k]: float32 arithmetic, rounded once to dtype."""
    weight = experts.expert(index)
    if experts.codes == "int4":
        return dequantize(weight, dtype)
    codes = unpack(weight).long()
    table = torch.tensor(E2M1 + tuple(-v for v in E2M1), device=codes.device)
    exponents = expand_groups(weight.scales.float(), weight) - 127
    return (table[codes] * torch.exp2(exponents)).to(dtype)


def pack_mxfp4(blocks: Tensor, scales: Tensor) -> QuantWeight:
    """Published MXFP4 of one matrix into the canonical form, exactly.

    blocks uint8 [N, K / 32, 16]: two e2m1 codes a byte, the even input in the low nibble; scales uint8 [N, K / 32].
    """
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).reshape(blocks.shape[0], -1)
    return pack(codes, scales, None, 32)
