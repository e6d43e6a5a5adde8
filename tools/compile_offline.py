"""Compiles every kernel for sm_80, sm_90 and sm_120 without a GPU and reports what the compiler made of it.

    python -m tools.compile_offline [FILTER] [--targets 80,90,120] [--write]

Kernels with wgmma are compiled for sm_90 alone. For every kernel: registers a thread, accesses to spilled registers in
loops, shared memory, instructions of the main loop (the longest innermost loop, preferring one with matrix
instructions) and those by the keys (attention) or by the weights (4-bit products) that one round takes. `--write`
records the figures in tools/compiled_kernels.json; without it they are compared with the record. A kernel fails when it
spills in a loop, needs more shared memory than the GPU has, or its loop, its registers or its shared memory have grown
by more than 5%: fewer programs may then fit a multiprocessor.
The record is one compiler's: under another version of Triton than its own shared memory alone is judged, and a line
says so.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from engine.kernels._launch import launch_options
from tools.compile_cases import CASES

RECORD = Path(__file__).with_name("compiled_kernels.json")
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 120: 99 * 1024}
GROWTH = 1.05
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "i8", torch.uint8: "u8",
    torch.int32: "i32", torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One launch as recorded: the Triton function, its positional and its keyword arguments."""

    kernel: Any
    args: tuple[Any, ...]
    meta: dict[str, Any]


