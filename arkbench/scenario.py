"""Scenarios: TOML files that say what is measured, their validation, and their expansion into cells.

A scenario names workloads, variants (sets of switches) and models; every combination is a cell. A cell's id says
what it is (`decode-s16-c1000`: 16 streams at 1,000 tokens of context), is safe as a file name, and is the same for
every variant, so that variants compare cell by cell. In a scenario of several models the id begins with the model.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from arkbench.errors import UserError
from arkbench.paths import scenarios_dir

WorkloadType = Literal["decode", "prefill", "burst", "sustained", "open", "conversation", "kernels"]
TargetKind = Literal["in-process", "http"]
ENDPOINT_VARIANT = "endpoint"


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _no_repeats(values: list[Any]) -> list[Any]:
    if len(set(values)) != len(values):
        raise ValueError("the same value stands in it twice")
    return values


PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, gt=0)]
Counts = Annotated[list[Count], BeforeValidator(_as_list), Field(min_length=1), AfterValidator(_no_repeats)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MixPart(_Strict):
    """A prompt length and its share of the requests (shares are relative to each other)."""

    tokens: Count
    share: PositiveFloat


class WorkloadBase(_Strict):
    """What every workload has: which variants and models it is for, and the cache it needs beside its own streams."""

    variants: list[str] | None = None
    models: list[str] | None = None
    except_models: list[str] = []
    cache_tokens: Count | None = None


class Decode(WorkloadBase):
    """N streams start together with prompts of `context_tokens`; speed is taken in the steady window."""

    type: Literal["decode"]
    streams: Counts
    context_tokens: Counts
    output_tokens: Counts = [128]


class Prefill(WorkloadBase):
    """One prompt at a time. `cold`: it is the first request after a start, with no warm-up before it."""

    type: Literal["prefill"]
    prompt_tokens: Counts
    output_tokens: Counts = [1]
    cold: bool = False


class _PromptLengths(WorkloadBase):
    """Prompts of one length a cell (`prompt_tokens`) or of a mix of lengths in every cell (`prompt_mix`)."""

    prompt_tokens: Counts | None = None
    prompt_mix: list[MixPart] = []

    @model_validator(mode="after")
    def _one_of_them(self) -> _PromptLengths:
        if (self.prompt_tokens is None) == (not self.prompt_mix):
            raise ValueError("give prompt_tokens or prompt_mix, one of the two")
        return self


class Burst(_PromptLengths):
    """`at_once` prompts released at the same moment."""

    type: Literal["burst"]
    at_once: Counts
    output_tokens: Counts = [8]


class Sustained(_PromptLengths):
    """N streams for `duration_s`: each sends its next request when its last has ended."""

    type: Literal["sustained"]
    streams: Counts
    duration_s: PositiveFloat
    output_tokens: Counts = [256]


class Open(_PromptLengths):
    """`requests` requests at Poisson arrivals of `rate_per_s`, whatever the target does."""

    type: Literal["open"]
    rate_per_s: Annotated[list[PositiveFloat], BeforeValidator(_as_list), Field(min_length=1)]
    requests: Count
    output_tokens: Counts = [128]


class Conversation(WorkloadBase):
    """`users` with a common beginning of `shared_tokens`, each going through `turns`; a turn adds `turn_tokens`.

    A turn's prompt is all that was said before it, the answers included. At most `streams` requests run at once.
    """

    type: Literal["conversation"]
    users: Counts
    turns: Counts = [1]
    streams: Counts = [1]
    shared_tokens: Annotated[int, Field(strict=True, ge=0)] = 0
    turn_tokens: Count
    output_tokens: Counts = [32]


class Kernels(WorkloadBase):
    """Single kernels of the bundled engine, measured apart: `parts` of its kernel bench, each at `rows`."""

    type: Literal["kernels"]
    parts: Annotated[list[Name], Field(min_length=1)]
    rows: Counts = [1, 16, 64]


Workload = Annotated[
    Decode | Prefill | Burst | Sustained | Open | Conversation | Kernels,
    Field(discriminator="type"),
]


class VariantSpec(_Strict):
    """A preset, some switches that differ from it, or both. Without a preset: `best`; without a target: the file's."""

    preset: str = "best"
    switches: dict[str, str] = {}
    target: TargetKind | None = None


