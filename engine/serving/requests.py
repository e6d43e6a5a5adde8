"""What clients may ask for: the bodies of the two completion routes, checked and turned into engine requests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from engine.request import SamplingParams
from engine.tokens import Tokenizer


class ApiError(Exception):
    """An answer with an error status; the message is one line for the client."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": None, "code": self.status}}


class _Object(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, value: Any) -> Any:
        return {key: given for key, given in value.items() if given is not None} if isinstance(value, dict) else value


class StreamOptions(_Object):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Body(_Object):
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    seed: int | None = None
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    return_token_ids: bool = False
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None


class CompletionBody(_Body):
    prompt: Any = None
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    best_of: int = 1
    suffix: str | None = None


class ChatBody(_Body):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Call:
    """A checked request: one prompt or several, and how the answers are wanted."""

    kind: Literal["completion", "chat"]
    prompts: tuple[list[int], ...]
    sampling: SamplingParams
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    running_usage: bool
    token_ids: bool


@dataclass(frozen=True)
class Limits:
    """What a request may not exceed: the model's vocabulary, prompt plus answer, prompts in one request."""

    vocab: int
    max_model_len: int
    max_prompts: int


def parse_completion(raw: bytes, model: str, tokenizer: Tokenizer, limits: Limits) -> Call:
    """A /v1/completions body; raises ApiError."""
    body = _validate(CompletionBody, raw, model)
    _refuse(body, echo=body.echo, best_of=body.best_of != 1, suffix=bool(body.suffix))
    prompts = _prompts(body.prompt, tokenizer, limits)
    return _call("completion", body, prompts, body.max_tokens or 16, body.logprobs, limits)


def parse_chat(raw: bytes, model: str, tokenizer: Tokenizer, limits: Limits) -> Call:
    """A /v1/chat/completions body; raises ApiError."""
    body = _validate(ChatBody, raw, model)
    _refuse(body, tools=bool(body.tools))
    try:
        prompt = list(tokenizer.apply_chat_template([_message(m) for m in body.messages]))
    except ApiError:
        raise
    except Exception as error:
        raise ApiError(400, f"messages: the model's chat template refuses them: {error}") from None
    prompts = _prompts(prompt, tokenizer, limits)
    wanted = body.max_completion_tokens or body.max_tokens or limits.max_model_len - len(prompt)
    return _call("chat", body, prompts, wanted, body.top_logprobs if body.logprobs else None, limits)


def _validate(kind: type[_Body], raw: bytes, model: str) -> Any:
    try:
        value = json.loads(raw)
        if b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode()
        body = kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise ApiError(400, f"{where}: {first['msg']}") from None
    except UnicodeEncodeError:
        raise ApiError(400, "the body holds half of a surrogate pair, which is no text") from None
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON") from None
    if body.model is not None and body.model != model:
        raise ApiError(404, f"model: '{body.model}' is not served here, '{model}' is", "not_found_error")
    return body


def _refuse(body: _Body, **unsupported: bool) -> None:
    unsupported["n (more than one answer a prompt)"] = body.n != 1
    unsupported["presence_penalty"] = body.presence_penalty != 0
    unsupported["frequency_penalty"] = body.frequency_penalty != 0
    unsupported["logit_bias"] = bool(body.logit_bias)
    unsupported["response_format"] = bool(body.response_format) and body.response_format.get("type") != "text"
    for name, present in unsupported.items():
        if present:
            raise ApiError(400, f"{name} is not supported by this server: leave it out")


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its content as one text."""
    content = message.get("content")
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise ApiError(400, "messages: only parts of type 'text' are supported")
        content = "".join(part.get("text", "") for part in content)
    if not isinstance(message.get("role"), str) or not isinstance(content, str):
        raise ApiError(400, "messages: every message needs a role and a content")
    return {**message, "content": content}


def _prompts(prompt: Any, tokenizer: Tokenizer, limits: Limits) -> tuple[list[int], ...]:
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    items = prompt if several else [prompt]
    if len(items) > limits.max_prompts:
        raise ApiError(400, f"prompt: {len(items)} prompts in one request, the limit is {limits.max_prompts}")
    return tuple(_prompt_ids(item, tokenizer, limits) for item in items)


def _prompt_ids(prompt: Any, tokenizer: Tokenizer, limits: Limits) -> list[int]:
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise ApiError(400, "prompt: give a text, a list of token ids, or a list of these")
    if not ids:
        raise ApiError(400, "prompt: it is empty")
    if len(ids) >= limits.max_model_len:
        raise ApiError(
            400, f"prompt: {len(ids)} tokens leave no room for an answer, the limit is {limits.max_model_len} for both"
        )
    if min(ids) < 0 or max(ids) >= limits.vocab:
        raise ApiError(400, f"prompt: token ids must lie between 0 and {limits.vocab - 1}")
    return ids


def _call(
    kind: Literal["completion", "chat"],
    body: _Body,
    prompts: tuple[list[int], ...],
    max_tokens: int,
    logprobs: int | None,
    limits: Limits,
) -> Call:
    longest = max(len(p) for p in prompts)
    if longest + max_tokens > limits.max_model_len:
        raise ApiError(
            400, f"{longest} prompt tokens and max_tokens {max_tokens} exceed the limit of {limits.max_model_len}"
        )
    if body.min_tokens > max_tokens:
        raise ApiError(400, f"min_tokens: {body.min_tokens} is more than max_tokens {max_tokens}")
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > 16 or "" in stops:
        raise ApiError(400, "stop: give up to 16 strings, none of them empty")
    if any(not 0 <= token < limits.vocab for token in body.stop_token_ids):
        raise ApiError(400, f"stop_token_ids: token ids must lie between 0 and {limits.vocab - 1}")
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_k=min(max(body.top_k, 0), limits.vocab),
        top_p=body.top_p,
        seed=body.seed,
        ignore_eos=body.ignore_eos,
        stop_token_ids=tuple(body.stop_token_ids),
        logprobs=logprobs,
    )
    options = body.stream_options
    running = options.include_usage and options.continuous_usage_stats
    return Call(
        kind, prompts, sampling, tuple(stops), body.stream, options.include_usage, running, body.return_token_ids
    )
