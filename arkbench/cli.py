"""The command line: parses, calls, prints. What the commands do is in their own modules."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from arkbench import gate_cli
from arkbench.errors import UserError

app = typer.Typer(
    name="arkbench",
    help="Checks the published performance claims of ARK on your own hardware.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

# The parser's own class, by way of a name that typer makes public: newer ones bring their own copy of click.
_UsageError = typer.BadParameter.__bases__[0]
_MOST_DIGITS = 18
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)


def _console() -> Console:
    """The terminal; where the output is none, wide enough that no name is broken."""
    return Console() if sys.stdout.isatty() else Console(width=160)


def _numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    """`1,8,64` as numbers; None stays None. Raises UserError naming the option."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) <= _MOST_DIGITS and int(part) > 0 for part in parts):
        raise UserError(f"{option} {text:.80}: it takes positive whole numbers with commas between, for example 1,8,64")
    return tuple(dict.fromkeys(int(part) for part in parts))


@app.command()
def run(
    scenarios: Annotated[
        list[str] | None, typer.Argument(metavar="[SCENARIO]...", help="Names or TOML files; default: quick.")
    ] = None,
    model: Annotated[list[str] | None, typer.Option("--model", help="Model to measure (repeatable).")] = None,
    weights: Annotated[str, typer.Option(help="random, a folder, a GGUF file or a Hub id.")] = "random",
    endpoint: Annotated[str | None, typer.Option(metavar="URL", help="Measure this OpenAI-compatible server.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="ARKBENCH_API_KEY", help="Key of the endpoint.")] = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    stages: Annotated[int, typer.Option(help="Spread the model over this many GPUs or processes.")] = 1,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="SWITCH=VALUE", help="Turn a switch.")] = None,
    streams: Annotated[str | None, typer.Option(help="Streams of decode cells, e.g. 1,8.")] = None,
    context: Annotated[str | None, typer.Option(help="Context tokens of decode cells, e.g. 1000,4000.")] = None,
    at_once: Annotated[str | None, typer.Option(help="Prompts of a burst, e.g. 1,2.")] = None,
    prompt_tokens: Annotated[str | None, typer.Option(help="Prompt lengths, e.g. 256.")] = None,
    output_tokens: Annotated[str | None, typer.Option(help="Tokens that each request makes.")] = None,
    duration: Annotated[
        float | None, typer.Option(min=0.1, max=1e6, help="Seconds of a sustained window; the report says so.")
    ] = None,
    users: Annotated[str | None, typer.Option(help="Users of a conversation, e.g. 8.")] = None,
    turns: Annotated[str | None, typer.Option(help="Turns of a conversation, e.g. 3.")] = None,
    shared_tokens: Annotated[int | None, typer.Option(min=0, help="Tokens that all users' prompts begin with.")] = None,
    turn_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens that a turn of a conversation adds.")] = None,
    cache_tokens: Annotated[
        int | None, typer.Option(min=1, help="Room of the KV cache, where the scenario sets one.")
    ] = None,
    repetitions: Annotated[int | None, typer.Option(min=1, help="Repetitions of every cell.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="The run folder itself.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Measure what is missing in this run.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the cells and what they need; run nothing.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and synthetic weights.")] = 0,
    power_command: Annotated[str | None, typer.Option(metavar="CMD", help="A command that prints watts.")] = None,
    energy: Annotated[
        bool, typer.Option("--energy/--no-energy", help="Measure energy (10 s at rest a run beside the cells).")
    ] = True,
    rendered: Annotated[
        bool, typer.Option("--report/--no-report", help="Render the report; arkbench report does it later.")
    ] = True,
) -> None:
    """Runs scenarios, writes one run folder, renders its report and prints the verdicts."""
    from arkbench import commands
    from arkbench.plan import RunOptions
    from arkbench.scenario import Overrides

    overrides = Overrides(
        models=tuple(model) if model else None,
        streams=_numbers(streams, "--streams"),
        context_tokens=_numbers(context, "--context"),
        at_once=_numbers(at_once, "--at-once"),
        prompt_tokens=_numbers(prompt_tokens, "--prompt-tokens"),
        output_tokens=_numbers(output_tokens, "--output-tokens"),
        duration_s=duration,
        users=_numbers(users, "--users"),
        turns=_numbers(turns, "--turns"),
        shared_tokens=shared_tokens,
        turn_tokens=turn_tokens,
        cache_tokens=cache_tokens,
        repetitions=repetitions,
    )
    options = RunOptions(
        scenarios=tuple(scenarios or ("quick",)),
        overrides=overrides,
        weights=weights,
        endpoint=endpoint,
        api_key=api_key,
        device=device,
        stages=stages,
        set_switches=tuple(set_ or ()),
        seed=seed,
        power_command=power_command,
        energy=energy,
    )
    console = _console()
    if dry_run:
        commands.dry_run(options, console)
        return
    raise typer.Exit(commands.run(options, output, resume, sys.argv[1:], console, rendered))


@app.command("list")
def list_(
    scenarios: Annotated[bool, typer.Option("--scenarios", help="Only the scenarios.")] = False,
    claims: Annotated[bool, typer.Option("--claims", help="Only the published claims.")] = False,
    models: Annotated[bool, typer.Option("--models", help="Only the models.")] = False,
    switches: Annotated[bool, typer.Option("--switches", help="Only the switches and presets.")] = False,
) -> None:
    """Prints the scenarios, the published claims, the models, the switches and the presets."""
    from arkbench import listing

    listing.show(_console(), scenarios=scenarios, claims=claims, models=models, switches=switches)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write; default, of one run: its folder.")
    ] = None,
) -> None:
    """Renders the report of one or several runs again."""
    from arkbench import commands
    from arkbench.records import read_run

    if output is None and len(runs) > 1:
        raise UserError("report: name --output DIR for a report of several runs, so that it replaces none of theirs")
    for path in runs:
        read_run(path)
        commands.refresh(path)
    out = output or runs[0]
    out.mkdir(parents=True, exist_ok=True)
    commands.render(runs, out)
    _console().print(f"Report: {out / 'report.html'} (and report.md)", highlight=False, soft_wrap=True)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="RUN")], second: Annotated[Path, typer.Argument(metavar="RUN")]
) -> None:
    """Prints two runs side by side, cell by cell."""
    from arkbench import comparison

    comparison.show(first, second, _console())