class Matrix(_Strict):
    """Every combination of the values named for each switch, on top of a preset; a name joins the values."""

    preset: str = "best"
    switches: Annotated[dict[str, Annotated[list[str], Field(min_length=1)]], Field(min_length=1)]

    def variants(self) -> dict[str, VariantSpec]:
        names = list(self.switches)
        combinations = itertools.product(*self.switches.values())
        return {
            "-".join(values): VariantSpec(preset=self.preset, switches=dict(zip(names, values, strict=True)))
            for values in combinations
        }


class Limits(_Strict):
    """Seconds: the longest wait for a first token, and how long past its end a load may run before it is cut."""

    first_token_timeout_s: PositiveFloat = 90.0
    grace_s: PositiveFloat = 120.0


class Scenario(_Strict):
    """A scenario file."""

    name: Name
    title: str
    note: str = ""
    description: str = ""
    target: TargetKind = "in-process"
    models: Annotated[list[str], Field(min_length=1)]
    repetitions: Count = 3
    variants: dict[Name, VariantSpec] = {}
    matrix: Matrix | None = None
    workloads: Annotated[list[Workload], Field(min_length=1)]
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _names_agree(self) -> Scenario:
        if bool(self.variants) and self.matrix is not None:
            raise ValueError("give variants or a matrix, not both")
        known = self.all_variants()
        for number, workload in enumerate(self.workloads):
            for name in workload.variants or ():
                if name not in known:
                    raise ValueError(f"workloads[{number}].variants names '{name}', which is no variant of the file")
        return self

    def all_variants(self) -> dict[str, VariantSpec]:
        """The variants by name; a scenario that names none has the preset `best`."""
        if self.matrix is not None:
            return self.matrix.variants()
        return self.variants or {"best": VariantSpec()}


@dataclass(frozen=True)
class LoadedScenario:
    """A scenario with the text that it came from; `hash` is the text's SHA-256."""

    scenario: Scenario
    text: str
    source: str

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


# ------------------------------------------------------------------------------------------------- loading


def scenario_files() -> dict[str, Path]:
    """The scenarios that ship with the package: name -> file."""
    return {path.stem: path for path in sorted(scenarios_dir().glob("*.toml"))}


def load(name_or_path: str) -> LoadedScenario:
    """A shipped scenario by its name, or any TOML file by its path; raises UserError."""
    shipped = scenario_files()
    path = shipped.get(name_or_path, Path(name_or_path))
    if name_or_path not in shipped and path.suffix != ".toml":
        names = ", ".join(shipped)
        raise UserError(f"unknown scenario '{name_or_path}': there are {names}, or give the path of a .toml file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give an existing scenario file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is no UTF-8 text; save the scenario as UTF-8") from None
    shown = f"scenarios/{path.name}" if name_or_path in shipped else str(path)
    return LoadedScenario(parse(text, shown), text, shown)


def parse(text: str, source: str) -> Scenario:
    """A scenario from its TOML text; `source` names the file in an error. Raises UserError."""
    try:
        return Scenario.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{source}: is not valid TOML: {error}") from None
    except ValidationError as error:
        raise UserError(_first_error(error, source)) from None
    except ValueError as error:  # tomllib passes on what Python says of a number with thousands of digits
        raise UserError(f"{source}: is not valid TOML: {error}") from None
    except RecursionError:
        raise UserError(f"{source}: is nested too deeply") from None


def _first_error(error: ValidationError, source: str) -> str:
    """One line for the first mistake; a misspelt key before the key that it leaves missing."""
    errors = error.errors()
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "unknown key"
    elif first["type"] == "missing":
        message = "is missing"
    elif first["type"] in ("union_tag_not_found", "union_tag_invalid"):
        message = f"type must be one of {', '.join(WorkloadType.__args__)}"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    where = _key_path(first["loc"])
    return f"{source}: {where + ': ' if where else ''}{message[:1].lower() + message[1:]}{more}"


