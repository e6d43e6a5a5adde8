"""From the command line to what will be measured: scenarios, models, variants with every switch resolved, cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from arkbench import published, workloads
from arkbench import scenario as scenarios
from arkbench.errors import UserError
from arkbench.scenario import ENDPOINT_VARIANT, Cell, LoadedScenario, Overrides, Scenario, Sustained
from arkbench.targets import bundled

CACHE_PAGE = 64
"""Tokens of a page of the engine's cache (`EngineConfig.page_size`): room is counted in whole pages."""
MOST_OPEN_STREAMS = 256
MOST_REPETITIONS = 10_000
MOST_PROMPT_TOKENS = 200_000_000
"""Prompts are made before the clock starts: those of one cell must fit into memory, some 8 bytes a token."""


@dataclass(frozen=True)
class RunOptions:
    """What the user asked for. `set_switches` are the `--set switch=value` pairs."""

    scenarios: tuple[str, ...] = ("quick",)
    overrides: Overrides = field(default_factory=Overrides)
    weights: str = "random"
    endpoint: str | None = None
    api_key: str | None = None
    device: str = "auto"
    stages: int = 1
    set_switches: tuple[str, ...] = ()
    seed: int = 0
    power_command: str | None = None
    energy: bool = True

    def stored(self) -> dict[str, Any]:
        """As it stands in run.json: everything but the API key."""
        plain = asdict(self)
        del plain["api_key"]
        return plain

    @staticmethod
    def restored(plain: Mapping[str, Any], api_key: str | None) -> RunOptions:
        """The options of a run folder."""
        values = dict(plain)
        overrides = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.pop("overrides").items()
        }
        for name in ("scenarios", "set_switches"):
            values[name] = tuple(values[name])
        return RunOptions(**values, overrides=Overrides(**overrides), api_key=api_key)


def option_conflicts(asked: RunOptions, stored: RunOptions) -> list[str]:
    """Names of the options that were given and differ from a run folder's own."""
    default = RunOptions()

    def differing(a: Any, b: Any, standard: Any, skip: tuple[str, ...]) -> list[str]:
        names = [f.name for f in fields(a) if f.name not in skip]
        return [n for n in names if getattr(a, n) not in (getattr(standard, n), getattr(b, n))]

    own = differing(asked, stored, default, ("overrides", "api_key"))
    return own + differing(asked.overrides, stored.overrides, default.overrides, ())


@dataclass(frozen=True)
class Variant:
    """A named set of switches, every one of them resolved, and what runs it: in-process, http or endpoint."""

    name: str
    preset: str | None
    switches: dict[str, str]
    target: str = "in-process"


@dataclass(frozen=True)
class Needs:
    """Room that a target must have for some cells: streams at once, tokens of one request, tokens of the cache."""

    streams: int
    tokens: int
    cache_tokens: int


@dataclass(frozen=True)
class ScenarioPlan:
    """One scenario as it will be measured. `notes`: what the command line left out or changed.

    `fresh`: variants whose start is itself a figure of a claim, so that each gets a full start.
    """

    loaded: LoadedScenario
    scenario: Scenario
    models: tuple[str, ...]
    variants: tuple[Variant, ...]
    cells: tuple[Cell, ...]
    notes: tuple[str, ...] = ()
    fresh: frozenset[str] = frozenset()

    def of(self, model: str, variant: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.model == model and cell.variant == variant]

    def needs(self, model: str) -> Needs:
        """The room for every cell of a model, whatever the variant: variants are compared with the same cache."""
        return needs_of([cell for cell in self.cells if cell.model == model])


@dataclass(frozen=True)
class Plan:
    """Everything that a run measures. `first_numbers`: where a cell and repetition takes its prompts from."""

    options: RunOptions
    scenarios: tuple[ScenarioPlan, ...]
    first_numbers: dict[tuple[str, str, str, int], int]

    def first_number(self, cell: Cell, repetition: int) -> int:
        """Number of the first prompt; repetition -1 is the warm-up."""
        return self.first_numbers[cell.scenario, cell.model, cell.id, repetition]

    def variant_label(self, scenario: str, variant: str) -> str:
        """A variant's name in run.json: with its scenario where another has a different variant of that name."""
        same_name = [v.switches for plan in self.scenarios for v in plan.variants if v.name == variant]
        return variant if all(s == same_name[0] for s in same_name) else f"{scenario}/{variant}"

    def switches(self) -> dict[str, dict[str, str]]:
        """The switches of every variant by its label."""
        return {self.variant_label(p.scenario.name, v.name): v.switches for p in self.scenarios for v in p.variants}


@dataclass(frozen=True)
class Batch:
    """Scenarios that one model is loaded once for, with the room that all of them have."""

    model: str
    plans: tuple[ScenarioPlan, ...]
    needs: Needs