@contextmanager
def recording(target: int) -> Iterator[list[Launch]]:
    """Within the block Triton kernels are not launched but recorded, chosen for the target."""
    from triton.runtime.jit import JITFunction

    recorded: list[Launch] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **meta: Any) -> None:
        recorded.append(Launch(self, args, meta))

    run, JITFunction.run = JITFunction.run, record
    try:
        with launch_options(capability=(target // 10, target % 10)):
            yield recorded
    finally:
        JITFunction.run = run


@dataclass(frozen=True)
class Compiled:
    """`loop`: SASS instructions of the main loop (0: none); `loop_per_key`: that by the keys of a tile.

    `loop_per_weight`: the loop's instructions of all threads by the weights that a program takes in one round.
    """

    registers: int
    spilled: int
    shared: int
    loop: int
    loop_per_key: float | None = None
    loop_per_weight: float | None = None


def compile_launch(launch: Launch, target: int) -> Compiled:
    """Compiles a recorded launch as Triton's launcher would specialise it."""
    import triton
    from triton.backends.compiler import GPUTarget

    names = launch.kernel.arg_names
    values = dict(zip(names, launch.args, strict=False)) | {k: v for k, v in launch.meta.items() if k in names}
    fixed = [parameter.do_not_specialize for parameter in launch.kernel.params]
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(names):
        value = values[name]
        constant = name in launch.meta or launch.kernel.params[index].is_constexpr
        signature[name] = "constexpr" if constant else _type_of(value, fixed[index])
        if signature[name] == "constexpr":
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0 and not fixed[index]):
            attributes[(index,)] = [["tt.divisibility", 16]]
    options = {k: v for k, v in launch.meta.items() if k not in names}
    source = _source_type(launch.kernel)(launch.kernel, signature, constants, attributes)
    built = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    sass, usage = _disassemble(built.asm["cubin"])
    loop = len(main_loop(sass))
    keys, weights = launch.meta.get("BLOCK_N"), _weights_a_round(launch)
    return Compiled(
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        spilled=sum(spills(body) for body in loops(sass)),
        shared=built.metadata.shared,
        loop=loop,
        loop_per_key=round(loop / keys, 2) if keys else None,
        loop_per_weight=round(loop * 32 * launch.meta.get("num_warps", 4) / weights, 3) if weights else None,
    )


def _source_type(kernel: Any) -> Any:
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


def _weights_a_round(launch: Launch) -> int | None:
    """Weights that a program of a 4-bit product takes in one round of its main loop."""
    if "GROUP_TILES" in launch.meta:
        return launch.meta["BN"] * 64 * launch.meta["GROUP_TILES"]
    if launch.kernel.__name__ in ("few_gate_up_kernel", "few_down_kernel"):
        matrices = 2 if launch.kernel.__name__ == "few_gate_up_kernel" else 1
        return matrices * launch.meta["R"] * 64 * launch.meta["T"]
    return 64 * 64 if launch.kernel.__name__ in ("w4_dot_kernel", "w4_gemv_kernel") else None


def _type_of(value: Any, fixed: bool) -> str:
    """The type of an argument in a signature; `fixed`: the kernel takes it as it comes, even a 1."""
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if hasattr(value, "block_shape"):
        return f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape},{value.layout!r}>"
    if value is None or (value == 1 and not fixed):
        return "constexpr"
    return "fp32" if isinstance(value, float) else "i32"


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """(SASS, resource usage) of a cubin, by the cuobjdump that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass, usage = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-sass", "-res-usage")
        )
    return sass, usage


def loops(sass: str) -> list[list[str]]:
    """The instructions of every innermost loop: from the target of a backward branch to the branch."""
    code = [(int(address, 16), text.strip()) for address, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", sass)]
    back = []
    for address, text in code:
        branch = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if branch and int(branch[1], 16) < address:
            back.append((int(branch[1], 16), address))
    inner = [a for a in back if not any(a[0] <= b[0] and b[1] <= a[1] and a != b for b in back)]
    return [[text for address, text in code if start <= address <= end] for start, end in inner]


def main_loop(sass: str) -> list[str]:
    """The longest innermost loop, of those with matrix instructions where there are any; empty without a loop."""
    bodies = loops(sass)
    with_matrix = [body for body in bodies if any("MMA" in text for text in body)]
    return max(with_matrix or bodies, key=len, default=[])


def spills(instructions: list[str]) -> int:
    """Accesses to local memory."""
    return sum(bool(re.search(r"\b(?:STL|LDL)\b", text)) for text in instructions)


def compile_all(pattern: str, targets: list[int]) -> dict[str, dict[str, Any]]:
    """{"case / kernel": {"sm_90": figures}} of every case whose name holds the pattern."""
    found: dict[str, dict[str, Any]] = {}
    for case in [name for name in CASES if pattern in name]:
        for target in targets:
            if (target < 89 and "fp8" in case) or (target != 90 and case.startswith("hopper")):
                continue
            with recording(target) as launches:
                CASES[case]()
            for launch in launches:
                name = f"{case} / {launch.kernel.__name__}"
                found.setdefault(name, {})[f"sm_{target}"] = asdict(compile_launch(launch, target))
    return found


def read_record() -> tuple[str, dict[str, dict[str, Any]]]:
    """(the version of Triton that the record is of, the record)."""
    record = json.loads(RECORD.read_text())
    return record.pop("triton"), record


def problems(
    found: dict[str, dict[str, Any]], record: dict[str, dict[str, Any]], same_compiler: bool = True
) -> list[str]:
    """One line for everything that is wrong: spills, too much shared memory, growth, a case without a record.

    Spills and growth are judged where both are of the `same_compiler`: another allocates registers in its own way.
    """
    lines = []
    for name, by_target in found.items():
        for target, now in by_target.items():
            limit = SHARED_LIMIT[int(target[3:])]
            if now["spilled"] and same_compiler:
                lines.append(
                    f"{name} spills {now['spilled']} times in its loops on {target}: use smaller tiles or more warps"
                )
            if now["shared"] > limit:
                lines.append(f"{name} needs {now['shared']} bytes of shared memory on {target}, which has {limit}")
            before = record.get(name, {}).get(target)
            if before is None:
                lines.append(f"{name} has no record for {target}: run python -m tools.compile_offline --write")
                continue
            for figure in ("loop", "registers", "shared") if same_compiler else ():
                if now[figure] > before[figure] * GROWTH + 2:
                    lines.append(f"{name} grew on {target}: {figure} {before[figure]} -> {now[figure]}")
    return lines


def main() -> int:
    import triton

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("filter", nargs="?", default="")
    parser.add_argument("--targets", default="80,90,120")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    version, record = read_record()
    same_compiler = version == triton.__version__
    if not same_compiler:
        if options.write and (options.filter or options.targets != parser.get_default("targets")):
            parser.error(f"the record is of Triton {version}, this is {triton.__version__}: write all of it or nothing")
        record = {} if options.write else record
        print(f"spills and growth are not judged: the record is of Triton {version}, this is {triton.__version__}")
    found = compile_all(options.filter, [int(t) for t in options.targets.split(",")])
    for name, by_target in found.items():
        for target, f in by_target.items():
            print(f"{name:52} {target:7} reg {f['registers']:3} spill {f['spilled']:4} smem {f['shared']:6} "
                  f"loop {f['loop']:5} "
                  f"per key {f['loop_per_key'] or '':5} per weight {f['loop_per_weight'] or ''}")  # fmt: skip
    if options.write:
        for name, by_target in found.items():
            record.setdefault(name, {}).update(by_target)
        stored = record | {"triton": triton.__version__}
        RECORD.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    lines = problems(found, record, same_compiler)
    print("\n".join(lines), file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
