"""The experts of one layer, read from any weight source into stacked form (see engine/kernels/moe.py).

Checkpoints hold them expert by expert (`experts.3.gate_proj`), stacked (`experts.gate_up_proj` [E, 2I, H]), stacked,
transposed and with gate and up interleaved (gpt-oss), or so in MXFP4 (`experts.gate_up_proj_blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import EngineError, MoeFfn
from engine.kernels.moe import ExpertWeights
from engine.quant import TILE_K, TILE_N, QuantWeight, pack_mxfp4, pad_tiles, quantize, stack_experts
from engine.weights import DTYPES, WeightSource, kept_in_16bit
from engine.weights.synthetic import SyntheticSource

Matrix = QuantWeight | Tensor


@dataclass(frozen=True)
class ExpertTensors:
    """gate_up [E, 2 * I, H] and down [E, H, I], I padded to a multiple of 64; `shared` (gate, up, down) stands apart
    where its form differs from that of the experts, else it is the last expert, or there is none."""

    gate_up: ExpertWeights
    down: ExpertWeights
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    shared: list[Matrix] | None


def read_experts(source: WeightSource, module: str, spec: MoeFfn, hidden: int) -> ExpertTensors:
    """Everything below `module` (`model.layers.0.mlp`) but the router and the shared expert's gate."""
    if isinstance(source, SyntheticSource):
        return _synthetic(source, module, spec, hidden)
    if source.has(f"{module}.experts.0.gate_proj"):
        rows = [_one_by_one(source, f"{module}.experts.{i}", hidden, spec.intermediate) for i in range(spec.experts)]
    elif source.has(f"{module}.experts.gate_up_proj_blocks"):
        rows = _mxfp4(source, module, spec, hidden)
    else:
        rows = _stacked(source, module, spec, hidden)
    shared = _one_by_one(source, f"{module}.shared_expert", hidden, spec.shared) if spec.shared else None
    if shared is not None and _same_form(shared, rows[0]):
        rows, shared = [*rows, shared], None
    width = _padded(max(spec.intermediate, spec.shared))
    try:
        gate_up = _stack([_merge(gate, up, width) for gate, up, _ in rows])
        down = _stack([_pad(down, hidden, width) for _, _, down in rows])
    except ValueError as error:
        raise EngineError(f"{module}.experts: {error}") from error
    return ExpertTensors(gate_up, down, *_biases(source, module, spec, hidden, width), shared)