def _key_path(loc: Sequence[str | int]) -> str:
    """('workloads', 0, 'decode', 'streams', 1) -> 'workloads[0].streams[1]': the union's tag is no key of the file."""
    parts = [part for i, part in enumerate(loc) if not (i == 2 and loc[0] == "workloads") and part != "[key]"]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")


# --------------------------------------------------------------------------------------------- what is varied


OPTIONS = {
    "streams": "--streams",
    "context_tokens": "--context",
    "at_once": "--at-once",
    "prompt_tokens": "--prompt-tokens",
    "output_tokens": "--output-tokens",
    "users": "--users",
    "turns": "--turns",
    "shared_tokens": "--shared-tokens",
    "turn_tokens": "--turn-tokens",
    "cache_tokens": "--cache-tokens",
    "duration_s": "--duration",
}
"""Keys of workloads that the command line can replace, with the option of each."""


@dataclass(frozen=True)
class Overrides:
    """What the command line puts in the place of a scenario's own values; None leaves them."""

    models: tuple[str, ...] | None = None
    streams: tuple[int, ...] | None = None
    context_tokens: tuple[int, ...] | None = None
    at_once: tuple[int, ...] | None = None
    prompt_tokens: tuple[int, ...] | None = None
    output_tokens: tuple[int, ...] | None = None
    users: tuple[int, ...] | None = None
    turns: tuple[int, ...] | None = None
    shared_tokens: int | None = None
    turn_tokens: int | None = None
    cache_tokens: int | None = None
    duration_s: float | None = None
    repetitions: int | None = None

    def of_workloads(self) -> dict[str, Any]:
        """Those that replace a key of workloads, as a scenario file would have them."""
        given = {key: value for key in OPTIONS if (value := getattr(self, key)) is not None}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}


def override(scenario: Scenario, overrides: Overrides) -> Scenario:
    """The scenario with the overrides put into every workload that has such a key."""
    values = overrides.of_workloads()
    changes: dict[str, Any] = {"workloads": [_override_workload(workload, values) for workload in scenario.workloads]}
    if overrides.models is not None:
        changes["models"] = list(overrides.models)
    if overrides.repetitions is not None:
        changes["repetitions"] = overrides.repetitions
    return scenario.model_copy(update=changes)


def _has(workload: Workload, key: str) -> bool:
    """Whether a workload has a key that can be replaced; the cache's room only where the file sets one."""
    if key == "cache_tokens":
        return workload.cache_tokens is not None
    return key in type(workload).model_fields


def _override_workload(workload: Workload, values: dict[str, Any]) -> Workload:
    changes = {key: value for key, value in values.items() if _has(workload, key)}
    if "prompt_tokens" in changes and getattr(workload, "prompt_mix", None):
        changes["prompt_mix"] = []
    return workload.model_copy(update=changes)


def without_meaning(scenario: Scenario, overrides: Overrides) -> list[str]:
    """The options of the command line that mean nothing to any workload of this scenario."""
    return [
        OPTIONS[key]
        for key in overrides.of_workloads()
        if not any(_has(workload, key) for workload in scenario.workloads)
    ]


# ------------------------------------------------------------------------------------------------------ cells


@dataclass(frozen=True)
class Cell:
    """One thing that is measured, `repetitions` times. Fields that do not apply to its workload are None."""

    scenario: str
    variant: str
    workload: WorkloadType
    model: str
    id: str
    streams: int | None = None
    context_tokens: int | None = None
    at_once: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    prompt_mix: tuple[tuple[int, float], ...] = ()
    duration_s: float | None = None
    rate_per_s: float | None = None
    requests: int | None = None
    users: int | None = None
    turns: int | None = None
    shared_tokens: int = 0
    turn_tokens: int | None = None
    cold: bool = False
    cache_tokens: int | None = None
    parts: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()

    @property
    def most_streams(self) -> int:
        """Most requests that run at once (an open loop has no bound of its own: all of its requests)."""
        return self.streams or self.at_once or self.requests or 1

    @property
    def longest_prompt(self) -> int:
        if self.workload == "conversation":
            turns = self.turns or 1
            return self.shared_tokens + turns * (self.turn_tokens or 0) + (turns - 1) * (self.output_tokens or 0)
        return max([self.context_tokens or 0, self.prompt_tokens or 0, *(tokens for tokens, _ in self.prompt_mix)])

    @property
    def longest_request(self) -> int:
        """Tokens of the longest request: prompt and answer."""
        return self.longest_prompt + (self.output_tokens or 0)


