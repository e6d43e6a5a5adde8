"""The 4-bit product: `fused` (unpacked and multiplied in one pass) and `standard` (one request, or unpack then cuBLAS).

Both read the one stored form of engine/quant.py. Which kernel runs, and in which shape, is a plan: a pure function of
the weight's shape, the number of rows and the GPU, so that a captured graph and a repeated run do the same work in the
same order. Bytes moved by a fused product: the packed weight once, x once for every split, out once (and, with splits,
the float32 parts written and read once).
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from engine.kernels._launch import capability, launch, multiprocessors
from engine.quant import QuantWeight, dequantize

FUSED_ROWS = 512
"""Most rows that the fused product serves; beyond it unpacking once and multiplying with cuBLAS is faster."""

SHARED_BYTES, REGISTERS = 233_472, 65_536
"""What a multiprocessor of compute capability 9.0 has (CUDA programming guide, table of technical specifications)."""

ONE_BY_ONE_ROWS = 5
"""Most rows for which `standard` runs its one-request kernel once a row (measured on an H200: 35 us a row against
207 us for unpacking 34816 x 5120 and multiplying 8 rows with cuBLAS)."""


@dataclass(frozen=True)
class Plan:
    """How one product is launched.

    kind: "stream" (w4_stream.py, up to 16 rows) or "tile" (w4_tile.py). rows: of a program. block: outputs of a program
    (64 or 128). splits: slices of K, none empty. stages: depth of the ring. programs: how many share the work of a
    slice, 0 for one a block. parts: every program has whole blocks and another kernel adds the slices; else all have
    equal shares, which may begin and end inside a block, and the last program to arrive at a block adds.
    """

    kind: str
    rows: int
    block: int
    splits: int
    stages: int
    warps: int = 4
    programs: int = 0
    parts: bool = True

    def slice_tiles(self, k_tiles: int, group_tiles: int) -> int:
        """Tiles of 64 inputs in a slice of K; the last slice may have fewer."""
        return -(-(k_tiles // group_tiles) // self.splits) * group_tiles

    @property
    def hands_over(self) -> bool:
        """Whether the result is parts that another kernel adds."""
        return self.parts and self.splits > 1

    def programs_of(self, n_tiles: int, k_tiles: int, group_tiles: int) -> int:
        """Programs of a slice of K for a row block; none has nothing to do."""
        blocks = -(-n_tiles * 64 // self.block)
        wanted = self.programs or blocks
        shortest = k_tiles - (self.splits - 1) * self.slice_tiles(k_tiles, group_tiles)
        return min(wanted, blocks if self.hands_over else blocks * shortest // group_tiles)

    def slots(self, n_tiles: int, k_tiles: int, group_tiles: int) -> int:
        """Most parts of a block's sum: an equal share of a slice may begin and end inside the block."""
        blocks, programs = -(-n_tiles * 64 // self.block), self.programs_of(n_tiles, k_tiles, group_tiles)
        whole_blocks = self.hands_over or blocks % programs == 0
        return self.splits * (1 if whole_blocks else -(-programs // blocks) + 1)

    def shared_bytes(self, k_tiles: int, group_tiles: int) -> int:
        """Shared memory that a program's rings and its x take, in bytes (scales of 2 bytes, barriers aside)."""
        ring = self.stages * self.block * (32 * group_tiles + 2)
        if self.kind == "tile":
            return ring + self.stages * group_tiles * self.rows * 128
        return ring + _slice_room(self.slice_tiles(k_tiles, group_tiles)) * self.rows * 128

    def registers(self, k_tiles: int, group_tiles: int) -> int:
        """Registers that a thread may take without fewer programs fitting a processor than shared memory holds.

        Beside `shared_bytes` a program takes a float32 block to turn its result round, and 1 KB for the driver.
        """
        taken = self.shared_bytes(k_tiles, group_tiles) + self.rows * self.block * 4 + 1024
        resident = max(1, min(4, SHARED_BYTES // taken))
        return min(255, REGISTERS // (resident * 32 * self.warps) // 8 * 8)


def _slice_room(slice_tiles: int) -> int:
    """Slices share compiled kernels in steps of 4 tiles."""
    return -(-slice_tiles // 4) * 4


def row_bucket(rows: int) -> int:
    """Plans are made for 8, 16, 32 ... rows: a product of `rows` rows runs the plan of the next of these."""
    return max(8, 1 << (rows - 1).bit_length())


@lru_cache(maxsize=4)
def _tuned(gpu: str) -> dict[str, Plan]:
    path = Path(__file__).parent / "tuned" / f"{gpu.replace(' ', '_')}.json"
    if not path.exists():
        return {}
    return {key: Plan(**values) for key, values in json.loads(path.read_text())["w4"].items()}


@lru_cache(maxsize=4096)
def plan(n_tiles: int, k_tiles: int, group_tiles: int, rows: int, gpu: str, processors: int) -> Plan:
    """The plan for a weight of n_tiles x k_tiles tiles in groups of group_tiles and a bucket of rows (8, 16 ... 256).

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
                best, best_cost = Plan("stream", rows, block, splits, 3, programs=-(-blocks // steps)), cost
    needed = -(-groups * group_tiles * rows // 512)
    return best or Plan("stream", rows, 64, _without_empty(groups, needed), 3)


def _tile_plan(n_tiles: int, groups: int, rows: int, processors: int) -> Plan:
    """Blocks of 64 outputs, with as many splits as fill two programs a processor."""
    program_rows = min(rows, 128)
    programs = n_tiles * (rows // program_rows)
    splits = _without_empty(groups, min(8, groups // 4, round(2 * processors / programs)))
    return Plan("tile", program_rows, 64, splits, 3 if rows >= 128 else 4)


def _without_empty(groups: int, splits: int) -> int:
    """The slices that `groups` groups make when each but the last has ceil(groups / splits) of them."""
    return -(-groups // -(-groups // max(1, min(splits, groups))))


@lru_cache(maxsize=16)
def gpu_name(index: int) -> str:
    """The name of a CUDA device, under which its tuned plans are kept."""
    return torch.cuda.get_device_properties(index).name


class _Counters:
    """Arrival counters of one device, all zero between launches; every launch takes the next ones of a ring.

    Launches share counters only with those a whole ring before them, so products on several streams and graphs that
    are replayed at once do not meet.
    """

    SIZE = 1 << 21

    def __init__(self, device: torch.device) -> None:
        self._ring = torch.zeros(self.SIZE, dtype=torch.int32, device=device)
        self._next = 0
        self._lock = threading.Lock()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def take(self, count: int) -> Tensor:
        count = -(-count // 4) * 4
        with self._lock:
            start = self._next if self._next + count <= self.SIZE else 0
            self._next = start + count
        return self._ring[start:]


@lru_cache(maxsize=16)
def _counters(device: torch.device) -> _Counters:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the first 4-bit product of a GPU cannot be captured in a graph: run it once before")
    return _Counters(device)


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
    """As w4_matmul, but possibly unfinished: float32 [S, T, N] whose sum over S it is.

    Raises ValueError where x does not have K columns. The result for a row depends on the bucket of rows (8, 16, 32
    ...) and on that row alone.
    """
    if x.shape[1] != w.k:
        raise ValueError(f"x has {x.shape[1]} columns, the weight [{w.n}, {w.k}] takes {w.k}")
    if not x.is_cuda:
        return w4_matmul_reference(x, w)
    if x.shape[0] == 0:
        return x.new_empty(0, w.n)
    if x.shape[0] > FUSED_ROWS:
        return x @ w4_dequantize(w, x.dtype).T
    if not _hopper_takes(x, w):
        return plain_partials(x, w)
    shape = w.n_tiles, w.k_tiles, w.group // 64
    y = launch_plan(x, w, plan(*shape, row_bucket(x.shape[0]), gpu_name(x.get_device()), multiprocessors(x)))
    return y if w.zeros is None else _add_zero_points(y, x, w)


def _hopper_takes(x: Tensor, w: QuantWeight) -> bool:
    """Whether the wgmma kernels can: bf16, groups of whole tiles, rows of x that start at multiples of 16 elements.

    Triton 3.6 cannot compile the stream kernel for a K of a single tile.
    """
    whole_groups = w.group in (64, 128) and w.k_tiles % (w.group // 64) == 0 and w.k_tiles > 1
    return capability(x)[0] == 9 and x.dtype == torch.bfloat16 and whole_groups and w.k % 16 == 0 and w.n > 1


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy where TMA and 16-byte cp.async could not read it in place."""
    rows_apart = x.stride(0) % 16 == 0 and x.stride(0) >= x.shape[1]
    if x.stride(1) == 1 and rows_apart and x.data_ptr() % 16 == 0:
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def launch_plan(x: Tensor, w: QuantWeight, p: Plan) -> Tensor:
    """x times the codes less 8, scaled, by a plan, on Hopper: [T, N], or Partials where the plan leaves parts.

    [T, N] is in x's dtype, and in float32 where zero points have yet to be added.
    """
    return (_stream if p.kind == "stream" else _tile)(_aligned(x), w, p)


def _add_zero_points(y: Tensor, x: Tensor, w: QuantWeight) -> Tensor:
    """The kernels take 8 off every code; what a zero point differs from 8 goes on through the sums of the groups.

    y as launch_plan left it, in float32.
    """
    groups = -(-w.k // w.group)
    padded = torch.nn.functional.pad(x.float(), (0, groups * w.group - w.k))
    sums = padded.reshape(x.shape[0], groups, w.group).sum(2)
    scales, zeros = (v.float().transpose(1, 2).reshape(w.n_tiles * 64, -1)[: w.n, :groups] for v in (w.scales, w.zeros))
    correction = sums @ ((8.0 - zeros) * scales).T
    if y.dim() == 3:
        y[0] += correction
        return y
    return (y + correction).to(x.dtype)


def _outputs(x: Tensor, w: QuantWeight, p: Plan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(what is returned, out, parts, counters) of a launch; the last three are stand-ins where the plan has no use."""
    rows, counters = x.shape[0], _counters(x.device)
    slots = p.slots(w.n_tiles, w.k_tiles, w.group // 64)
    if slots > 1:
        partial = torch.empty(slots, rows, w.n, dtype=torch.float32, device=x.device)
        if p.hands_over:
            return partial, partial, partial, counters.take(0)
    out = torch.empty(rows, w.n, dtype=x.dtype if w.zeros is None else torch.float32, device=x.device)
    if slots == 1:
        return out, out, torch.empty(0, dtype=torch.float32, device=x.device), counters.take(0)
    return out, out, partial, counters.take(-(-rows // p.rows) * -(-w.n // p.block))


def _stream(x: Tensor, w: QuantWeight, p: Plan) -> Tensor:
    from engine.kernels.w4_stream import w4_stream_kernel

    group_tiles = w.group // 64
    slice_tiles = p.slice_tiles(w.k_tiles, group_tiles)
    result, out, partial, counters = _outputs(x, w, p)
    launch(
        w4_stream_kernel, (p.programs_of(w.n_tiles, w.k_tiles, group_tiles) * p.splits,),
        x, w.packed.view(torch.int32), w.scales, out, partial, counters,
        x.shape[0], w.n, w.k, x.stride(0), -(-w.n_tiles * 64 // p.block), w.k_tiles, slice_tiles, p.splits,
        M=p.rows, BN=p.block, SLICE=_slice_room(slice_tiles), GROUP_TILES=group_tiles, STAGES=p.stages,
        PARTS=p.hands_over, num_warps=4, maxnreg=p.registers(w.k_tiles, group_tiles),
    )  # fmt: skip
    return result


def _tile(x: Tensor, w: QuantWeight, p: Plan) -> Tensor:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from engine.kernels.w4_tile import w4_tile_kernel

    group_tiles = w.group // 64
    result, out, partial, counters = _outputs(x, w, p)
    launch(
        w4_tile_kernel, (-(-x.shape[0] // p.rows), p.programs_of(w.n_tiles, w.k_tiles, group_tiles), p.splits),
        TensorDescriptor(x, list(x.shape), list(x.stride()), [p.rows, 64], NVMMASharedLayout(128, 16, 2)),
        w.packed.view(torch.int32), w.scales, out, partial, counters, x.shape[0], w.n,
        -(-w.n_tiles * 64 // p.block), w.k_tiles, p.slice_tiles(w.k_tiles, group_tiles),
        M=p.rows, BN=p.block, WARPS=p.warps, GROUP_TILES=group_tiles, STAGES=p.stages,
        PARTS=p.hands_over, num_warps=p.warps, maxnreg=p.registers(w.k_tiles, group_tiles),
    )  # fmt: skip
    return result


def plain_partials(x: Tensor, w: QuantWeight) -> Tensor:
    """The twin in plain Triton, for other GPUs, dtypes and groups: float32 [S, T, N]."""
    from engine.kernels.w4_triton import w4_dot_kernel

    x = x if x.stride(1) == 1 else x.contiguous()
    m = min(64, max(16, row_bucket(x.shape[0])))
    row_blocks = -(-x.shape[0] // m)
    splits = max(1, min(16, w.k_tiles // 4, 4 * multiprocessors(x) // (w.n_tiles * row_blocks)))
    slice_tiles = -(-w.k_tiles // splits)
    partial = torch.empty(-(-w.k_tiles // slice_tiles), x.shape[0], w.n, dtype=torch.float32, device=x.device)
    w4_dot_kernel[(w.n_tiles, row_blocks, partial.shape[0])](
        x, w.packed, w.scales, w.zeros, partial, x.shape[0], w.n, w.k, x.stride(0), w.k_tiles, slice_tiles,
        HAS_ZEROS=w.zeros is not None, GROUP=w.group, M=m, num_warps=4,
    )  # fmt: skip
    return partial


def sum_partials(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """[S, T, N] float32 -> [T, N] in dtype, added in the order of S."""
    return sum_partials_triton(partials, dtype) if partials.is_cuda else partials.sum(0).to(dtype)


def sum_partials_triton(partials: Tensor, dtype: torch.dtype) -> Tensor:
    from engine.kernels.w4_triton import sum_partials_kernel

    splits, rows, n = partials.shape
    out = torch.empty(rows, n, dtype=dtype, device=partials.device)
    grid = (-(-out.numel() // 512),)
    launch(sum_partials_kernel, grid, partials, out, out.numel(), SPLITS=splits, BLOCK=512, num_warps=4)
    return out


def w4_dequantize(w: QuantWeight, dtype: torch.dtype) -> Tensor:
    """The weight unpacked, [n, k] in dtype."""
    return w4_dequantize_triton(w, dtype) if w.packed.is_cuda else dequantize(w, dtype)


def w4_dequantize_triton(w: QuantWeight, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """w4_dequantize, into `out` [n, k] where it is given."""
    from engine.kernels.w4_triton import w4_dequantize_kernel

    if out is None:
        out = torch.empty(w.n, w.k, dtype=dtype, device=w.packed.device)
    w4_dequantize_kernel[(w.k_tiles, w.n_tiles)](
        w.packed, w.scales, w.zeros, out, w.n, w.k, w.k_tiles, HAS_ZEROS=w.zeros is not None, GROUP=w.group
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
    if _hopper_takes(x, w):
        return torch.cat([w4_matmul(row, w) for row in x.split(1)]) if x.shape[0] > 1 else w4_matmul(x, w)
    return sum_partials(gemv_partials(x, w), x.dtype)


def gemv_partials(x: Tensor, w: QuantWeight) -> Tensor:
    """The matrix-vector kernel, once a row of x: float32 [S, T, N]."""
    from engine.kernels.w4_triton import w4_gemv_kernel

    x = x.contiguous()
    splits = max(1, min(16, w.k_tiles // 8, 8 * multiprocessors(x) // w.n_tiles))
    slice_tiles = -(-w.k_tiles // splits)
    partial = torch.empty(-(-w.k_tiles // slice_tiles), x.shape[0], w.n, dtype=torch.float32, device=x.device)
    w4_gemv_kernel[(w.n_tiles, partial.shape[0], x.shape[0])](
        x, w.packed, w.scales, w.zeros, partial, x.shape[0], w.n, w.k, w.k_tiles, slice_tiles,
        HAS_ZEROS=w.zeros is not None, GROUP=w.group, num_warps=4,
    )  # fmt: skip
    return partial
