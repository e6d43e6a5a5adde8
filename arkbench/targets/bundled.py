"""The bundled engine as an in-process target, and what the harness asks about its models and switches.

This is the only file of the harness that imports `engine`.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from arkbench import published
from arkbench.errors import UserError
from arkbench.targets._timeline import TimelineFile
from arkbench.targets.base import Answer, Load, LoadReport, PlannedRequest, TargetError, TargetInfo
from engine import models as engine_models
from engine.config import PRESETS, EngineConfig, EngineError, Switches, to_plain
from engine.request import Request, SamplingParams, TokenEvent

EXACT_SWITCHES = ("decode_batching", "loop", "prefill", "prefill_batching", "cache", "prompt_cache")
"""Switches that must not change a single token; the others stay inside stated error bounds."""

IDLE_WAIT_S = 0.0005

SERVED_LENGTH = 131_072
"""Longest request that `serve` takes, tokens, where model and cache allow more."""


# ----------------------------------------------------------------------------------- switches, presets, models


def resolve_switches(preset: str, values: dict[str, str]) -> dict[str, str]:
    """Every switch of a preset with some set otherwise; raises UserError naming what does not exist."""
    if preset not in PRESETS:
        raise UserError(f"unknown preset '{preset}': the presets are {', '.join(PRESETS)}")
    try:
        return PRESETS[preset].with_(values).as_dict()
    except EngineError as error:
        raise UserError(str(error)) from None


def switch_choices() -> dict[str, tuple[str, ...]]:
    """Every switch with its values."""
    return Switches.choices()


def presets() -> dict[str, dict[str, str]]:
    """Every preset with its switches."""
    return {name: switches.as_dict() for name, switches in PRESETS.items()}


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model before it is loaded; bytes a token at 4 and at 16 bit, cache bytes at 8 and 16."""

    name: str
    vocab: int
    parameters: int
    active_parameters: int
    matrix_parameters: int
    decode_bytes_4bit: int
    decode_bytes_16bit: int
    cache_bytes_8bit: int
    cache_bytes_16bit: int
    state_bytes: int

    def weight_bytes(self, weights_dtype: str) -> int:
        """Bytes of all weights as the engine holds them: the matrices in `weights_dtype`, the input table in 16 bit."""
        bits = {"int4": 4.25, "bf16": 16, "fp16": 16, "fp32": 32}[weights_dtype]
        return int(self.parameters * bits / 8)

    def step_bytes(self, weights_dtype: str) -> int:
        """Bytes of weights that a step of one stream reads."""
        if weights_dtype == "int4":
            return self.decode_bytes_4bit
        return self.decode_bytes_16bit * (2 if weights_dtype == "fp32" else 1)

    def cache_bytes(self, cache_dtype: str) -> int:
        return self.cache_bytes_8bit if cache_dtype in ("fp8", "int8") else self.cache_bytes_16bit


def model_names() -> list[str]:
    """The published models, in the order of the catalogue."""
    return list(engine_models.catalogue_entries())


def canonical_model(name: str) -> str:
    """The published spelling of a model's name; a name that the catalogue does not have stays as it is."""
    base, cut, layers = name.partition("@layers=")
    try:
        return engine_models.published_name(base) + cut + layers
    except EngineError:
        return name


def model_facts(name: str) -> ModelFacts:
    """What is known of a published model, or of one cut to its first layers; raises UserError."""
    base, _, cut_to = name.partition("@layers=")
    try:
        entry = engine_models.published(base)
        canonical = engine_models.published_name(base)
    except EngineError as error:
        raise UserError(str(error)) from None
    config = entry["config"]
    layers = config["num_hidden_layers"]
    if cut_to and not (cut_to.isdigit() and 1 <= int(cut_to) <= layers):
        raise UserError(f"model '{name}': layers must be a number from 1 to {layers}")
    part = int(cut_to) / layers if cut_to else 1.0
    tied = config["tie_word_embeddings"]
    table = config["vocab_size"] * config["hidden_size"]

    def cut(value: int, outside: float = 0.0) -> int:
        """The value of the cut model: what the layers have shrinks with them, what is outside stays."""
        return round((value - outside) * part + outside)

    tables = table if tied else 2 * table
    return ModelFacts(
        name=canonical + (f"@layers={cut_to}" if cut_to else ""),
        vocab=config["vocab_size"],
        parameters=cut(entry["parameters"], tables),
        active_parameters=cut(entry["active_parameters"], tables),
        matrix_parameters=cut(entry["active_parameters"], tables) - (0 if tied else table),
        decode_bytes_4bit=cut(entry["decode_bytes_4bit"], table * 4.125 / 8),
        decode_bytes_16bit=cut(entry["decode_bytes_bf16"], 2 * table),
        cache_bytes_8bit=cut(entry["cache_bytes_8bit"]),
        cache_bytes_16bit=cut(entry["cache_bytes_16bit"]),
        state_bytes=cut(entry["state_bytes"]),
    )