def cells_of(scenario: Scenario, models: Sequence[str], variants: Sequence[str]) -> list[Cell]:
    """Every cell of a scenario, model by model and variant by variant.

    The variant `endpoint` takes the workloads of all variants: an endpoint is what it is.
    Raises UserError where two cells differ but have the same id.
    """
    cells: dict[tuple[str, str, str], Cell] = {}
    for model, variant in itertools.product(models, variants):
        for workload in scenario.workloads:
            if not _applies(workload, model, variant):
                continue
            for cell in _expand(scenario.name, variant, model, workload):
                if len(models) > 1:
                    cell = replace(cell, id=f"{file_safe(model)}.{cell.id}")
                known = cells.setdefault((model, variant, cell.id), cell)
                if known != cell:
                    raise UserError(f"scenario '{scenario.name}': two workloads make different cells '{cell.id}'")
    return list(cells.values())


def _applies(workload: Workload, model: str, variant: str) -> bool:
    if variant != ENDPOINT_VARIANT and workload.variants is not None and variant not in workload.variants:
        return False
    return (workload.models is None or model in workload.models) and model not in workload.except_models


def _expand(scenario: str, variant: str, model: str, workload: Workload) -> Iterator[Cell]:
    base = Cell(scenario, variant, workload.type, model, "", cache_tokens=workload.cache_tokens)
    if isinstance(workload, Kernels):
        for part in workload.parts:
            yield replace(base, id=f"kernels-{part}", parts=(part,), rows=tuple(workload.rows))
        return
    several_outputs = len(workload.output_tokens) > 1
    for output in workload.output_tokens:
        for cell in _shapes(replace(base, output_tokens=output), workload):
            yield replace(cell, id=f"{cell.id}-o{output}") if several_outputs else cell


def _shapes(base: Cell, workload: Workload) -> Iterator[Cell]:
    if isinstance(workload, Decode):
        for context, streams in itertools.product(workload.context_tokens, workload.streams):
            yield replace(base, id=f"decode-s{streams}-c{context}", streams=streams, context_tokens=context)
    elif isinstance(workload, Prefill):
        for prompt in workload.prompt_tokens:
            suffix = "-cold" if workload.cold else ""
            yield replace(base, id=f"prefill-p{prompt}{suffix}", prompt_tokens=prompt, cold=workload.cold)
    elif isinstance(workload, Conversation):
        for users, turns, streams in itertools.product(workload.users, workload.turns, workload.streams):
            yield replace(
                base,
                id=f"conversation-u{users}-t{turns}-s{streams}-x{workload.shared_tokens}",
                users=users,
                turns=turns,
                streams=streams,
                shared_tokens=workload.shared_tokens,
                turn_tokens=workload.turn_tokens,
            )
    elif isinstance(workload, Burst | Sustained | Open):
        yield from _with_prompts(base, workload)


def _with_prompts(base: Cell, workload: Burst | Sustained | Open) -> Iterator[Cell]:
    mix = tuple((part.tokens, part.share) for part in workload.prompt_mix)
    for prompt in workload.prompt_tokens or [None]:
        length = "mix" if prompt is None else f"p{prompt}"
        cell = replace(base, prompt_tokens=prompt, prompt_mix=mix)
        if isinstance(workload, Burst):
            for at_once in workload.at_once:
                yield replace(cell, id=f"burst-n{at_once}-{length}", at_once=at_once)
        elif isinstance(workload, Sustained):
            for streams in workload.streams:
                yield replace(
                    cell, id=f"sustained-s{streams}-{length}", streams=streams, duration_s=workload.duration_s
                )
        else:
            for rate in workload.rate_per_s:
                yield replace(cell, id=f"open-r{rate:g}-{length}", rate_per_s=rate, requests=workload.requests)


def file_safe(name: str) -> str:
    """A name as part of a file name: what is neither letter, digit, dot, dash nor underscore becomes a dash."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"
