"""GGUF files: geometry from the metadata, tensors dequantized by the `gguf` package or taken over as 4-bit codes.

Q4_0 (code - 8) * d maps exactly; Q4_1 code * d + m maps with the zero point -m / d, rounded to float16: at most 0.004
of a step. Other types are dequantized and quantized again, but what a 4-bit file
keeps in 8 bits or more stays in 16.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.config import EngineError, ModelConfig, Rope
from engine.kernels.rope import inverse_frequencies
from engine.models import from_hf
from engine.weights.checkpoint import CheckpointSource, Codes

BLOCK = 32
FOUR_BIT = frozenset({"Q4_0", "Q4_1"})
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3"}


def canonical(name: str) -> str | None:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; an unknown name is returned as it is."""
    if name == "rope_freqs.weight":
        return None
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_OUTER_NAMES[stem]}.{kind}" if stem in _OUTER_NAMES else name


class GgufFile:
    """The metadata and tensors of one file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.where = str(path)
        try:
            reader = GGUFReader(path)
        except (ValueError, OSError, IndexError, KeyError) as error:
            raise EngineError(f"{path}: cannot be read as GGUF ({error}); is the download complete?") from None
        self.fields = dict(reader.fields)
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        return self.fields[key].contents() if key in self.fields else default

    def names(self) -> Sequence[str]:
        return list(self.tensors)

    def read(self, name: str) -> Tensor:
        """The tensor, dequantized: float32, or as it is for 16 and 32 bits."""
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        return values.reshape([int(n) for n in reversed(tensor.shape)])

    def geometry(self, name: str) -> ModelConfig:
        """The model as its metadata describe it, through the family's config."""
        architecture = self.get("general.architecture")
        if architecture not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise EngineError(f"{self.where}: unknown architecture '{architecture}' in a GGUF file; {known} are read")
        return from_hf(self._hf_config(_ARCHITECTURES[architecture], architecture), name)

    def _hf_config(self, model_type: str, architecture: str) -> dict[str, Any]:
        def need(key: str) -> Any:
            value = self.get(f"{architecture}.{key}")
            if value is None:
                raise EngineError(f"{self.where}: the metadata have no '{architecture}.{key}'")
            return value

        heads, hidden = need("attention.head_count"), need("embedding_length")
        rope = {"rope_type": "default", "rope_theta": self.get(f"{architecture}.rope.freq_base", 10000.0)}
        eos = self.get("tokenizer.ggml.eos_token_id")
        end_of_turn = self.get("tokenizer.ggml.eot_token_id")
        return {
            "model_type": model_type,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": self.get(f"{architecture}.attention.head_count_kv", heads),
            "head_dim": self.get(f"{architecture}.attention.key_length", hidden // heads),
            "intermediate_size": need("feed_forward_length"),
            "num_hidden_layers": need("block_count"),
            "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": need("context_length"),
            "vocab_size": int(self.tensors["token_embd.weight"].shape[1]),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "eos_token_id": [token for token in (eos, end_of_turn) if token is not None],
            "rope_parameters": self._rope_factors(rope),
        }

    def _rope_factors(self, rope: dict[str, Any]) -> dict[str, Any]:
        """Llama 3's scaled frequencies are stored as divisors; only those of its published formula are accepted."""
        if "rope_freqs.weight" not in self.tensors:
            return rope
        stored = self.read("rope_freqs.weight").double()
        factor = float(stored.max())
        plain = Rope("default", rope["rope_theta"], 2 * len(stored))
        scaled = Rope(
            "llama3", rope["rope_theta"], 2 * len(stored), factor=factor, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max=8192,
        )  # fmt: skip
        expected = inverse_frequencies(plain) / inverse_frequencies(scaled)
        if not torch.allclose(stored, expected, rtol=1e-3):
            raise EngineError(f"{self.where}: its rope_freqs are not those of Llama 3; such a scaling is not supported")
        return rope | {
            "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }  # fmt: skip


class GgufStore:
    """See `TensorStore` and `MatrixReader` of `engine.weights.checkpoint`.

    llama.cpp reorders the rows of q and k of the llama architecture (adjacent rotary pairs); they are put back.
    """

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self.file = file
        self.where = file.where
        self._gguf_name = {canonical(name): name for name in file.names()}
        attention = config.layers[0].mixer
        llama = file.get("general.architecture") == "llama"
        self._heads = {"attn_q": attention.heads, "attn_k": attention.kv_heads} if llama else {}

    def names(self) -> Sequence[str]:
        return self.file.names()

    def read(self, name: str) -> Tensor:
        return self._restore_rows(name, self.file.read(name))

    def _restore_rows(self, name: str, rows: Tensor) -> Tensor:
        """[heads, D/2, 2] rows back to [heads, 2, D/2] where the file reordered them."""
        kind = name.split(".")[2] if name.startswith("blk.") else ""
        heads = self._heads.get(kind)
        if heads is None:
            return rows
        return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    # ------------------------------------------------------------------------------------------ 4-bit matrices

    def leaves_dense(self, name: str) -> bool:
        """A file of 4-bit matrices that spends 8 bits or more on one (often the head) has its reason."""
        kinds = {tensor.tensor_type.name for tensor in self.file.tensors.values()}
        stored = self.file.tensors[self._gguf_name[f"{name}.weight"]].tensor_type.name
        return bool(kinds & FOUR_BIT) and stored in ("Q8_0", "F16", "BF16", "F32")

    def parts(self, name: str) -> Sequence[str]:
        tensor = self.file.tensors.get(self._gguf_name.get(f"{name}.weight", ""))
        return [f"{name}.weight"] if tensor is not None and tensor.tensor_type.name in FOUR_BIT else []

    def read_matrix(self, name: str, tensor: Callable[[str], Tensor], device: torch.device) -> Codes:
        gguf_name = self._gguf_name[f"{name}.weight"]
        stored = self.file.tensors[gguf_name]
        n, k = int(stored.shape[1]), int(stored.shape[0])
        blocks = torch.from_numpy(np.array(stored.data)).to(device).reshape(n, k // BLOCK, -1)
        has_minimum = stored.tensor_type.name == "Q4_1"
        halves = 2 if has_minimum else 1
        heads = blocks[..., : 2 * halves].contiguous().view(torch.float16)
        nibbles = blocks[..., 2 * halves :]
        codes = torch.cat([nibbles & 15, nibbles >> 4], dim=-1).reshape(n, k)
        scales = heads[..., 0]
        scales, zeros = _with_minimum(scales, heads[..., 1]) if has_minimum else (scales, None)
        rows = [self._restore_rows(gguf_name, part) for part in (codes, scales)]
        return Codes(rows[0], rows[1], None if zeros is None else self._restore_rows(gguf_name, zeros), BLOCK)


def _with_minimum(scales: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
    """code * d + m as (code - zero) * scale. A block of equal values has d = 0 and codes 0: scale m, zero -1."""
    flat = scales == 0
    scale = torch.where(flat, minimum, scales)
    zero = torch.where(flat, torch.full_like(scales, -1.0), -minimum.float() / torch.where(flat, 1.0, scales.float()))
    return scale, zero.to(scales.dtype)


def open_gguf(
    path: Path, config: ModelConfig, file: GgufFile, weights_dtype: str, device: torch.device, dtype: torch.dtype
) -> tuple[CheckpointSource, tuple[str, ...]]:
    """The weight source of a GGUF file and what the report must say about it."""
    store = GgufStore(file, config)
    source = CheckpointSource(store, canonical, store, config, weights_dtype, device, dtype)
    kinds = sorted({tensor.tensor_type.name for tensor in file.tensors.values()})
    return source, (f"{path.name} holds {', '.join(kinds)}",)
