"""What an 8-bit cache costs in accuracy on a real model: logits, greedy decisions and perplexity beside a 16-bit one.

    python -m tools.cache_accuracy --weights SmolLM2-135M-Instruct.Q4_1.gguf --out results/cpu/cache-accuracy.csv

One row a cache dtype; the first, `bf16`, is what the others are compared with. On a CPU activations are float32 and a
16-bit cache is kept in float32, so that the comparison is with a cache that rounds nothing.

- `logit_error`: largest difference of a logit, over the largest logit of the reference.
- `kl`: mean Kullback-Leibler divergence of the next-token distributions from the reference, nats.
- `agreement`: share of the last 256 positions of the text at which both choose the same token.
- `greedy_256`: tokens of a free greedy answer of 256 that come before the first that differs.
- `perplexity` of the text, and `perplexity_change` against the reference.
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from engine.batch import Batch
from engine.config import EngineConfig, Switches
from engine.engine import Engine
from engine.request import Request, SamplingParams

TEXT = Path(__file__).parents[1] / "tests" / "data" / "perplexity.txt"
PROMPT = "Once upon a time, in a small town by the sea,"
CACHE_DTYPES = ("bf16", "fp16", "int8", "fp8")
COMPARED = 256


@dataclass(frozen=True)
class Accuracy:
    """One row of the table; see the top of the file."""

    model: str
    device: str
    cache_dtype: str
    bytes_per_token: int
    logit_error: float
    kl: float
    agreement: float
    greedy_256: int
    perplexity: float
    perplexity_change: float


@dataclass(frozen=True)
class Observed:
    """logits float32 [T, vocab] of the text's tokens on the CPU, the answer to PROMPT, and what the engine said."""

    logits: Tensor
    tokens: list[int]
    answer: list[int]
    model: str
    device: str
    bytes_per_token: int


def observe(weights: str, device: str, cache_dtype: str, text: str, answer_tokens: int) -> Observed:
    switches = Switches(cache_dtype=cache_dtype, weights_dtype="fp32" if device == "cpu" else "bf16")
    engine = Engine.load(
        EngineConfig("", weights=weights, device=device, switches=switches, max_streams=1, max_model_len=1024)
    )
    assert engine.tokenizer is not None, f"{weights}: has no tokenizer"
    tokens = engine.tokenizer.encode(text)[:512]
    logits = text_logits(engine, tokens)
    answer = greedy(engine, engine.tokenizer.encode(PROMPT), answer_tokens) if answer_tokens else []
    info = engine.info
    engine.close()
    return Observed(logits, tokens, answer, info.model, info.device, info.cache_bytes_per_token)


def text_logits(engine: Engine, tokens: list[int]) -> Tensor:
    """float32 [T, vocab] on the CPU: the logits after every token, all of them in one prompt step."""
    size, count, device = engine.config.page_size, len(tokens), engine.stage.device
    pages = engine.pool.take(-(-count // size))
    assert pages is not None, f"the cache has no room for {count} tokens"
    positions = torch.arange(count)
    table = torch.tensor([pages])
    slots = table[0][positions // size] * size + positions % size

    def on_device(values: Tensor | list[int]) -> Tensor:
        return torch.as_tensor(values).to(torch.int32).to(device)

    batch = Batch(
        on_device(tokens), on_device(positions), on_device(slots), on_device([0, count]), on_device([count]),
        on_device(table), on_device([1]), on_device(positions), decode=False, max_query=count, max_kv=count,
    )  # fmt: skip
    with torch.inference_mode():
        logits = engine.stage.decoder(batch, engine.stage.cache.layers)
        logits = (logits.sum(0) if logits.dim() == 3 else logits).float().cpu()
    engine.pool.release(pages, after=-1)
    engine.pool.completed(-1)
    return logits


def greedy(engine: Engine, prompt: list[int], count: int) -> list[int]:
    engine.add(Request("answer", prompt, SamplingParams(max_tokens=count, ignore_eos=True)))
    made: list[int] = []
    while engine.has_work():
        for event in engine.step():
            made += event.tokens
    return made


def perplexity(logits: Tensor, tokens: list[int]) -> float:
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:])).exp())


def compare(cache_dtype: str, found: Observed, reference: Observed) -> Accuracy:
    own, base = (torch.log_softmax(x.logits, dim=-1) for x in (found, reference))
    same = found.logits.argmax(-1) == reference.logits.argmax(-1)
    pairs = list(zip(found.answer, reference.answer, strict=True))
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    ours, theirs = perplexity(found.logits, found.tokens), perplexity(reference.logits, reference.tokens)
    return Accuracy(
        model=found.model,
        device=found.device,
        cache_dtype=cache_dtype,
        bytes_per_token=found.bytes_per_token,
        logit_error=float((found.logits - reference.logits).abs().max() / reference.logits.abs().max()),
        kl=float((base.exp() * (base - own)).sum(-1).mean()),
        agreement=float(same[-COMPARED:].float().mean()),
        greedy_256=first,
        perplexity=ours,
        perplexity_change=ours / theirs - 1,
    )


def measure(weights: str, device: str, cache_dtypes: tuple[str, ...], answer_tokens: int = COMPARED) -> list[Accuracy]:
    """One row a cache dtype; the first is the reference of all."""
    text = TEXT.read_text(encoding="utf-8")
    rows: list[Accuracy] = []
    reference: Observed | None = None
    for cache_dtype in cache_dtypes:
        found = observe(weights, device, cache_dtype, text, answer_tokens)
        reference = reference or found
        rows.append(compare(cache_dtype, found, reference))
    return rows


def write(rows: list[Accuracy], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Accuracy)], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            plain = asdict(row)
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in plain.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", required=True, help="a GGUF file or a checkpoint with a tokenizer")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="CSV file to write")
    options = parser.parse_args()
    rows = measure(options.weights, options.device, CACHE_DTYPES)
    write(rows, options.out)
    print(options.out.read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    main()
