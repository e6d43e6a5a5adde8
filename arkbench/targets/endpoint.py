"""Finds out how an endpoint wants to be asked: which route, token ids or text, which options it takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn
from urllib.parse import urlsplit

import httpx

from arkbench.targets._exchange import Exchange
from arkbench.targets._job import BodyForm, Endpoint, PromptForm
from arkbench.targets.base import Answer, TargetError

_PROBE_TIMEOUT_S = 120.0
_STREAM = {"stream": True, "temperature": 0}
_USAGE = {"stream_options": {"include_usage": True}}
_RUNNING_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
# From the most an endpoint may understand to the least; what is missing becomes a note.
_OPTIONS: tuple[tuple[dict[str, Any], str], ...] = (
    ({**_STREAM, **_RUNNING_USAGE, "ignore_eos": True, "min_tokens": 1, "return_token_ids": True}, ""),
    ({**_STREAM, **_RUNNING_USAGE, "ignore_eos": True, "min_tokens": 1}, ""),
    ({**_STREAM, **_USAGE, "ignore_eos": True, "min_tokens": 1}, ""),
    ({**_STREAM, **_USAGE, "ignore_eos": True}, ""),
    ({**_STREAM, **_USAGE}, "the endpoint does not take ignore_eos: answers may end before their length"),
    (_STREAM, "the endpoint reports no usage: tokens are counted as pieces, prompt lengths are unconfirmed"),
)
_PROBE_PROMPT = tuple(range(100, 116))


@dataclass(frozen=True)
class Probed:
    """What an endpoint is asked with, the model card it shows, and what is worth a note."""

    endpoint: Endpoint
    form: BodyForm
    card: dict[str, Any]
    notes: tuple[str, ...]


def parse_url(url: str, api_key: str | None) -> Endpoint:
    """An endpoint from what a user types: a bare address gets /v1. Raises TargetError."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        port = None
    if parts.scheme not in ("http", "https") or not parts.hostname or port is None:
        raise TargetError(f"'{url}' is no endpoint: give a URL such as http://127.0.0.1:8000/v1")
    headers = (("Authorization", f"Bearer {api_key}"),) if api_key else ()
    path = parts.path.rstrip("/") or "/v1"
    for route in ("/chat/completions", "/completions", "/models"):
        path = path.removesuffix(route)
    return Endpoint(parts.scheme, parts.hostname, port, path, headers)


def served_model(url: str, api_key: str | None, named: Sequence[str] | None) -> str:
    """The model that an endpoint serves: the first that it lists, or the first of those named.

    Raises TargetError when the endpoint does not answer, or lists its models and the named one is not among them.
    """
    endpoint = parse_url(url, api_key)
    with _client(endpoint) as http:
        cards = _cards(http, endpoint)
    if not named:
        return next(iter(cards)) if cards else _no_models(endpoint)
    if cards and named[0] not in cards:
        raise TargetError(f"{endpoint.base} does not serve '{named[0]}': it lists {', '.join(list(cards)[:8])}")
    return named[0]


def probe(endpoint: Endpoint, model: str | None) -> Probed:
    """Asks the endpoint for its models and for a few tokens; raises TargetError with the mend."""
    with _client(endpoint) as http:
        cards = _cards(http, endpoint)
        if model is None and not cards:
            _no_models(endpoint)
        card = next(iter(cards.values())) if model is None else cards.get(model, {"id": model})
        form, note = _accepted_form(http, endpoint, card["id"])
        notes = [note] if note else []
        if form.prompt != "ids":
            form, calibration = _calibrated(http, endpoint, form)
            notes.append(calibration)
    return Probed(endpoint, form, card, tuple(notes))


def _client(endpoint: Endpoint) -> httpx.Client:
    return httpx.Client(headers=dict(endpoint.headers), timeout=_PROBE_TIMEOUT_S, trust_env=False)


def _cards(http: httpx.Client, endpoint: Endpoint) -> dict[str, dict[str, Any]]:
    """The models that the endpoint lists, by their id; empty when it has no list."""
    try:
        response = http.get(endpoint.base + "/models")
    except httpx.HTTPError as error:
        raise TargetError(f"{endpoint.base} does not answer ({error}): start the server or mend --endpoint") from None
    if response.status_code in (401, 403):
        raise TargetError(f"{endpoint.base} wants an API key (HTTP {response.status_code}): give --api-key")
    try:
        cards = response.json()["data"] if response.status_code == 200 else []
        return {card["id"]: card for card in cards if isinstance(card["id"], str)}
    except (ValueError, KeyError, TypeError):
        return {}


def _no_models(endpoint: Endpoint) -> NoReturn:
    raise TargetError(f"{endpoint.base}/models lists no model: give --model")


def _accepted_form(http: httpx.Client, endpoint: Endpoint, model: str) -> tuple[BodyForm, str]:
    prompts: tuple[PromptForm, ...] = ("ids", "text", "chat")
    last = ""
    for prompt in prompts:
        for options, note in _OPTIONS:
            form = BodyForm(model, prompt, options)
            answer = _ask(http, endpoint, form, _PROBE_PROMPT)
            if answer.status == "ok" and answer.output_tokens:
                return form, note
            last = answer.error or "an answer without tokens"
            if last.startswith(("HTTP 401", "HTTP 403")):
                raise TargetError(f"{endpoint.base} wants an API key ({last}): give --api-key")
            if last.startswith(("HTTP 404", "HTTP 405")):
                break
    raise TargetError(f"{endpoint.base} answers no completion for model '{model}': {last}")


def _calibrated(http: httpx.Client, endpoint: Endpoint, form: BodyForm) -> tuple[BodyForm, str]:
    """What the endpoint's template adds and what a word costs, from the usage of two prompts."""
    counts = []
    for words in (16, 80):
        answer = _ask(http, endpoint, form, tuple(range(words)))
        counts.append((words, answer.prompt_tokens))
    (short, a), (long, b) = counts
    if not a or not b or b <= a:
        return form, "prompts are sent as text, their length in tokens unconfirmed by the endpoint"
    per_word = (b - a) / (long - short)
    form = replace(form, tokens_per_word=per_word, text_overhead=a - per_word * short)
    return form, "prompts are sent as text: the endpoint does not take token ids"


def _ask(http: httpx.Client, endpoint: Endpoint, form: BodyForm, prompt: tuple[int, ...]) -> Answer:
    exchange = Exchange(Answer(0, time.monotonic()))
    clean = False
    try:
        with http.stream("POST", endpoint.base + form.path, content=form.build(prompt, 2), headers=_JSON) as response:
            exchange.head(response.status_code, response.headers.get("content-type", ""))
            for data in response.iter_raw():
                exchange.body(data, time.monotonic())
            clean = True
    except httpx.HTTPError as error:
        exchange.fail(f"{type(error).__name__}: {error}")
    return exchange.end(clean)


_JSON = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