@app.command()
def doctor() -> None:
    """Says what this machine can measure, and whether the client itself is fast enough."""
    from arkbench import doctor as doctor_module

    doctor_module.show(_console())


@app.command()
def serve(
    model: Annotated[str, typer.Option(help="Model to serve.")] = "SmolLM2-135M",
    weights: Annotated[str, typer.Option(help="random, a folder, a GGUF file or a Hub id.")] = "random",
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    stages: Annotated[int, typer.Option(min=1, help="Spread the model over this many GPUs or processes.")] = 1,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="SWITCH=VALUE", help="Turn a switch.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[str | None, typer.Option(envvar="ARKBENCH_API_KEY", help="Key that clients must send.")] = None,
    max_concurrent: Annotated[int, typer.Option(min=1, help="Requests at once; more are refused (429).")] = 64,
    first_token_timeout: Annotated[float, typer.Option(min=0, help="Seconds a first token may take.")] = 90.0,
    cache_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Room of the KV cache, tokens; default: all streams at full length, or what memory has free, on a CPU "
            "at most a quarter of that.",
        ),
    ] = None,
) -> None:
    """Serves the bundled engine behind an OpenAI-compatible API until SIGTERM."""
    from arkbench import plan
    from arkbench.targets import bundled

    switches = bundled.resolve_switches("best", plan.parse_switches(set_ or ()))
    code = bundled.serve(
        {"model": model, "weights": weights, "device": plan.device_of(device), "stages": stages},
        switches,
        cache_tokens,
        host=host,
        port=port,
        api_key=api_key,
        max_concurrent=max_concurrent,
        first_token_timeout_s=first_token_timeout,
    )
    raise typer.Exit(code)


gate_cli.register(app)


def main() -> None:
    """The `arkbench` command: a user's mistake is one line on stderr and exit code 2; Ctrl-C is 130."""
    from arkbench.targets.base import TargetError

    # Threads that wait by spinning take the cores from the ones they wait for wherever anything else runs: torch's
    # products then become ten times slower. OpenMP reads this when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        code = _serve_or_run()
    except (UserError, TargetError) as error:
        _fail(str(error))
    except _UsageError as error:
        _fail(f"{error.format_message().rstrip('.')}; arkbench --help lists what there is")
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        place = f"{error.filename}: " if error.filename else ""
        _fail(f"{place}{error.strerror}; what was measured is kept: mend it, then arkbench run --resume DIR")
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(code)


def _serve_or_run() -> int | None:
    """The command, or, in a further process that torchrun started, the loop of its stage; the exit code."""
    if int(os.environ.get("RANK", "0")) > 0:
        from arkbench.targets import bundled

        if bundled.is_further_stage():
            bundled.serve_stage()
            return 0
    try:
        return app(sys.argv[1:] or ["--help"], standalone_mode=False)
    finally:
        if bundled := sys.modules.get("arkbench.targets.bundled"):
            bundled.end_stages()


def _fail(message: str) -> NoReturn:
    """Ends with one line on stderr, whatever the message holds."""
    print("arkbench:", " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