def _padded(width: int) -> int:
    return -(-width // TILE_N) * TILE_N


def _same_form(matrices: list[Matrix], others: list[Matrix]) -> bool:
    def form(m: Matrix) -> tuple:
        return (m.dtype,) if isinstance(m, Tensor) else (m.scales.dtype, m.group, m.zeros is None)

    return all(form(a) == form(b) for a, b in zip(matrices, others, strict=True))


def _stack(weights: list[Matrix]) -> ExpertWeights:
    if isinstance(weights[0], Tensor):
        return torch.stack(weights)
    return stack_experts(weights, "mxfp4" if weights[0].scales.dtype == torch.uint8 else "int4")


def _pad(weight: Matrix, n: int, k: int) -> Matrix:
    """The matrix with zeros added until it is [n, k]."""
    if isinstance(weight, Tensor):
        return F.pad(weight, (0, k - weight.shape[1], 0, n - weight.shape[0]))
    if weight.zeros is not None:
        raise ValueError("4-bit experts with zero points are not supported: take a symmetric checkpoint")
    return replace(pad_tiles(weight, -(-n // TILE_N), -(-k // TILE_K)), n=n, k=k)


def _merge(gate: Matrix, up: Matrix, width: int) -> Matrix:
    """gate over up, each padded to `width` rows (whole tiles)."""
    if isinstance(gate, Tensor):
        return torch.cat([_pad(part, width, part.shape[1]) for part in (gate, up)])
    gate, up = (_pad(part, width, part.k) for part in (gate, up))
    packed, scales = torch.cat([gate.packed, up.packed]), torch.cat([gate.scales, up.scales])
    return QuantWeight(packed, scales, None, 2 * width, gate.k, gate.group)


def _one_by_one(source: WeightSource, expert: str, hidden: int, inner: int) -> list[Matrix]:
    return [
        source.linear([f"{expert}.gate_proj"], [inner], hidden),
        source.linear([f"{expert}.up_proj"], [inner], hidden),
        source.linear([f"{expert}.down_proj"], [hidden], inner),
    ]


def _stacked(source: WeightSource, module: str, spec: MoeFfn, hidden: int) -> list[list[Matrix]]:
    inner, experts, turned = spec.intermediate, spec.experts, spec.interleaved_gate_up
    shape = (experts, hidden, 2 * inner) if turned else (experts, 2 * inner, hidden)
    int4 = source.weights_dtype == "int4" and not kept_in_16bit(source.config, f"{module}.experts")
    dtype = DTYPES.get(source.weights_dtype)
    gate_up = source.tensor(f"{module}.experts.gate_up_proj", shape, dtype)
    down = source.tensor(
        f"{module}.experts.down_proj", (experts, inner, hidden) if turned else (experts, hidden, inner)
    )
    if turned:
        gate_up, down = gate_up.mT, down.mT
    rows = []
    for i in range(experts):
        gate, up = (gate_up[i, 0::2], gate_up[i, 1::2]) if turned else gate_up[i].chunk(2)
        matrices = [gate, up, down[i]]
        rows.append([quantize(m) for m in matrices] if int4 else matrices)
    return rows


def _mxfp4(source: WeightSource, module: str, spec: MoeFfn, hidden: int) -> list[list[Matrix]]:
    inner, experts = spec.intermediate, spec.experts
    parts = {}
    for name, n, k in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        blocks = source.tensor(f"{module}.experts.{name}_blocks", (experts, n, k // 32, 16), torch.uint8)
        scales = source.tensor(f"{module}.experts.{name}_scales", (experts, n, k // 32), torch.uint8)
        parts[name] = (blocks, scales)
    (gate_up, gate_up_scales), (down, down_scales) = parts["gate_up_proj"], parts["down_proj"]
    return [
        [
            pack_mxfp4(gate_up[i, 0::2], gate_up_scales[i, 0::2]),
            pack_mxfp4(gate_up[i, 1::2], gate_up_scales[i, 1::2]),
            pack_mxfp4(down[i], down_scales[i]),
        ]
        for i in range(experts)
    ]


def _biases(
    source: WeightSource, module: str, spec: MoeFfn, hidden: int, width: int
) -> tuple[Tensor | None, Tensor | None]:
    if not spec.bias:
        return None, None
    inner = spec.intermediate
    both = source.tensor(f"{module}.experts.gate_up_proj_bias", (spec.experts, 2 * inner))
    gate, up = (both[:, 0::2], both[:, 1::2]) if spec.interleaved_gate_up else both.chunk(2, dim=1)
    gate_up = torch.cat([F.pad(part, (0, width - inner)) for part in (gate, up)], dim=1)
    return gate_up, source.tensor(f"{module}.experts.down_proj_bias", (spec.experts, hidden))


def _synthetic(source: SyntheticSource, module: str, spec: MoeFfn, hidden: int) -> ExpertTensors:
    """All experts at once in their stored form; what pads the width is made up like the rest."""
    apart = spec.shared > 0 and kept_in_16bit(source.config, f"{module}.shared_expert")
    shared = _one_by_one(source, f"{module}.shared_expert", hidden, spec.shared) if apart else None
    count = spec.experts + (spec.shared > 0 and not apart)
    width = _padded(max(spec.intermediate, spec.shared))
    gate_up = source.experts(f"{module}.experts.gate_up_proj", count, 2 * width, hidden, spec.codes)
    down = source.experts(f"{module}.experts.down_proj", count, hidden, width, spec.codes)
    return ExpertTensors(gate_up, down, *_biases(source, module, spec, hidden, width), shared)