def default_device() -> str:
    """`cuda` where this machine has a GPU that torch can use, else `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def measure_kernels(part: str, rows: tuple[int, ...], device: str) -> list[dict[str, Any]]:
    """The rows of one part of the engine's kernel bench (see engine/kernels/bench.py); raises TargetError.

    Products stand beside what another kernel of the field took on another occasion (published/peers.csv).
    """
    from engine.kernels import bench

    try:
        found = bench.measure(part, rows, device)
    except EngineError as error:
        raise TargetError(str(error)) from None
    if part == "products":
        peers = {(f"{p['n']}x{p['k']}", int(p["rows"])): float(p["marlin_us"]) for p in published.table("peers")}
        for row in found:
            row["marlin_h200_measured_earlier_us"] = peers.get((row["shape"], row["rows"]))
    return found


def serve(base: dict[str, Any], switches: dict[str, str], cache_tokens: int | None, **server: Any) -> int:
    """The bundled engine behind its API until SIGTERM; returns the exit code. `base`, `server`: their configurations.

    The longest request is what the model's positions allow, within the cache where its room was given.
    """
    from engine.server import ServerConfig
    from engine.server import serve as serve_engine

    try:
        longest = engine_models.model_config(base["model"]).max_positions
    except EngineError as error:
        raise UserError(str(error)) from None
    config = EngineConfig(
        **base,
        switches=Switches(**switches),  # type: ignore[arg-type]
        max_streams=server["max_concurrent"],
        max_model_len=min(longest, cache_tokens or longest, SERVED_LENGTH),
        cache_tokens=cache_tokens,
    )
    return serve_engine(ServerConfig(engine=config, **server))


def is_further_stage() -> bool:
    """Whether torchrun started this process as a stage that is not the first: it then only serves the first."""
    return _torchrun_rank() > 0


def serve_stage() -> None:
    """Serves the engines of stage 0's process until that process calls `end_stages`."""
    from engine.resident import serve_under_torchrun

    try:
        serve_under_torchrun()
    except EngineError as error:
        raise UserError(str(error)) from None


def end_stages() -> None:
    """Under torchrun: tells the further stages that no engine follows."""
    if _torchrun_rank() == 0:
        from engine.peers import end_torchrun_stages

        end_torchrun_stages()


