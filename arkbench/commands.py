"""What `arkbench run` does: plan, target, meter, run, summary, verdicts, report."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from arkbench import answers, estimate, folder, runner, verdicts
from arkbench.errors import UserError
from arkbench.folder import RunFolder
from arkbench.metrics import ABOVE_LIMIT, Machine
from arkbench.plan import Plan, RunOptions, ScenarioPlan, Variant, device_of, make_plan
from arkbench.progress import LiveProgress, duration
from arkbench.published import with_unit
from arkbench.records import number, read_details, read_rows
from arkbench.runner import Runner, Tools
from arkbench.targets import bundled
from arkbench.targets.base import Target

EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130


# ----------------------------------------------------------------------------------------------------- planning


def plan_for(options: RunOptions) -> Plan:
    """The plan of a run; asks an endpoint for its model where none was named."""
    endpoint_model = None
    if options.endpoint is not None:
        from arkbench.targets.endpoint import served_model

        endpoint_model = served_model(options.endpoint, options.api_key, options.overrides.models)
    return make_plan(options, endpoint_model)


def _device(options: RunOptions) -> str:
    return "endpoint" if options.endpoint is not None else device_of(options.device)


def tools_for(options: RunOptions, device: str) -> Tools:
    """The targets, the meter and the rates of a run with these options."""

    def make_target(plan: ScenarioPlan, model: str, variant: Variant) -> Target:
        if options.endpoint is not None:
            from arkbench.targets.openai import OpenAITarget

            return OpenAITarget(options.endpoint, api_key=options.api_key, model=model)
        if variant.target == "http":
            from arkbench.targets.served import ServedTarget

            timeout = plan.scenario.limits.first_token_timeout_s
            return ServedTarget(model, options.weights, device, options.stages, options.seed, timeout)
        return bundled.BundledTarget(model, options.weights, device, options.stages, options.seed)

    def make_meter() -> runner.Meter:
        from arkbench.power import Meter, meter

        if not options.energy:
            return Meter((), ("energy was not measured (--no-energy)",))
        indices = None if options.endpoint else list(range(options.stages)) if device.startswith("cuda") else []
        return meter(indices, options.power_command)

    def rates() -> Machine:
        return Machine() if options.endpoint else runner.measure_rates(device, options.stages)

    return Tools(make_target, make_meter, rates, device)


# ------------------------------------------------------------------------------------------------------ running


def run(
    options: RunOptions,
    output: Path | None,
    resume: Path | None,
    arguments: Sequence[str],
    console: Console,
    rendered: bool = True,
) -> int:
    """`arkbench run`: returns the exit code. `rendered`: whether the report is rendered now."""
    if resume is not None:
        if output is not None and output.resolve() != resume.resolve():
            raise UserError("--resume goes on in that run's own folder; leave --output out")
        stored = folder.stored_options(resume, options.api_key)
        folder.check_options(resume, options, stored)
        options = stored
    plan = plan_for(options)
    tools = tools_for(options, _device(options))
    path = resume or output or folder.default_path(plan, datetime.now())
    run_folder = RunFolder.resume(path, plan) if resume else RunFolder.create(path, plan, arguments)
    for note in run_folder.info["notes"]:
        console.print(f"[yellow]note:[/] {escape(note)}", highlight=False)
    status = Runner(plan, run_folder, tools, LiveProgress(console)).run()
    return _conclude(plan, run_folder, status, console, rendered)


def _conclude(plan: Plan, run_folder: RunFolder, status: str, console: Console, rendered: bool) -> int:
    rows = read_rows(run_folder.path / "cells.csv")
    found = answers.differences(read_details(run_folder.path))
    run_folder.info["answers"] = answers.compare_answers(rows, plan, bundled.EXACT_SWITCHES, found)
    run_folder.finish(status)
    verdict_rows = verdicts.write(run_folder.path)
    if rendered:
        render([run_folder.path], run_folder.path)
    if rows and all(row["status"] == "skipped" for row in rows):
        raise UserError(rows[0]["reason"])
    print_summary(run_folder.path, console)
    print_answers(run_folder.info["answers"], console)
    print_verdicts(verdict_rows, console)
    if status == "partial":
        again = f"arkbench run --resume {run_folder.path}"
        console.print(f"[yellow]The run is {status}.[/] Go on with it: {escape(again)}", soft_wrap=True)
    shown = f"Report: {run_folder.path / 'report.html'} (and report.md)"
    shown = shown if rendered else f"Measured: {run_folder.path} (arkbench report {run_folder.path} renders it)"
    console.print(shown, highlight=False, soft_wrap=True)
    return _exit_code(status, run_folder.info["notes"], rows)


def _exit_code(status: str, notes: Sequence[str], rows: Sequence[dict[str, str]]) -> int:
    """The code of a run that is over; raises UserError where all that was asked for cannot be."""
    if status == "partial" and runner.INTERRUPTED in notes:
        return EXIT_INTERRUPTED
    if any(row["status"] == "failed" for row in rows):
        return EXIT_FAILED
    if status == "failed":
        reasons = [row["reason"] for row in rows if row["reason"]]
        raise UserError(reasons[0] if reasons else "nothing could be measured")
    return EXIT_OK


def render(run_dirs: Sequence[Path], out_dir: Path) -> None:
    """The report of one or several runs."""
    from arkbench import report

    report.render(run_dirs, out_dir)


def refresh(path: Path) -> None:
    """Summary and verdicts of a folder that has none yet: a run that was killed."""
    if not (path / "summary.csv").exists():
        folder.summarize(path)
    if not (path / "verdicts.csv").exists():
        verdicts.write(path)


# ----------------------------------------------------------------------------------------------------- printing


def print_summary(path: Path, console: Console) -> None:
    """The measured figures: medians over repetitions, their spread, the fraction of the limit.

    What was not measured stands below the table, with the reason.
    """
    doubts: dict[str, list[str]] = {}
    above: list[str] = []
    table = Table(title="Measured (medians over repetitions)", title_justify="left")
    for name in ("model", "variant", "cell"):
        table.add_column(name, no_wrap=name != "model", overflow="fold")
    for name in ("tokens/s", "spread", "first token", "of the limit"):
        table.add_column(name, justify="right")
    for row in read_rows(path / "summary.csv"):
        column = "decode_tok_s" if row["decode_tok_s"] else "prefill_tok_s"
        speed, spread = number(row[column]), number(row[f"{column}_spread"])
        ttft, limit = number(row["ttft_p50_s"]), number(row["limit_fraction"])
        if speed is not None or ttft is not None or not row["reason"]:
            table.add_row(
                row["model"],
                row["variant"],
                row["cell"],
                "" if speed is None else f"{speed:,.1f}",
                "" if spread is None else f"{spread:.1%}",
                "" if ttft is None else f"{ttft * 1000:,.1f} ms",
                "" if limit is None else f"{limit:.1%}",
            )
        if limit is not None and limit > 1:
            above.append(f"{row['variant']} {row['cell']}")
        if row["reason"]:
            doubts.setdefault(row["reason"], []).append(f"{row['variant']} {row['cell']}")
    if table.row_count:
        console.print(table)
    if above:
        console.print(f"[yellow]note:[/] {escape(_several(above))}: {ABOVE_LIMIT}", highlight=False, soft_wrap=True)
    for reason, cells in doubts.items():
        console.print(
            f"[yellow]not valid:[/] {escape(_several(cells))}: {escape(reason)}", highlight=False, soft_wrap=True
        )


def _several(cells: Sequence[str]) -> str:
    return cells[0] + (f" and {_plural(len(cells) - 1, 'cell')} more" if len(cells) > 1 else "")


def print_answers(compared: dict, console: Console) -> None:
    """One line on whether the variants gave the same tokens, and one for each pair that must and did not."""
    if not compared["compared"]:
        return
    line = f"Answers: {compared['identical']} of {compared['compared']} comparisons of variants are token for token"
    bounded = sorted({name for d in compared["different"] if answers.kind(d) == "bounded" for name in d["switches"]})
    why = f"; others differ in switches that may round differently: {', '.join(bounded)}" if bounded else ""
    gaps = [d["gap"] for d in compared["different"] if answers.kind(d) == "tie"]
    if gaps:
        why += f"; {len(gaps)} where two tokens are all but equal and rounding decides (at most {max(gaps):.1%} apart)"
    console.print(f"{line} the same{why}.", highlight=False, soft_wrap=True)
    for fault in [d for d in compared["different"] if answers.kind(d) == "fault"][:3]:
        names = " and ".join(fault["variants"])
        console.print(
            f"[red]Wrong:[/] {fault['cell']}: {names} differ only in {', '.join(fault['switches'])}, which must not "
            f"change a token, and gave different answers ({answers.explained(fault)}).",
            highlight=False,
        )


def print_verdicts(rows: Sequence[dict], console: Console) -> None:
    """How the claims came out: the counts, and each claim that was measured."""
    shown = [row for row in rows if row["verdict"] != "not run"]
    if shown:
        table = Table(title="Verdicts", title_justify="left")
        for name in ("claim", "published", "measured", "verdict", "reason"):
            table.add_column(name, overflow="fold")
        for row in shown:
            values = (
                row["statement"],
                with_unit(row["published"], row["unit"]),
                with_unit(row.get("measured") or "", row["unit"]),
                row["verdict"],
                row["reason"],
            )
            table.add_row(*(escape(str(value or "")) for value in values))
        console.print(table)
    console.print(", ".join(f"{count} {name}" for name, count in verdicts.counts(rows).items()) + ".", highlight=False)


def dry_run(options: RunOptions, console: Console) -> None:
    """`arkbench run --dry-run`: the cells with the time and memory each will need; nothing is run."""
    from arkbench.machine import available_bytes

    plan, device = plan_for(options), _device(options)
    machine = estimate.assumed_machine(device, plan.options.stages)
    endpoint = plan.options.endpoint is not None
    free = None if endpoint else available_bytes(device)
    total = 0.0
    table = Table(title=f"Would measure, on {'the endpoint' if endpoint else device}", title_justify="left")
    for name in ("scenario", "model", "variant", "cell"):
        table.add_column(name, no_wrap=name == "cell", overflow="fold")
    for name in ("repetitions", "time", "memory"):
        table.add_column(name, justify="right")
    for p in plan.scenarios:
        costs = estimate.cell_costs(p, machine, endpoint)
        for cell in p.cells:
            cost = costs[cell.model, cell.variant, cell.id]
            seconds = None
            if cost is not None:
                seconds = p.scenario.repetitions * cost.seconds + estimate.starts_of(p) * cost.warm_up_seconds
                total += seconds
            memory = None if endpoint else _memory(p, cell.model, cell.variant, device)
            table.add_row(
                p.scenario.name,
                cell.model,
                cell.variant,
                cell.id,
                str(p.scenario.repetitions),
                "not known" if seconds is None else duration(max(seconds, 1)),
                _shown_memory(memory, free, plan.options.stages),
            )
    for note in (note for p in plan.scenarios for note in p.notes):
        console.print(f"[yellow]note:[/] {escape(note)}", highlight=False, soft_wrap=True)
    console.print(table)
    console.print(
        f"{_plural(sum(len(p.cells) for p in plan.scenarios), 'cell')}, about {duration(max(total, 1))} and the starts."
    )
    if free is not None:
        console.print(f"Memory free on {device}: {free / 1e9:.1f} GB.", highlight=False)


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _memory(plan: ScenarioPlan, model: str, variant: str, device: str) -> int | None:
    facts = estimate.facts_of(model)
    switches = estimate.variant_of(plan, variant).switches
    return None if facts is None else estimate.memory_bytes(facts, switches, plan.needs(model), device)


def _shown_memory(memory: int | None, free: int | None, stages: int) -> str:
    if memory is None:
        return "not known"
    fits = free is None or memory <= free * stages
    return f"{memory / 1e9:.1f} GB" + ("" if fits else " [red]does not fit[/]")
