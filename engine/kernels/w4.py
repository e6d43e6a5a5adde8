"""The 4-bit product: `fused` (unpacked and multiplied in one pass) and `standard` (one request, or unpack then cuBLAS).

Both read the one stored form of engine/quant.py. Which kernel runs, and in which shape, is a plan: a pure function of
the weight's shape, the number of rows and the GPU, so that a captured graph and a repeated run do the same work in the
same order. Bytes moved by a fused product: the packed weight once, x once for every split, out once (and, with splits,
the float32 parts written and read once).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from engine.quant import QuantWeight, dequantize

FUSED_ROWS = 512
"""Most rows that the fused product serves; beyond it unpacking once and multiplying with cuBLAS is faster."""

ONE_BY_ONE_ROWS = 5
"""Most rows for which `standard` runs its one-request kernel once a row (measured on an H200: 35 us a row against
207 us for unpacking 34816 x 5120 and multiplying 8 rows with cuBLAS)."""


@dataclass(frozen=True)
class Plan:
    """How one product is launched.

    kind: "stream" (up to 16 rows: x stays in shared memory, weights stream by), "tile" (x and weights by stages).
    block: outputs of a program (64, 128, 256). splits: slices of K. steps: outputs blocks a stream program walks over.
    rows: rows of a program. parts: another kernel adds the splits; else the last program to arrive does.
    """

    kind: str
    rows: int
    block: int
    splits: int
    stages: int
    warps: int = 4
    steps: int = 1
    parts: bool = True


def _bucket(rows: int) -> int:
    return max(8, 1 << (rows - 1).bit_length())


@lru_cache(maxsize=4)
def _tuned(gpu: str) -> dict[str, Plan]:
    path = Path(__file__).parent / "tuned" / f"{gpu.replace(' ', '_')}.json"
    if not path.exists():
        return {}
    return {key: Plan(**values) for key, values in json.loads(path.read_text())["w4"].items()}


@lru_cache(maxsize=4096)
def plan(n_tiles: int, k_tiles: int, group_tiles: int, rows: int, gpu: str, processors: int) -> Plan:
    """The plan for a weight of n_tiles x k_tiles tiles and a bucket of rows (8, 16, 32 ... 256).

    Shapes that were tuned for this GPU come from tuned/<GPU>.json, the rest from the rules below, which are what the
    tuned shapes have in common.
    """
    tuned = _tuned(gpu).get(f"{n_tiles}x{k_tiles}x{group_tiles}:{rows}")
    if tuned is not None:
        return tuned
    groups = k_tiles // group_tiles
    if rows <= 16:
        return _stream_plan(n_tiles, groups, group_tiles, rows, processors)
    return _tile_plan(n_tiles, groups, rows, processors)


def _stream_plan(n_tiles: int, groups: int, group_tiles: int, rows: int, processors: int) -> Plan:
    """About 3 programs a processor, each walking over whole blocks, with slices of K no longer than 10 groups."""
    block = 128 if n_tiles % 2 == 0 else 64
    blocks = n_tiles * 64 // block
    best, best_cost = None, float("inf")
    for splits in range(1, min(groups, 24) + 1):
        per_slice = -(-groups // splits)
        if (splits - 1) * per_slice >= groups or per_slice * group_tiles * rows * 128 > 64 * 1024:
            continue
        for steps in range(1, 13):
            programs = -(-blocks // steps) * splits
            waves = -(-programs // (3 * processors))
            work = waves * 3 * processors * steps * per_slice / (blocks * groups)
            cost = work + 0.02 * rows * splits / groups + 2.0 * waves / (steps * per_slice * waves + 8)
            if programs >= processors and cost < best_cost:
                best, best_cost = Plan("stream", rows, block, splits, 3, steps=steps), cost
    return best or Plan("stream", rows, 64, max(1, min(groups, -(-groups * group_tiles * rows // 512))), 3)


def _tile_plan(n_tiles: int, groups: int, rows: int, processors: int) -> Plan:
    """Blocks of 64 outputs, with as many splits as fill two programs a processor."""
    program_rows = min(rows, 128)
    programs = n_tiles * (rows // program_rows)
    splits = max(1, min(8, groups // 4, round(2 * processors / programs)))
    return Plan("tile", program_rows, 64, splits, 3 if rows >= 128 else 4)


def _gpu(device: torch.device) -> tuple[str, int, tuple[int, int]]:
    return _gpu_by_index(device.index if device.index is not None else torch.cuda.current_device())


@lru_cache(maxsize=16)
def _gpu_by_index(index: int) -> tuple[str, int, tuple[int, int]]:
    properties = torch.cuda.get_device_properties(index)
    return properties.name, properties.multi_processor_count, (properties.major, properties.minor)


_arrived: dict[tuple[int, int], Tensor] = {}


def _counters(device: torch.device) -> Tensor:
    """The arrival counters of a stream: all zero between launches."""
    key = (device.index or 0, torch.cuda.current_stream(device).cuda_stream)
    if key not in _arrived:
        _arrived[key] = torch.zeros(1 << 16, dtype=torch.int32, device=device)
    return _arrived[key]


def w4_matmul(x: Tensor, w: QuantWeight) -> Tensor:
    """x [T, K] times w [N, K] transposed -> [T, N] in x's dtype, fused."""
    if not x.is_cuda:
        return w4_matmul_reference(x, w)
    y = w4_partials(x, w)
    return y if y.dim() == 2 else sum_partials(y, x.dtype)


