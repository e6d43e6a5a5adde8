"""Made-up weights of a model's true shape: seeded, made on the device in the form they are used in.

Each tensor depends on the seed and its own name alone, so that a model split over stages equals the whole one.
Magnitudes keep activations near one: a matrix has standard deviation 1 / sqrt(inputs), norms scatter around one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.quant import E2M1, TILE_BYTES, TILE_K, TILE_N, QuantExperts, QuantWeight, group_for
from engine.weights import DTYPES, kept_in_16bit

_CODE_RMS = math.sqrt(sum((code - 8) ** 2 for code in range(16)) / 16)
_E2M1_RMS = math.sqrt(sum(value**2 for value in E2M1) / len(E2M1))


class SyntheticSource:
    """See `engine.weights.WeightSource`. `weights_dtype`: "int4" or the dtype of dense matrices."""

    def __init__(
        self, config: ModelConfig, weights_dtype: str, device: torch.device, dtype: torch.dtype, seed: int
    ) -> None:
        self.config = config
        self.weights_dtype = weights_dtype
        self.device = device
        self.dtype = dtype
        self.seed = seed

    def generator(self, name: str) -> torch.Generator:
        """The random stream of one tensor."""
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def linear(self, names: Sequence[str], out_features: Sequence[int], in_features: int) -> QuantWeight | Tensor:
        name, n = "+".join(names), sum(out_features)
        if self.weights_dtype != "int4":
            return self._normal(name, (n, in_features), in_features**-0.5, DTYPES[self.weights_dtype])
        if any(kept_in_16bit(self.config, part) for part in names):
            return self._normal(name, (n, in_features), in_features**-0.5, self.dtype)
        return self.quant_weight(name, n, in_features)

    def quant_weight(self, name: str, n: int, k: int) -> QuantWeight:
        """Random codes and scales [n, k] in the canonical form."""
        generator, group = self.generator(name), group_for(k)
        n_tiles, k_tiles = -(-n // TILE_N), -(-k // TILE_K)
        words = torch.empty((n_tiles, k_tiles, TILE_BYTES // 4), dtype=torch.int32, device=self.device)
        words.random_(-(2**31), 2**31, generator=generator)
        groups = -(-k_tiles * TILE_K // group)
        spread = torch.rand((n_tiles, groups, TILE_N), generator=generator, device=self.device)
        sign = torch.randint(0, 2, spread.shape, generator=generator, device=self.device) * 2 - 1
        scales = sign * (0.75 + 0.5 * spread) / (_CODE_RMS * math.sqrt(k))
        rows = torch.arange(n_tiles * TILE_N, device=self.device).reshape(n_tiles, 1, TILE_N)
        scales = torch.where(rows < n, scales, 0.0).to(self._scale_dtype())
        return QuantWeight(words.view(torch.uint8), scales, None, n, k, group)

    def experts(self, name: str, count: int, n: int, k: int, codes: str) -> QuantExperts | Tensor:
        """The matrices [n, k] of `count` experts, in the stored form that the switch and the model ask for.

        n must be a multiple of 64 in 4-bit form.
        """
        if self.weights_dtype != "int4" or kept_in_16bit(self.config, name):
            dtype = self.dtype if self.weights_dtype == "int4" else DTYPES[self.weights_dtype]
            return self._normal(name, (count, n, k), k**-0.5, dtype)
        n_tiles, k_tiles = -(-n // TILE_N), -(-k // TILE_K)
        if codes == "mxfp4":
            return self._mxfp4_experts(name, count, n, k)
        weight = self.quant_weight(name, count * n_tiles * TILE_N, k)
        packed = weight.packed.reshape(count, n_tiles, k_tiles, TILE_BYTES)
        return QuantExperts(packed, weight.scales.reshape(count, n_tiles, -1, TILE_N), n, k, weight.group)

    def _mxfp4_experts(self, name: str, count: int, n: int, k: int) -> QuantExperts:
        """Random codes; the two exponents around the one that makes the standard deviation 1 / sqrt(k)."""
        n_tiles, k_tiles = -(-n // TILE_N), -(-k // TILE_K)
        generator = self.generator(name)
        words = torch.empty((count, n_tiles, k_tiles, TILE_BYTES // 4), dtype=torch.int32, device=self.device)
        words.random_(-(2**31), 2**31, generator=generator)
        exponent = 127 + math.floor(-math.log2(_E2M1_RMS * math.sqrt(k)))
        shape = (count, n_tiles, 2 * k_tiles, TILE_N)
        scales = torch.randint(exponent, exponent + 2, shape, generator=generator, device=self.device)
        return QuantExperts(words.view(torch.uint8), scales.to(torch.uint8), n, k, 32, "mxfp4")

    def vector(self, name: str, shape: Sequence[int]) -> Tensor:
        if "norm" in name and name.endswith(".weight"):
            center = 0.0 if self.config.norm_plus_one else 1.0
            return (self._normal(name, shape, 0.1, torch.float32) + center).to(self.dtype)
        return self._normal(name, shape, 0.1, self.dtype)

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Routers are made like matrices and their selection biases small, so that every expert gets its share."""
        std = 1.0
        if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):
            std = shape[-1] ** -0.5
        elif name.endswith("e_score_correction_bias"):
            std = 0.01
        return self._normal(name, shape, std, dtype or self.dtype)

    def has(self, name: str) -> bool:
        return True

    def unused(self) -> list[str]:
        return []

    def _scale_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cpu" else self.dtype

    def _normal(self, name: str, shape: Sequence[int], std: float, dtype: torch.dtype) -> Tensor:
        values = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return values.normal_(0.0, std, generator=self.generator(name))