LONGEST_APART = 2
"""Scenarios share a loaded model up to this ratio of their longest requests: captured steps are bounded by it."""


def batches(plans: Sequence[ScenarioPlan]) -> list[Batch]:
    """Model by model, in the order in which models and scenarios were given. The same for a run that is resumed."""
    found: list[Batch] = []
    for model in dict.fromkeys(model for plan in plans for model in plan.models):
        of_model: list[Batch] = []
        for plan in (plan for plan in plans if model in plan.models):
            new = Batch(model, (plan,), plan.needs(model))
            index = next((i for i, batch in enumerate(of_model) if _can_share(batch, new)), None)
            if index is None:
                of_model.append(new)
            else:
                of_model[index] = _joined(of_model[index], new)
        found += of_model
    return found


def _can_share(a: Batch, b: Batch) -> bool:
    """Whether a larger room leaves the figures of both what they are.

    It would not where a workload sets the cache's size, where a contiguous cache divides it into longest requests, or
    where a server is started with limits of its own.
    """
    longest = sorted((a.needs.tokens, b.needs.tokens))
    return longest[1] <= LONGEST_APART * longest[0] and all(
        all(v.target == "in-process" and v.switches["cache"] == "paged" for v in plan.variants)
        and all(cell.cache_tokens is None for cell in plan.cells)
        for plan in (*a.plans, *b.plans)
    )


def _joined(a: Batch, b: Batch) -> Batch:
    needs = Needs(
        max(a.needs.streams, b.needs.streams),
        max(a.needs.tokens, b.needs.tokens),
        max(a.needs.cache_tokens, b.needs.cache_tokens),
    )
    return Batch(a.model, (*a.plans, *b.plans), needs)


def needs_of(cells: Sequence[Cell]) -> Needs:
    """The room for these cells; a cell's own `cache_tokens` replaces what its streams would need."""
    streams = max((_streams(cell) for cell in cells), default=1)
    tokens = max((cell.longest_request for cell in cells), default=1)
    return Needs(streams, tokens, max((_cache_tokens(cell) for cell in cells), default=CACHE_PAGE))


