"""What a cell will cost: seconds and bytes, estimated from the model's size before anything runs.

The estimate assumes that the engine reaches `EFFICIENCY` of what memory and matrix units allow. It orders cells and
warns of long runs; the remaining time that a run shows is corrected by what its cells really took.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from arkbench import workloads
from arkbench.metrics import Machine
from arkbench.plan import Needs, ScenarioPlan, Variant
from arkbench.scenario import Cell
from arkbench.targets import bundled
from arkbench.targets.bundled import ModelFacts

EFFICIENCY = 0.4
STEP_OVERHEAD_S = 0.0005
"""What the host adds to every step."""
BYTES_BESIDE = {"cuda": 1_000_000_000, "cpu": 300_000_000}
"""Memory beside weights and cache: the engine's workspace (`engine/memory.py`), rounded."""
CPU_MACHINE = Machine(15e9, 60e9)
"""A few cores of a server: the driver tells nothing of a CPU."""
FLOP_PER_BYTE = 150
"""Matrix rate over bandwidth of data-center GPUs in 16 bits, on the low side (H200: 206, A100: 153)."""
UNKNOWN_GPU_BANDWIDTH = 1e12
KERNELS_SECONDS = 20.0
"""A rough figure for one part of the kernel bench."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of one repetition and of the warm-up of a cell."""

    seconds: float
    warm_up_seconds: float


def assumed_machine(device: str, stages: int = 1) -> Machine:
    """The rates of this machine by its datasheet, as far as the driver tells; nothing is measured."""
    if not device.startswith("cuda"):
        return Machine(CPU_MACHINE.bandwidth_bytes_s, CPU_MACHINE.matrix_flop_s, stages)
    import torch

    properties = torch.cuda.get_device_properties(0)
    clock_khz = getattr(properties, "memory_clock_rate", 0)
    bandwidth = 2 * clock_khz * 1e3 * getattr(properties, "memory_bus_width", 0) / 8 or UNKNOWN_GPU_BANDWIDTH
    return Machine(bandwidth, FLOP_PER_BYTE * bandwidth, stages)


def estimate(cell: Cell, facts: ModelFacts | None, switches: Mapping[str, str], machine: Machine) -> Estimate | None:
    """The estimate of a cell; None for a model or a machine that nothing is known of."""
    if cell.workload == "kernels":
        return Estimate(KERNELS_SECONDS, 0.0)
    if cell.duration_s is not None:
        return Estimate(cell.duration_s * 1.1, cell.duration_s * 0.1)
    if facts is None or not machine.bandwidth_bytes_s or not machine.matrix_flop_s:
        return None
    count = workloads.request_count(cell)
    output = cell.output_tokens or 1
    streams = min(cell.streams or cell.at_once or 1, count)
    read = _read_seconds(count * _mean_prompt(cell), facts, machine)
    steps = output * count / streams
    batched = switches.get("decode_batching", "on") == "on"
    step = _step_seconds(cell, facts, switches, machine, streams if batched else 1)
    make = steps * step * (1 if batched else streams)
    arrivals = count / cell.rate_per_s if cell.rate_per_s else 0.0
    share = 2 / count if cell.workload == "burst" else 1.0
    if cell.workload == "decode":
        share = workloads.WARM_UP_CONTEXT / _mean_prompt(cell)
    warm_up = read * min(1.0, share) + workloads.WARM_UP_TOKENS * step
    return Estimate(max(read + make, arrivals), 0.0 if cell.cold else warm_up)


def _mean_prompt(cell: Cell) -> float:
    if cell.prompt_mix:
        total = sum(share for _, share in cell.prompt_mix)
        return sum(tokens * share for tokens, share in cell.prompt_mix) / total
    return cell.longest_prompt


def _read_seconds(tokens: float, facts: ModelFacts, machine: Machine) -> float:
    assert machine.matrix_flop_s is not None
    return 2 * facts.matrix_parameters * tokens / (machine.matrix_flop_s * EFFICIENCY)


def _step_seconds(cell: Cell, facts: ModelFacts, switches: Mapping[str, str], machine: Machine, streams: int) -> float:
    assert machine.bandwidth_bytes_s is not None
    cache = facts.cache_bytes(switches.get("cache_dtype", "bf16")) * _mean_prompt(cell) + facts.state_bytes
    weights = facts.step_bytes(switches.get("weights_dtype", "int4"))
    memory = (weights + streams * cache) / machine.bandwidth_bytes_s
    arithmetic = 2 * facts.matrix_parameters * streams / machine.matrix_flop_s if machine.matrix_flop_s else 0.0
    return max(memory, arithmetic) / EFFICIENCY + STEP_OVERHEAD_S


def memory_bytes(facts: ModelFacts, switches: Mapping[str, str], needs: Needs, device: str) -> int:
    """Bytes that a model with its cache takes on a device (one stage)."""
    cache = needs.cache_tokens * facts.cache_bytes(switches.get("cache_dtype", "bf16"))
    states = needs.streams * facts.state_bytes
    beside = BYTES_BESIDE["cuda" if device.startswith("cuda") else "cpu"]
    return facts.weight_bytes(switches.get("weights_dtype", "int4")) + cache + states + beside


def facts_of(model: str) -> ModelFacts | None:
    """The facts of a published model; None for any other."""
    known = bundled.canonical_model(model).partition("@layers=")[0] in bundled.model_names()
    return bundled.model_facts(model) if known else None


def starts_of(plan: ScenarioPlan) -> int:
    """How often each variant is readied: once, and again for each turn of the alternation."""
    return 1 + (plan.scenario.repetitions - 1) // 2 if len(plan.variants) > 1 else 1


def cell_costs(plan: ScenarioPlan, machine: Machine, endpoint: bool) -> dict[tuple[str, str, str], Estimate | None]:
    """Estimates by (model, variant, cell id)."""
    switches = {variant.name: variant.switches for variant in plan.variants}
    facts = {model: None if endpoint else facts_of(model) for model in plan.models}
    return {
        (cell.model, cell.variant, cell.id): estimate(cell, facts[cell.model], switches[cell.variant], machine)
        for cell in plan.cells
    }


def variant_of(plan: ScenarioPlan, name: str) -> Variant:
    return next(variant for variant in plan.variants if variant.name == name)