def w4_matmul_reference(x: Tensor, w: QuantWeight) -> Tensor:
    """The oracle: the product in float32 with the dequantized weight, rounded once to x's dtype."""
    return (x.float() @ dequantize(w).T).to(x.dtype)


def w4_partials(x: Tensor, w: QuantWeight) -> Tensor:
    """As w4_matmul, but possibly unfinished: float32 [S, T, N] whose sum over S it is."""
    if not x.is_cuda:
        return w4_matmul_reference(x, w)
    if x.shape[0] > FUSED_ROWS:
        return x @ w4_dequantize(w, x.dtype).T
    gpu, processors, _ = _gpu(x.device)
    x = x if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 else x.contiguous()
    if not _streams(x, w):
        return _plain_partials(x, w, processors)
    chosen = plan(w.n_tiles, w.k_tiles, w.group // 64, _bucket(x.shape[0]), gpu, processors)
    y = _stream(x, w, chosen) if chosen.kind == "stream" else _tile(x, w, chosen)
    return y if w.zeros is None else _add_zero_points(y, x, w)


def _streams(x: Tensor, w: QuantWeight) -> bool:
    """Whether the Hopper kernels take this product."""
    hopper = _gpu(x.device)[2][0] == 9
    whole = w.k_tiles * 64 % w.group == 0
    return hopper and x.dtype == torch.bfloat16 and w.group in (64, 128) and w.k % 8 == 0 and whole


def _add_zero_points(y: Tensor, x: Tensor, w: QuantWeight) -> Tensor:
    """The kernels take 8 off every code; what a zero point differs from 8 goes on through the sums of the groups."""
    groups = -(-w.k // w.group)
    padded = torch.nn.functional.pad(x.float(), (0, groups * w.group - w.k))
    sums = padded.reshape(x.shape[0], groups, w.group).sum(2)
    scales, zeros = (v.float().transpose(1, 2).reshape(w.n_tiles * 64, -1)[: w.n, :groups] for v in (w.scales, w.zeros))
    correction = sums @ ((8.0 - zeros) * scales).T
    if y.dim() == 3:
        y[0] += correction
        return y
    return (y.float() + correction).to(y.dtype)


def _outputs(x: Tensor, w: QuantWeight, splits: int, parts: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(what is returned, out, parts) of a launch."""
    rows = x.shape[0]
    if splits == 1:
        out = torch.empty(rows, w.n, dtype=x.dtype, device=x.device)
        return out, out, out
    partial = torch.empty(splits, rows, w.n, dtype=torch.float32, device=x.device)
    if parts:
        return partial, partial, partial
    out = torch.empty(rows, w.n, dtype=x.dtype, device=x.device)
    return out, out, partial


def _stream(x: Tensor, w: QuantWeight, p: Plan) -> Tensor:
    from engine.kernels.w4_gluon import w4_stream_kernel

    group_tiles = w.group // 64
    slice_tiles = -(-(w.k_tiles // group_tiles) // p.splits) * group_tiles
    blocks = -(-w.n_tiles * 64 // p.block)
    result, out, partial = _outputs(x, w, p.splits, p.parts)
    w4_stream_kernel[(-(-blocks // p.steps) * p.splits,)](
        x, w.packed.view(torch.int32), w.scales, out, partial, _counters(x.device),
        x.shape[0], w.n, w.k, x.stride(0), blocks, w.k_tiles, slice_tiles, p.splits,
        M=p.rows, BN=p.block, SLICE=-(-slice_tiles // 4) * 4, GROUP_TILES=group_tiles, STAGES=p.stages,
        PARTS=p.parts and p.splits > 1, PDL=True, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return result


def _tile(x: Tensor, w: QuantWeight, p: Plan) -> Tensor:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from engine.kernels.w4_gluon import w4_tile_kernel

    group_tiles = w.group // 64
    slice_tiles = -(-(w.k_tiles // group_tiles) // p.splits) * group_tiles
    result, out, partial = _outputs(x, w, p.splits, p.parts)
    w4_tile_kernel[(-(-x.shape[0] // p.rows), -(-w.n_tiles * 64 // p.block), p.splits)](
        TensorDescriptor(x, list(x.shape), list(x.stride()), [p.rows, 64], NVMMASharedLayout(128, 16, 2)),
        w.packed.view(torch.int32), w.scales, out, partial, _counters(x.device),
        x.shape[0], w.n, w.n_tiles, w.k_tiles, slice_tiles,
        M=p.rows, BN=p.block, WARPS=p.warps, GROUP_TILES=group_tiles, STAGES=p.stages,
        PARTS=p.parts and p.splits > 1, PDL=True, num_warps=p.warps, launch_pdl=True,
    )  # fmt: skip
    return result


def _plain_partials(x: Tensor, w: QuantWeight, processors: int) -> Tensor:
    """The twin in plain Triton: other GPUs, other dtypes, groups of 32."""
    from engine.kernels.w4_triton import w4_dot_kernel

    m = min(64, max(16, _bucket(x.shape[0])))
    row_blocks = -(-x.shape[0] // m)
    splits = max(1, min(16, w.k_tiles // 4, 4 * processors // (w.n_tiles * row_blocks)))
    slice_tiles = -(-w.k_tiles // splits)
    partial = torch.empty(-(-w.k_tiles // slice_tiles), x.shape[0], w.n, dtype=torch.float32, device=x.device)
    w4_dot_kernel[(w.n_tiles, row_blocks, partial.shape[0])](
        x, w.packed, w.scales, w.zeros, partial, x.shape[0], w.n, w.k, x.stride(0), w.k_tiles, slice_tiles,
        HAS_ZEROS=w.zeros is not None, GROUP=w.group, M=m, num_warps=4,
    )  # fmt: skip
    return partial


def sum_partials(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """[S, T, N] float32 -> [T, N] in dtype, added in the order of S."""
    if not partials.is_cuda:
        return partials.sum(0).to(dtype)
    from engine.kernels.w4_triton import sum_partials_kernel

    splits, rows, n = partials.shape
    out = torch.empty(rows, n, dtype=dtype, device=partials.device)
    pdl = _gpu(partials.device)[2][0] >= 9
    sum_partials_kernel[(-(-out.numel() // 512),)](
        partials, out, out.numel(), SPLITS=splits, BLOCK=512, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return out


def w4_dequantize(w: QuantWeight, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """The weight unpacked, [n, k] in dtype."""
    if not w.packed.is_cuda:
        return dequantize(w, dtype)
    from engine.kernels.w4_triton import w4_dequantize_kernel

    out = torch.empty(w.n, w.k, dtype=dtype, device=w.packed.device) if out is None else out
    w4_dequantize_kernel[(w.k_tiles, w.n_tiles)](
        w.packed, w.scales, w.zeros, out, w.n, w.k, w.k_tiles, 0, HAS_ZEROS=w.zeros is not None, GROUP=w.group
    )
    return out


def w4_standard(x: Tensor, w: QuantWeight) -> Tensor:
    """The product as a server for one request at a time would have it: [T, K] x [N, K] -> [T, N].

    The kernel for one request, once a row, for the fewest rows; else the weight unpacked and multiplied with cuBLAS,
    whichever is faster. On Hopper the kernel for one request is the streaming one at one row (1.3 to 1.6 times as
    fast as PyTorch's own int4 product on an H200), elsewhere a matrix-vector product.
    """
    if not x.is_cuda:
        return x @ dequantize(w, x.dtype).T
    if x.shape[0] > ONE_BY_ONE_ROWS:
        return x @ w4_dequantize(w, x.dtype).T
    if _streams(x, w):
        return torch.cat([w4_matmul(row, w) for row in x.split(1)]) if x.shape[0] > 1 else w4_matmul(x, w)
    return _matrix_vector(x, w)


def _matrix_vector(x: Tensor, w: QuantWeight) -> Tensor:
    from engine.kernels.w4_triton import w4_gemv_kernel

    x = x.contiguous()
    processors = _gpu(x.device)[1]
    splits = max(1, min(16, w.k_tiles // 8, 8 * processors // w.n_tiles))
    slice_tiles = -(-w.k_tiles // splits)
    partial = torch.empty(-(-w.k_tiles // slice_tiles), x.shape[0], w.n, dtype=torch.float32, device=x.device)
    w4_gemv_kernel[(w.n_tiles, partial.shape[0], x.shape[0])](
        x, w.packed, w.scales, w.zeros, partial, x.shape[0], w.n, w.k, w.k_tiles, slice_tiles,
        HAS_ZEROS=w.zeros is not None, GROUP=w.group, num_warps=4,
    )  # fmt: skip
    return sum_partials(partial, x.dtype)
