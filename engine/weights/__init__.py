"""Where the weights of a model come from: made up (`synthetic`), or read from a checkpoint (`safetensors`, `gguf`).

A layer asks its source for matrices and vectors under the names of the family's Hugging Face checkpoint
(`model.layers.0.self_attn.q_proj`), whatever the file calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.quant import QuantWeight

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class WeightSource(Protocol):
    """Answers for the weights of one model, on the device and in the precision they are used in.

    Names of matrices are those of their modules (no ".weight"); names of vectors and tensors are whole.
    Every method raises EngineError with one line that names a missing or misshapen tensor.
    """

    def linear(self, names: Sequence[str], out_features: Sequence[int], in_features: int) -> QuantWeight | Tensor:
        """The matrices `names`, each [out_features[i], in_features], merged into one of sum(out_features) rows."""
        ...

    def vector(self, name: str, shape: Sequence[int]) -> Tensor:
        """A small tensor (norm weight, bias, sinks) in the activation dtype."""
        ...

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of any shape, unquantized, in `dtype` (None: the activation dtype)."""
        ...

    def has(self, name: str) -> bool:
        """Whether there is a tensor `name`, or a matrix of that name in any stored form."""
        ...

    def unused(self) -> list[str]:
        """Tensors of the checkpoint that belong to the model and that nobody asked for, sorted."""
        ...


def kept_in_16bit(config: ModelConfig, name: str) -> bool:
    """Whether `keep_16bit` names this matrix: an entry is one or several whole parts of the dotted name."""
    return any(f".{entry}." in f".{name}." for entry in config.keep_16bit)
