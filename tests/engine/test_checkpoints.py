"""Loading: checkpoints as their makers write them, and one clear line for each that is wrong."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineError
from engine.models import model_config
from engine.quant import QuantWeight
from engine.weights.checkpoint import Codes, MissingTensor
from engine.weights.ready_made import PackedReader
from engine.weights.synthetic import SyntheticSource
from tests.engine.conftest import reference
from tests.engine.helpers import generate, load, logits_of, prompt_of

TOKENS = prompt_of(24, 1)


def logits(folder, **options):
    return logits_of(load(str(folder), **options), TOKENS, [20, 1, 1, 1, 1])


@pytest.fixture
def folder(checkpoints, tmp_path):
    """A copy of the qwen3 checkpoint that a test may damage."""
    return shutil.copytree(checkpoints["qwen3"], tmp_path / "model")


def rewrite(folder, change):
    """Changes the tensors of a checkpoint by a function on the dict."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def quantization(folder, **settings):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))


def int32_words(nibbles):
    """[..., 8] codes -> int32 words, the first in the lowest bits; plain Python arithmetic."""
    words = sum(16**i * nibbles[..., i].long() for i in range(8))
    return torch.where(words >= 2**31, words - 2**32, words).int()


def split_into_codes(weight, group, symmetric):
    """Round-to-nearest codes [n, k], scales and zeros [n, k / group], and the weight that they stand for."""
    n, k = weight.shape
    grouped = weight.reshape(n, k // group, group)
    low, high = grouped.amin(-1), grouped.amax(-1)
    if symmetric:
        scales, zeros = grouped.abs().amax(-1) / 7, torch.full_like(low, 8)
    else:
        scales = (high - low) / 15
        zeros = (-low / scales).round().clamp(1, 15)
    scales = scales.half().float()
    codes = (grouped / scales[..., None]).round().add(zeros[..., None]).clamp(0, 15)
    stands_for = (codes - zeros[..., None]) * scales[..., None]
    return codes.reshape(n, k).int(), scales, zeros.int(), stands_for.reshape(n, k)


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_4bit(source, target, kind, group, symmetric=False):
    """Writes `source` in a 4-bit form to `target`, and returns a folder with the dense weights it stands for."""
    shutil.copytree(source, target)
    twin = shutil.copytree(source, target.with_name("twin"))

    def change(tensors):
        for name in [n for n in tensors if n.split(".")[-2] in PROJECTIONS]:
            stem = name.removesuffix(".weight")
            codes, scales, zeros, dense[name] = split_into_codes(tensors.pop(name), group, symmetric)
            tensors.update(WRITERS[kind](stem, codes, scales, zeros, group))

    dense = {}
    rewrite(target, change)
    rewrite(twin, lambda tensors: tensors.update(dense))
    return twin


def write_gptq(stem, codes, scales, zeros, group):
    n, k = codes.shape
    return {
        f"{stem}.qweight": int32_words(codes.t().reshape(k // 8, 8, n).transpose(1, 2)),
        f"{stem}.qzeros": int32_words((zeros - 1).t().reshape(k // group, n // 8, 8)),
        f"{stem}.scales": scales.t().half(),
        f"{stem}.g_idx": (torch.arange(k) // group).int(),
    }


def write_awq(stem, codes, scales, zeros, group):
    n, k = codes.shape
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {
        f"{stem}.qweight": int32_words(codes.t().reshape(k, n // 8, 8)[:, :, order]),
        f"{stem}.qzeros": int32_words(zeros.t().reshape(k // group, n // 8, 8)[:, :, order]),
        f"{stem}.scales": scales.t().half(),
    }


def write_packed(stem, codes, scales, zeros, group):
    n, k = codes.shape
    return {
        f"{stem}.weight_packed": int32_words(codes.reshape(n, k // 8, 8)),
        f"{stem}.weight_scale": scales.half(),
        f"{stem}.weight_shape": torch.tensor([n, k]),
        f"{stem}.weight_zero_point": int32_words(zeros.t().reshape(k // group, n // 8, 8)).t(),
    }


WRITERS = {"gptq": write_gptq, "awq": write_awq, "compressed-tensors": write_packed}
SETTINGS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
    },
}  # fmt: skip


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("kind", list(WRITERS))
def test_ready_made_4bit_checkpoints_give_the_logits_of_the_weights_they_stand_for(
    kind, group, symmetric, checkpoints, tmp_path
):
    folder = tmp_path / kind
    twin = make_4bit(checkpoints["qwen3"], folder, kind, group, symmetric)
    quantization(folder, **SETTINGS[kind], group_size=group)
    expected = logits(twin)
    for weights_dtype in ("int4", "fp32"):
        found = logits(folder, switches={"weights_dtype": weights_dtype, "kernels": "standard"})
        assert (found - expected).abs().max() / expected.abs().max() < 2e-5
    engine = load(str(folder), switches={"weights_dtype": "int4"})
    assert engine.info.quantized == "every matrix in 4 bits but the output head"


def test_a_damaged_zero_point_is_not_taken_for_an_absent_one():
    """Taken for absent it would give other weights without a word."""
    stored = {
        "w.weight_shape": torch.tensor([8, 8]),
        "w.weight_packed": torch.zeros((8, 1), dtype=torch.int32),
        "w.weight_scale": torch.ones((8, 1)),
    }

    def read(kind: type[EngineError]) -> Codes:
        def tensor(name: str) -> torch.Tensor:
            if name not in stored:
                raise kind(name)
            return stored[name]

        return PackedReader().read_matrix("w", tensor, torch.device("cpu"))

    assert read(MissingTensor).zeros is None
    with pytest.raises(EngineError, match="weight_zero_point"):
        read(EngineError)


def test_gptq_with_reordered_inputs_is_refused(checkpoints, tmp_path):
    folder = tmp_path / "gptq"
    make_4bit(checkpoints["qwen3"], folder, "gptq", 32)
    quantization(folder, **SETTINGS["gptq"], group_size=32)
    name = "model.layers.0.self_attn.q_proj.g_idx"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].flip(0)}))
    with pytest.raises(EngineError, match=r"q_proj' was quantized with desc_act .*desc_act=false"):
        load(str(folder))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, "gptq with 8 bits is not supported; 4 bits are"),
        ({"quant_method": "awq", "bits": 4, "version": "marlin"}, "AWQ version 'marlin' is not supported"),
        ({"quant_method": "bitsandbytes"}, "quantization 'bitsandbytes' is not supported"),
    ],
)
def test_unknown_quantizations_are_refused(folder, settings, message):
    quantization(folder, **settings)
    with pytest.raises(EngineError, match=message):
        load(str(folder))


def test_an_fp8_checkpoint_is_scaled_by_its_blocks(folder, tmp_path):
    twin = shutil.copytree(folder, tmp_path / "twin")
    name = "model.layers.0.mlp.up_proj.weight"
    dense = {}

    def to_fp8(tensors):
        weight = tensors[name]
        blocks = weight.reshape(2, 64, 1, 64).abs().amax(dim=(1, 3)) / 448
        spread = blocks.repeat_interleave(64, 0).repeat_interleave(64, 1)
        tensors[name] = (weight / spread).to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = blocks
        dense[name] = tensors[name].float() * spread

    rewrite(folder, to_fp8)
    rewrite(twin, lambda tensors: tensors.update(dense))
    quantization(folder, quant_method="fp8", weight_block_size=[64, 64])
    assert torch.allclose(logits(folder), logits(twin), atol=1e-5)


def test_a_sharded_checkpoint_loads(tmp_path, references, checkpoints):
    references["llama"].save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert torch.allclose(logits(tmp_path), logits(checkpoints["llama"]), atol=1e-5)


def test_bf16_weights_are_quantized_but_for_the_head(tmp_path):
    model = reference("llama").bfloat16()
    model.save_pretrained(tmp_path)
    engine = load(str(tmp_path), switches={"weights_dtype": "int4"})
    assert engine.info.quantized == "every matrix in 4 bits but the output head"
    assert len(generate(engine, [TOKENS])[0]) == 8


def test_made_up_weights_have_their_head_in_4_bits():
    source = SyntheticSource(model_config("SmolLM2-135M"), "int4", torch.device("cpu"), torch.float32, 0)
    assert isinstance(source.linear(["lm_head"], [100], 64), QuantWeight)


def test_a_wrapper_is_read_and_its_vision_tower_skipped(checkpoints, tmp_path):
    folder = shutil.copytree(checkpoints["ministral3"], tmp_path / "wrapped")
    inner = json.loads((folder / "config.json").read_text())
    outer = {
        "model_type": "mistral3",
        "tie_word_embeddings": False,
        "text_config": inner | {"tie_word_embeddings": True},
    }
    (folder / "config.json").write_text(json.dumps(outer))

    def wrap(tensors):
        for name in list(tensors):
            if name != "lm_head.weight":
                tensors["model.language_model." + name.removeprefix("model.")] = tensors.pop(name)
        tensors["model.vision_tower.patch.weight"] = torch.ones(3, 3)

    rewrite(folder, wrap)
    engine = load(str(folder))
    expected = logits_of(load(str(checkpoints["ministral3"])), TOKENS, [24])
    assert torch.allclose(logits_of(engine, TOKENS, [24]), expected, atol=1e-5)
    assert any("1 tensors outside the language model were skipped" in note for note in engine.info.notes)


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), f"tensor '{NORM}' is missing"),
        (lambda t: t.pop("model.layers.0.self_attn.k_proj.weight"), "tensor 'model.layers.0.self_attn.k_proj.weight'"),
        (lambda t: t.update({NORM: torch.ones(7)}), rf"tensor '{NORM}' is \[7\], model needs \[64\]"),
        (lambda t: t.update({"model.layers.0.extra.weight": torch.ones(3)}), "'model.layers.0.extra.weight'"),
    ],
    ids=["missing vector", "missing matrix", "misshapen", "superfluous"],
)
def test_wrong_tensors_are_named(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(EngineError, match=message) as error:
        load(str(folder))
    assert "\n" not in str(error.value)


def test_damaged_folders_are_named(folder, tmp_path):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(EngineError, match=r"model.safetensors: cannot be read .*is the download complete"):
        load(str(folder))
    file.unlink()
    with pytest.raises(EngineError, match=r"no \.safetensors file there"):
        load(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(EngineError, match=r"config.json: the file is missing"):
        load(str(folder))
    with pytest.raises(EngineError, match="no such folder"):
        load(str(tmp_path / "nothing" / "here"))


def test_a_checkpoint_of_another_shape_than_the_named_model_is_refused(folder):
    with pytest.raises(EngineError, match=r"are not of model 'Qwen3-8B' \(4096, 151936, 36\)"):
        load(str(folder), model="Qwen3-8B")
