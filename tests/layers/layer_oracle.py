"""What the layer tests share: a transformers model of a tiny configuration, and a decoder over the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from torch import Tensor

from engine.batch import Batch
from engine.cache import Cache
from engine.config import ModelConfig
from engine.layers.build import Build
from engine.models import family, from_hf
from engine.models.decoder import Decoder

PAGE = 16
ORACLES = json.loads((Path(__file__).parents[1] / "data" / "tiny_oracles.json").read_text())


class DictSource:
    """A weight source over a state dict, dense, in the dtype given."""

    weights_dtype = "fp32"

    def __init__(self, tensors: dict[str, Tensor], config: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        self.tensors, self.config, self.dtype = tensors, config, dtype

    def linear(self, names, out_features, in_features):
        parts = [self._take(f"{name}.weight", (n, in_features)) for name, n in zip(names, out_features, strict=True)]
        return torch.cat(parts).to(self.dtype)

    def vector(self, name, shape):
        return self._take(name, shape).to(self.dtype)

    def tensor(self, name, shape, dtype=None):
        return self._take(name, shape).to(dtype or self.dtype)

    def has(self, name):
        return name in self.tensors or f"{name}.weight" in self.tensors

    def _take(self, name, shape):
        assert tuple(self.tensors[name].shape) == tuple(shape), (name, tuple(self.tensors[name].shape), tuple(shape))
        return self.tensors[name]


def reference_model(name: str, seed: int = 0, **changes):
    """The transformers model of a tiny configuration, every tensor perturbed so that none is all ones or zeros."""
    entry = ORACLES[name]
    config_class, model_class = (getattr(transformers, entry[key]) for key in ("config_class", "model_class"))
    config = config_class(**{**entry["kwargs"], **changes})
    config._experts_implementation = "eager"
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.add_(noise * spread(key, tensor))
                if "q_a_proj" in key or "kv_a_proj" in key:
                    tensor.mul_(0.02)  # so small that the eps of the latent norms shows
    return model


def spread(name: str, tensor: Tensor) -> float:
    """Noise large enough for every part of a layer to matter: small weights make small mistakes invisible."""
    if "norm" in name or "bias" in name or "sinks" in name or "A_log" in name:
        return 0.5
    return 0.3 if "conv1d" in name else 0.8 / tensor.shape[-1] ** 0.5


def our_decoder(model, name: str, config: ModelConfig | None = None) -> Decoder:
    """A decoder over the same weights, float32 on the CPU; `config` None takes the model's own geometry."""
    config = config or our_config(model, name)
    return Decoder(Build(config, source_of(model, config), torch.device("cpu"), torch.float32, "fused", 256))


def our_config(model, name: str) -> ModelConfig:
    return from_hf({**model.config.to_dict(), "model_type": model.config.model_type}, name)


def source_of(model, config: ModelConfig) -> DictSource:
    canonical = family(model.config.model_type).canonical
    named = {canonical(key): value for key, value in model.state_dict().items()}
    return DictSource({k: v for k, v in named.items() if k is not None}, config)


class Session:
    """A decoder with a cache of its own; feeds tokens of several requests a step, as the engine would."""

    def __init__(self, decoder: Decoder, requests: int = 4, tokens: int = 256, poison: bool = True) -> None:
        self.decoder, self.requests = decoder, requests
        self.pages = -(-tokens // PAGE)
        mixers = [layer.mixer for layer in decoder.config.layers]
        count = 1 + requests * self.pages
        self.cache = Cache.allocate(
            mixers, count, PAGE, requests, self.pages, torch.float32, torch.float32, torch.device("cpu")
        )
        self.lengths = [0] * requests
        if poison:
            for layer in self.cache.layers:
                for tensor in vars(layer).values():
                    if isinstance(tensor, Tensor):
                        tensor.fill_(float("nan"))

    def feed(self, work: dict[int, list[int]], padding: int = 0, decode: bool | None = None) -> dict[int, Tensor]:
        """Runs one step over {request: new tokens} and `padding` null requests of one row; logits of every row."""
        rows = [(r, t, self.lengths[r] + i) for r, tokens in work.items() for i, t in enumerate(tokens)]
        for r, tokens in work.items():
            self.lengths[r] += len(tokens)
        counts = [len(tokens) for tokens in work.values()] + [1] * padding
        table = [self._pages(r) for r in work] + [[0] * self.pages] * padding
        slots = [self._pages(r)[p // PAGE] * PAGE + p % PAGE for r, _, p in rows]
        batch = Batch(
            tokens=ints([t for _, t, _ in rows] + [0] * padding),
            positions=ints([p for _, _, p in rows] + [0] * padding),
            slots=ints(slots + [0] * padding),
            query_start=ints([sum(counts[:i]) for i in range(len(counts) + 1)]),
            kv_len=ints([self.lengths[r] for r in work] + [0] * padding),
            page_table=ints(table),
            state_slots=ints([r + 1 for r in work] + [0] * padding),
            sample_rows=ints(range(sum(counts))),
            decode=all(n == 1 for n in counts) if decode is None else decode,
            max_query=max(counts),
            max_kv=max(self.lengths),
        )
        logits = self.decoder(batch, self.cache.layers)
        start, out = 0, {}
        for r, tokens in work.items():
            out[r] = logits[start : start + len(tokens)]
            start += len(tokens)
        return out

    def _pages(self, request: int) -> list[int]:
        first = 1 + request * self.pages
        return list(range(first, first + self.pages))


def ints(values) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)
