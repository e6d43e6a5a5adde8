"""What `arkbench list` prints: scenarios, claims, models, switches and presets."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from arkbench import published
from arkbench import scenario as scenario_files
from arkbench.estimate import memory_bytes
from arkbench.machine import available_bytes
from arkbench.plan import Needs
from arkbench.targets import bundled

NAMES = ("name", "id", "model", "switch", "scenario")
FIT_NEEDS = Needs(streams=1, tokens=4096, cache_tokens=4096)


def show(console: Console, *, scenarios: bool, claims: bool, models: bool, switches: bool) -> None:
    """Prints the asked parts; all of them where none was asked for."""
    everything = not (scenarios or claims or models or switches)
    if scenarios or everything:
        console.print(scenario_table())
    if claims or everything:
        console.print(claim_table())
    if models or everything:
        console.print(model_table())
    if switches or everything:
        console.print(switch_table())
        console.print(preset_table())


def _table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name in right or name in NAMES)
    return table


def scenario_table() -> Table:
    """Every shipped scenario with its cells a model and its variants."""
    table = _table("Scenarios", "name", "title", "variants", "models", "cells", right=("models", "cells"))
    for name in scenario_files.scenario_files():
        scenario = scenario_files.load(name).scenario
        variants = list(scenario.all_variants())
        cells = scenario_files.cells_of(scenario, scenario.models, variants)
        table.add_row(name, scenario.title, ", ".join(variants), str(len(scenario.models)), str(len(cells)))
    return table


def claim_table() -> Table:
    """Every published claim with the scenario that tests it."""
    table = _table("Published claims", "id", "published", "statement", "scenario")
    notes = published.tests().notes
    for claim in published.claims():
        shown = f"{claim.published} {claim.unit}".strip()
        table.add_row(claim.id, escape(shown), escape(claim.statement), notes[claim.note].scenarios[0])
    return table


def model_table() -> Table:
    """Every model: parameters, bytes read a token, cache bytes a token, and whether it fits this machine."""
    device = bundled.default_device()
    free = available_bytes(device)
    numbers = ("parameters", "active", "read a token", "cache 16 bit", "cache 8 bit", "needs")
    fits = f"fits ({device}, {free / 1e9:.0f} GB free)" if free else "fits"
    table = _table("Models (4-bit weights)", "model", *numbers, fits, right=numbers)
    for name in bundled.model_names():
        facts = bundled.model_facts(name)
        need = memory_bytes(facts, {}, FIT_NEEDS, device)
        table.add_row(
            name,
            f"{facts.parameters / 1e9:.2f} B",
            f"{facts.active_parameters / 1e9:.2f} B",
            f"{facts.decode_bytes_4bit / 1e9:.2f} GB",
            f"{facts.cache_bytes_16bit / 1e3:.0f} kB",
            f"{facts.cache_bytes_8bit / 1e3:.0f} kB",
            f"{need / 1e9:.1f} GB",
            "not known" if free is None else "yes" if need <= free else "no",
        )
    return table


def switch_table() -> Table:
    """Every switch with its values."""
    table = _table("Switches (--set switch=value)", "switch", "values")
    for name, values in bundled.switch_choices().items():
        table.add_row(name, ", ".join(values))
    return table


def preset_table() -> Table:
    """Every preset with its switches."""
    presets = bundled.presets()
    table = _table("Presets", "switch", *presets)
    for name in bundled.switch_choices():
        table.add_row(name, *(switches[name] for switches in presets.values()))
    return table
