"""What `arkbench list` prints: scenarios, claims, models, switches and presets."""

from __future__ import annotations

from collections.abc import Iterator

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
        for table in claim_tables():
            console.print(table)
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


def claim_tables() -> Iterator[Table]:
    """Every published claim, a table for each scenario that tests some."""
    notes = published.tests().notes
    for scenario in dict.fromkeys(note.scenarios[0] for note in notes.values()):
        table = _table(f"Published claims that arkbench run {scenario} tests", "id", "published", "statement")
        for claim in published.claims():
            if notes[claim.note].scenarios[0] == scenario:
                table.add_row(
                    claim.id, escape(published.with_unit(claim.published, claim.unit)), escape(claim.statement)
                )
        if table.row_count:
            yield table


def model_table() -> Table:
    """Every model: parameters, bytes read a token, cache bytes a token, and whether it fits this machine."""
    device = bundled.default_device()
    free = available_bytes(device)
    numbers = ("weights\nbillions", "active\nbillions", "read\nGB", "cache, kB\n16 / 8 bit", "needs\nGB")
    table = _table("Models (4-bit weights; read and cache: of one token)", "model", *numbers, "fits", right=numbers)
    for name in bundled.model_names():
        facts = bundled.model_facts(name)
        need = memory_bytes(facts, {}, FIT_NEEDS, device)
        table.add_row(
            name,
            f"{facts.parameters / 1e9:.2f}",
            f"{facts.active_parameters / 1e9:.2f}",
            f"{facts.decode_bytes_4bit / 1e9:.2f}",
            f"{facts.cache_bytes_16bit / 1e3:.0f} / {facts.cache_bytes_8bit / 1e3:.0f}",
            f"{need / 1e9:.1f}",
            "?" if free is None else "yes" if need <= free else "no",
        )
    if free is not None:
        table.caption = f"{device}, {free / 1e9:.0f} GB free; needs: one stream of {FIT_NEEDS.tokens:,} tokens"
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
