"""Logits of every dense family against transformers, in float32."""

import pytest
import torch

from engine.config import Attention, EngineError
from engine.models import from_hf, model_config, published, published_name
from tests.engine.conftest import DENSE
from tests.engine.helpers import load, logits_of, prompt_of

TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def engines(checkpoints):
    return {key: load(str(folder)) for key, folder in checkpoints.items()}


def expected_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize(
    "pieces", [[40], [1] * 40, [13, 1, 1, 17, 8], [32, 8]], ids=["whole", "decode", "mixed", "page"]
)
@pytest.mark.parametrize("key", DENSE)
def test_logits_equal_those_of_transformers(key, pieces, references, engines):
    tokens = prompt_of(40, 3)
    expected = expected_logits(references[key], tokens)
    found = logits_of(engines[key], tokens, pieces)
    scale = expected.abs().max()
    assert (found - expected).abs().max() / scale < TOLERANCE


def test_a_sliding_window_equals_that_of_transformers(tmp_path):
    from tests.engine.conftest import reference

    model = reference("mistral", sliding_window=8)
    model.save_pretrained(tmp_path)
    engine = load(str(tmp_path))
    assert engine.model.layers[0].mixer.window == 8
    tokens = prompt_of(40, 5)
    expected = expected_logits(model, tokens)
    for pieces in ([40], [20] + [1] * 20):
        found = logits_of(engine, tokens, pieces)
        assert (found - expected).abs().max() / expected.abs().max() < TOLERANCE


def test_biases_of_attention_equal_those_of_transformers(tmp_path):
    from tests.engine.conftest import reference

    model = reference("llama", attention_bias=True)
    model.save_pretrained(tmp_path)
    tokens = prompt_of(24, 6)
    expected = expected_logits(model, tokens)
    found = logits_of(load(str(tmp_path)), tokens, [20, 1, 1, 1, 1])
    assert (found - expected).abs().max() / expected.abs().max() < TOLERANCE


def test_a_wrapper_gives_its_text_part_with_its_own_tie_flag():
    text = {
        "model_type": "ministral3", "vocab_size": 96, "hidden_size": 80, "intermediate_size": 128,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "tie_word_embeddings": True, "max_position_embeddings": 64,
    }  # fmt: skip
    config = from_hf({"model_type": "mistral3", "tie_word_embeddings": False, "text_config": text}, "x")
    assert not config.tied_embeddings
    assert config.layers[0].mixer.head_dim == 16


def test_rope_is_read_in_its_old_spelling():
    hf = {
        "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 4, "max_position_embeddings": 4096, "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }  # fmt: skip
    mixer = from_hf(hf, "x").layers[0].mixer
    assert isinstance(mixer, Attention)
    assert (mixer.rope.kind, mixer.rope.theta, mixer.rope.factor, mixer.rope.original_max) == ("llama3", 5e5, 8.0, 8192)
    assert mixer.rope.rotary_dim == 16


def test_published_names_tolerate_spellings():
    assert published_name("qwen3 32b") == "Qwen3-32B"
    assert published_name("meta-llama/Llama-3.2-1B") == "Llama-3.2-1B"
    assert published_name("Qwen3.6-35B") == "Qwen3.6-35B-A3B"
    assert published("qwen3.5-122b")["hf_id"] == "Qwen/Qwen3.5-122B-A10B"


def test_unknown_names_are_one_line_with_the_near_ones():
    with pytest.raises(EngineError, match=r"^unknown model 'Qwen3-31B': did you mean .*Qwen3-32B.*\?$"):
        published("Qwen3-31B")
    with pytest.raises(EngineError, match="unknown architecture 'bert'"):
        from_hf({"model_type": "bert"}, "x")
    with pytest.raises(EngineError, match="layers must be a number from 1 to 16"):
        model_config("Llama-3.2-1B@layers=17")


def test_a_cut_model_keeps_its_first_layers():
    whole, cut = model_config("Llama-3.2-1B"), model_config("Llama-3.2-1B@layers=2")
    assert cut.layers == whole.layers[:2]
    assert cut.name == "Llama-3.2-1B@layers=2"