def _torchrun_rank() -> int:
    """The rank that torchrun gave this process; -1 without torchrun."""
    return int(os.environ["RANK"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else -1


# --------------------------------------------------------------------------------------------------- the target


@dataclass
class _Live:
    """A request that the engine works on, and what has come of it."""

    planned: PlannedRequest
    answer: Answer
    key: str


@dataclass
class _Session:
    """The state of one load. `resident`: requests in the cache at each step that left others waiting."""

    load: Load
    release: float
    on_answer: Callable[[Answer], None]
    waiting: dict[int, list[PlannedRequest]] = field(default_factory=dict)
    live: dict[str, _Live] = field(default_factory=dict)
    free_streams: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)

    @property
    def ends(self) -> float:
        """When what still runs is cut."""
        last = max((r.offset_s for r in self.load.requests), default=0.0) if self.load.mode == "open" else 0.0
        return self.release + max(self.load.duration_s or 0.0, last) + self.load.grace_s


class BundledTarget:
    """The bundled engine, driven from the caller's thread: a step, the tokens it made, the next step."""

    def __init__(self, model: str, weights: str, device: str, stages: int, seed: int) -> None:
        self._base = {"model": model, "weights": weights, "device": device, "stages": stages, "seed": seed}
        self._timeline = TimelineFile(stages)
        self._engine: Any = None
        self._config: EngineConfig | None = None
        self._loads = 0

    def start(self, switches: dict[str, str], max_streams: int, max_tokens: int, cache_tokens: int) -> TargetInfo:
        """Loads the model, or turns the switches of the loaded one where that is all that differs."""
        config = EngineConfig(
            **self._base,
            switches=Switches(**switches),  # type: ignore[arg-type]
            max_streams=max_streams,
            max_model_len=max_tokens,
            cache_tokens=cache_tokens,
            timeline=self._timeline.path,
        )
        from engine.engine import Engine

        before = None
        try:
            if self._engine is not None and self._same_but_switches(config):
                before = self._engine.info
                self._finish_work()
                self._engine.set_switches(config.switches)
            else:
                self.close()
                self._engine = Engine.load(config)
        except EngineError as error:
            self._engine = None
            raise TargetError(str(error)) from None
        except KeyboardInterrupt:
            self._engine = None  # half turned or half loaded: nothing of it can be used or closed in order
            raise
        self._config = config
        return self._info(loaded=self._engine.info is not before)

    def _same_but_switches(self, config: EngineConfig) -> bool:
        return self._config is not None and asdict(self._config) | {"switches": None} == asdict(config) | {
            "switches": None
        }

    def _finish_work(self) -> None:
        """Steps until nothing is left of requests that were cut."""
        while self._engine.has_work():
            self._engine.step()

    def _info(self, loaded: bool) -> TargetInfo:
        assert self._config is not None
        info = self._engine.info
        geometry = engine_models.model_config(self._config.model)
        known = canonical_model(self._config.model).partition("@layers=")[0] in engine_models.catalogue_entries()
        return TargetInfo(
            name="bundled engine",
            model=info.model,
            device=info.device,
            in_process=True,
            step_weight_bytes=info.step_weight_bytes,
            cache_bytes_per_token=info.cache_bytes_per_token,
            state_bytes_per_request=info.state_bytes_per_request,
            active_parameters=model_facts(self._config.model).matrix_parameters if known else None,
            vocab=geometry.vocab,
            geometry=to_plain(geometry),
            start_seconds=dict(info.start_seconds),
            loaded=loaded,
            notes=(f"weights: {info.quantized}", *info.notes),
        )

    def run(self, load: Load, on_answer: Callable[[Answer], None]) -> LoadReport:
        session = _Session(load, time.monotonic(), on_answer)
        for planned in sorted(load.requests, key=lambda r: (r.offset_s, r.request)):
            session.waiting.setdefault(planned.stream if load.mode == "closed" else 0, []).append(planned)
        for queue in session.waiting.values():
            queue.reverse()
        self._loads += 1
        self._timeline.take()
        try:
            self._drive(session)
        except KeyboardInterrupt:
            self._cut(session, "interrupted")
            raise
        except EngineError as error:
            self._fail_all(session, str(error))
            self.close()
            raise TargetError(f"the engine stopped: {error}") from None
        resident = session.resident
        return LoadReport(
            resident_requests=sum(resident) / len(resident) if resident else None, timeline=self._timeline.take()
        )

    def _drive(self, session: _Session) -> None:
        if session.load.mode == "closed":
            session.free_streams = list(session.waiting)
        while session.live or any(session.waiting.values()):
            self._send_due(session)
            self._check_times(session)
            if self._engine.has_work():
                for event in self._engine.step():
                    self._take(session, event)
                running, waiting = self._engine.occupancy
                if waiting:
                    session.resident.append(running)
            elif session.live:
                self._fail_all(session, "the engine has no work left but has not answered")
            elif any(session.waiting.values()) and not session.free_streams:
                time.sleep(IDLE_WAIT_S)

    def _send_due(self, session: _Session) -> None:
        if session.load.mode == "closed":
            while session.free_streams:
                self._next_of_stream(session, session.free_streams.pop(0))
            return
        queue = session.waiting.get(0, [])
        while queue and time.monotonic() >= session.release + queue[-1].offset_s:
            self._send(session, queue.pop())

    def _next_of_stream(self, session: _Session, stream: int) -> None:
        queue = session.waiting.get(stream, [])
        over = session.load.duration_s is not None and time.monotonic() >= session.release + session.load.duration_s
        if over:
            queue.clear()
        elif queue:
            self._send(session, queue.pop())

    def _send(self, session: _Session, planned: PlannedRequest) -> None:
        now = time.monotonic()
        scheduled = session.release + planned.offset_s if session.load.mode != "closed" else now
        answer = Answer(planned.request, scheduled, sent=session.release if session.load.mode == "burst" else now)
        answer.prompt_tokens = len(planned.prompt)
        answer.tokens = []
        key = f"{self._loads}-{planned.request}"
        session.live[key] = _Live(planned, answer, key)
        sampling = SamplingParams(max_tokens=planned.output_tokens, temperature=0.0, ignore_eos=True)
        try:
            self._engine.add(Request(key, planned.prompt, sampling))
        except EngineError as error:
            self._end(session, key, "failed", str(error))

    def _take(self, session: _Session, event: TokenEvent) -> None:
        live = session.live.get(event.request_id)
        if live is None:
            return
        answer = live.answer
        if event.tokens:
            if not answer.piece_times:
                answer.cached_tokens = event.cached_tokens
            answer.piece_times.append(event.time_s)
            answer.piece_counts.append(len(event.tokens))
            answer.output_tokens += len(event.tokens)
            assert answer.tokens is not None
            answer.tokens.extend(event.tokens)
        if event.finished in ("length", "stop"):
            self._end(session, live.key, "ok")
        elif event.finished is not None:
            self._end(session, live.key, "failed", event.error or f"the engine ended the request ({event.finished})")

    def _end(self, session: _Session, key: str, status: str, error: str | None = None) -> None:
        live = session.live.pop(key)
        live.answer.status = status  # type: ignore[assignment]
        live.answer.error = error
        session.on_answer(live.answer)
        if session.load.mode == "closed":
            session.free_streams.append(live.planned.stream)

    def _check_times(self, session: _Session) -> None:
        now = time.monotonic()
        if now >= session.ends:
            self._cut(session, "still running after the grace time")
            return
        limit = session.load.first_token_timeout_s
        late = [
            key
            for key, live in session.live.items()
            if not live.answer.piece_times and live.answer.sent is not None and now - live.answer.sent > limit
        ]
        for key in late:
            self._engine.cancel(key)
            self._end(session, key, "timeout", f"no first token within {limit:g} s")

    def _cut(self, session: _Session, why: str) -> None:
        session.waiting.clear()
        for key in list(session.live):
            self._engine.cancel(key)
            self._end_without_next(session, key, "cancelled", why)

    def _fail_all(self, session: _Session, error: str) -> None:
        session.waiting.clear()
        for key in list(session.live):
            self._end_without_next(session, key, "failed", error)

    @staticmethod
    def _end_without_next(session: _Session, key: str, status: str, error: str) -> None:
        answer = session.live.pop(key).answer
        answer.status = status  # type: ignore[assignment]
        answer.error = error
        session.on_answer(answer)

    def next_token(self, prompt: Sequence[int]) -> Mapping[int, float]:
        """By one greedy step of the running variant, prompt cache and all."""
        sampling = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=self._engine.model.vocab)
        events: list[TokenEvent] = []
        try:
            self._finish_work()
            self._engine.add(Request("next-token", prompt, sampling))
            while self._engine.has_work():
                events += self._engine.step()
        except EngineError as error:
            raise TargetError(str(error)) from None
        return next(event.logprobs[0][1] for event in events if event.logprobs)

    def close(self) -> None:
        """Gives the model's memory back, of an engine that failed at its start too."""
        engine, self._engine, self._config = self._engine, None, None
        try:
            if engine is not None:
                engine.close()
        finally:
            del engine
            gc.collect()
            if str(self._base["device"]).startswith("cuda"):
                import torch

                torch.cuda.empty_cache()
