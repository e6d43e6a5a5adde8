"""Checkpoints of the families with experts: written by transformers, read from disk, the same logits."""

from __future__ import annotations

import json

import pytest
import torch
from layer_oracle import Session, reference_model
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.config import EngineError
from engine.layers.build import Build
from engine.models.decoder import Decoder
from engine.quant import dequantize, dequantize_expert, quantize
from engine.weights.safetensors import folder_config, open_folder

TOKENS = torch.randint(0, 96, (20,), generator=torch.Generator().manual_seed(3)).tolist()


def read(folder, weights_dtype: str = "fp32"):
    config = folder_config(folder, "tiny")
    source, notes = open_folder(folder, config, weights_dtype, torch.device("cpu"), torch.float32)
    return Decoder(Build(config, source, torch.device("cpu"), torch.float32, "fused", 256)), source, notes


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe_lite", "gpt_oss"])
def test_saved_model_loads(name, tmp_path):
    model = reference_model(name)
    model.save_pretrained(tmp_path)
    decoder, source, _ = read(tmp_path)
    assert source.unused() == []
    torch.testing.assert_close(Session(decoder).feed({0: TOKENS})[0], logits(model), rtol=0, atol=3e-4)


@pytest.mark.parametrize(("name", "shared"), [("qwen3_moe", None), ("qwen3_5_moe", "shared_expert"),
                                              ("glm4_moe_lite", "shared_experts")])  # fmt: skip
def test_quantized_on_loading(name, shared, tmp_path):
    """Every expert is the quantized original, gate over up, padded to 64 rows each; the shared one comes last."""
    model = reference_model(name)
    model.save_pretrained(tmp_path)
    decoder, _, _ = read(tmp_path, "int4")
    experts, state = decoder.layers[-1].ffn.experts, model.state_dict()
    module = f"model.layers.{len(decoder.layers) - 1}.mlp"
    gate, up = state[f"{module}.experts.gate_up_proj"][5].chunk(2)
    merged = dequantize_expert(experts.gate_up, 5)
    torch.testing.assert_close(merged[:32], dequantize(quantize(gate)), rtol=0, atol=0)
    torch.testing.assert_close(merged[64:96], dequantize(quantize(up)), rtol=0, atol=0)
    assert merged[32:64].abs().max() == 0
    down = dequantize(quantize(state[f"{module}.experts.down_proj"][5]))
    torch.testing.assert_close(dequantize_expert(experts.down, 5)[:, :32], down, rtol=0, atol=0)
    assert experts.shared == (shared is not None)
    if shared is not None:
        gate = dequantize(quantize(state[f"{module}.{shared}.gate_proj.weight"]))
        torch.testing.assert_close(dequantize_expert(experts.gate_up, 8)[: len(gate)], gate, rtol=0, atol=0)


def test_mxfp4_experts_are_read_as_published(tmp_path):
    model = reference_model("gpt_oss")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, generator = load_file(file), torch.Generator().manual_seed(5)
    for name in [key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, k, n = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, n, k // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, (experts, n, k // 32), generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        weight = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        model.get_submodule(name.rpartition(".")[0]).get_parameter(name.rpartition(".")[2]).data.copy_(weight)
    save_file(tensors, file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    decoder, source, _ = read(tmp_path, "int4")
    assert source.unused() == []
    assert decoder.layers[0].ffn.experts.gate_up.codes == "mxfp4"
    torch.testing.assert_close(Session(decoder).feed({0: TOKENS})[0], logits(model), rtol=0, atol=1e-4)


def test_wrapper_is_loaded_without_its_other_parts(tmp_path):
    """The text model inside a multimodal wrapper: prefixed names, `text_config`, vision and prediction modules."""
    model = reference_model("qwen3_5_moe")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    plain = {key.replace("model.language_model.", "model."): value for key, value in load_file(file).items()}
    inner = {key.replace("model.", "model.language_model.", 1): value for key, value in plain.items()}
    save_file({**inner, "model.visual.proj.weight": torch.ones(2), "mtp.fc.weight": torch.ones(2)}, file)
    text = json.loads((tmp_path / "config.json").read_text())
    wrapper = {"model_type": "qwen3_5_moe", "tie_word_embeddings": False, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    decoder, source, notes = read(tmp_path)
    assert source.unused() == []
    assert "2 tensors outside the language model" in notes[0]
    torch.testing.assert_close(Session(decoder).feed({0: TOKENS})[0], logits(model), rtol=0, atol=3e-4)


@pytest.mark.parametrize("change", ["missing", "misshapen"])
def test_a_damaged_expert_is_named(change, tmp_path):
    model = reference_model("glm4_moe_lite")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(key for key in sorted(tensors) if "experts.3.up_proj" in key)
    if change == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, file)
    with pytest.raises(EngineError, match=r"experts\.3\.up_proj"):
        read(tmp_path)