def _cache_tokens(cell: Cell) -> int:
    if cell.cache_tokens is not None:
        return cell.cache_tokens
    pages = -(-cell.longest_request // CACHE_PAGE) + 1
    users = cell.users or 0
    return max(_streams(cell), users) * pages * CACHE_PAGE


def _streams(cell: Cell) -> int:
    """Requests at once that there must be room for; an open loop, which has no bound, queues what is beyond its own."""
    return min(cell.most_streams, MOST_OPEN_STREAMS) if cell.workload == "open" else cell.most_streams


def make_plan(options: RunOptions, endpoint_model: str | None = None) -> Plan:
    """The plan of a run; raises UserError for whatever in it does not exist or cannot be.

    `endpoint_model`: what the endpoint serves, for a run against one that names no model.
    """
    if options.endpoint is not None and options.set_switches:
        raise UserError("--set turns switches of the bundled engine; an endpoint has none: leave one of the two out")
    if options.stages < 1:
        raise UserError(f"--stages {options.stages}: a model has at least one stage")
    loaded = [scenarios.load(name) for name in dict.fromkeys(options.scenarios)]
    plans = tuple(_plan_scenario(one, options, endpoint_model) for one in loaded)
    seen = [plan.scenario.name for plan in plans]
    for name in seen:
        if seen.count(name) > 1:
            raise UserError(f"two scenario files have the name '{name}': give one of them another name")
    for scenario in (plan.scenario for plan in plans if plan.scenario.repetitions > MOST_REPETITIONS):
        raise UserError(
            f"scenario '{scenario.name}': {scenario.repetitions:,} repetitions; {MOST_REPETITIONS:,} are the most"
        )
    for cell in (cell for plan in plans for cell in plan.cells):
        tokens = workloads.request_count(cell) * cell.longest_prompt
        if tokens > MOST_PROMPT_TOKENS:
            raise UserError(
                f"cell {cell.id}: its prompts have {tokens:,} tokens together and {MOST_PROMPT_TOKENS:,} is the most; "
                "take fewer or shorter ones"
            )
    if not any(plan.cells for plan in plans):
        raise UserError("nothing is left to measure: the scenario has no workload for these models and variants")
    return Plan(options, plans, _number_prompts(plans))


def _plan_scenario(loaded: LoadedScenario, options: RunOptions, endpoint_model: str | None) -> ScenarioPlan:
    scenario = scenarios.override(loaded.scenario, options.overrides)
    if options.endpoint is not None:
        variants, notes = [Variant(ENDPOINT_VARIANT, None, {}, ENDPOINT_VARIANT)], []
        named = options.overrides.models
        models = list(named) if named else [endpoint_model or scenario.models[0]]
    else:
        variants, notes = _variants(scenario, options.set_switches, loaded.source)
        models = [_checked_model(name, options.weights) for name in _asked_models(scenario, options)]
    models = list(dict.fromkeys(models))
    cells = scenarios.cells_of(scenario, models, [variant.name for variant in variants])
    ignored = scenarios.without_meaning(scenario, options.overrides)
    notes += [f"{scenario.name}: {option} means nothing to this scenario and is ignored" for option in ignored]
    notes += shortened(loaded.scenario, scenario)
    fresh = frozenset(published.timed_starts(scenario.name))
    return ScenarioPlan(loaded, scenario, tuple(models), tuple(variants), tuple(cells), tuple(notes), fresh)


def shortened(own: Scenario, asked: Scenario) -> list[str]:
    """A note for each length of a sustained window that the command line changed."""
    pairs = [(a.duration_s, b.duration_s) for a, b in zip(own.workloads, asked.workloads, strict=True)
             if isinstance(a, Sustained) and isinstance(b, Sustained) and a.duration_s != b.duration_s]  # fmt: skip
    return [
        f"{own.name}: sustained windows of {b:g} s in place of the scenario's {a:g} s (--duration)"
        for a, b in dict.fromkeys(pairs)
    ]


def _asked_models(scenario: Scenario, options: RunOptions) -> Sequence[str]:
    if options.weights == "random" or options.overrides.models:
        return scenario.models
    if (Path(options.weights) / "config.json").is_file() or _is_published(options.weights):
        return [options.weights]
    raise UserError(f"--weights {options.weights}: name the model that they are of with --model")


def _is_published(name: str) -> bool:
    return bundled.canonical_model(name) in bundled.model_names()


def _checked_model(name: str, weights: str) -> str:
    canonical = bundled.canonical_model(name)
    if not (Path(name) / "config.json").is_file():
        bundled.model_facts(canonical)
    return canonical


def _variants(scenario: Scenario, pairs: Sequence[str], source: str) -> tuple[list[Variant], list[str]]:
    """The variants with `--set` applied: those that are themselves the other value of a set switch are left out."""
    asked = parse_switches(pairs)
    bundled.resolve_switches("best", asked)
    specs = scenario.all_variants()
    agreeing = {
        name: spec
        for name, spec in specs.items()
        if all(spec.switches.get(switch, value) == value for switch, value in asked.items())
    }
    notes = [
        f"variant '{name}' is left out: it contradicts --set" for name in specs if agreeing and name not in agreeing
    ]
    variants: list[Variant] = []
    for name, spec in (agreeing or specs).items():
        try:
            switches = bundled.resolve_switches(spec.preset, spec.switches | asked)
        except UserError as error:
            raise UserError(f"{source}: variants.{name}: {error}") from None
        target = spec.target or scenario.target
        twin = next((v.name for v in variants if asked and (v.switches, v.target) == (switches, target)), None)
        if twin is None:
            variants.append(Variant(name, spec.preset, switches, target))
        else:
            notes.append(f"variant '{name}' is left out: with --set it is the same as '{twin}'")
    return variants, notes


def device_of(asked: str) -> str:
    """The torch device for what the user asked for; raises UserError for a GPU that is not there."""
    if asked not in ("auto", "cuda", "cpu"):
        gpu = " (CUDA_VISIBLE_DEVICES chooses among GPUs)" if asked.startswith("cuda") else ""
        raise UserError(f"--device {asked}: it is auto, cuda or cpu{gpu}")
    if asked == "auto":
        return bundled.default_device()
    if asked == "cuda" and bundled.default_device() == "cpu":
        raise UserError(f"--device {asked}: torch finds no GPU here; use --device cpu")
    return asked


def parse_switches(pairs: Sequence[str]) -> dict[str, str]:
    """`switch=value` pairs as a dict; raises UserError for what is no pair."""
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (equals and name and value):
            raise UserError(f"--set {pair}: write it as switch=value, for example --set kernels=fused")
        name, value = name.strip(), value.strip()
        if values.setdefault(name, value) != value:
            raise UserError(
                f"--set {name}: it is given both as {values[name]} and as {value}; leave one of the two out"
            )
    return values


def _number_prompts(plans: Sequence[ScenarioPlan]) -> dict[tuple[str, str, str, int], int]:
    """First prompt numbers by (scenario, model, cell, repetition); the same for every variant."""
    numbers: dict[tuple[str, str, str, int], int] = {}
    following = 0
    for plan in plans:
        for repetition in range(-1, plan.scenario.repetitions):
            for cell in plan.cells:
                key = (cell.scenario, cell.model, cell.id, repetition)
                if cell.workload == "kernels" or key in numbers:
                    continue
                numbers[key] = following
                following += workloads.warm_up_count(cell) if repetition < 0 else workloads.request_count(cell)
    return numbers
