"""What a layer is given when it is built, and the one place that knows which class serves which spec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.batch import Batch, LayerCache, StateCache
from engine.config import Attention, DeltaNet, DenseFfn, Ffn, LatentAttention, Mixer, ModelConfig, Rope
from engine.kernels.rope import rope_table
from engine.layers.linear import Kernels, Linear
from engine.layers.norm import RmsNorm
from engine.weights import WeightSource

MixerLayer = Callable[[Tensor, Batch, LayerCache | StateCache], Tensor]
FfnLayer = Callable[[Tensor, Batch], Tensor]


@dataclass
class Build:
    """The construction of one model, or of a range of its layers.

    `positions`: rows of the rotary tables. `linears` collects every linear layer by name, for the kernel switch and
    for counting bytes; `tables` holds one rotary table for every distinct `Rope`.
    """

    config: ModelConfig
    source: WeightSource
    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    positions: int
    linears: dict[str, Linear] = field(default_factory=dict)
    tables: dict[Rope, Tensor] = field(default_factory=dict)

    def linear(self, names: Sequence[str], out_features: Sequence[int], in_features: int, bias: bool = False) -> Linear:
        """One linear layer of the merged matrices `names` (module names); `bias`: their biases, merged alike."""
        merged_bias = self.bias(names, out_features) if bias else None
        layer = Linear(self.source.linear(names, out_features, in_features), merged_bias, self.kernels)
        self.linears["+".join(names)] = layer
        return layer

    def bias(self, names: Sequence[str], out_features: Sequence[int]) -> Tensor:
        """The biases of `names`, one after the other: [sum(out_features)]."""
        parts = [self.source.vector(f"{name}.bias", (n,)) for name, n in zip(names, out_features, strict=True)]
        return torch.cat(parts)

    def norm(self, name: str, size: int) -> RmsNorm:
        """The norm whose module is `name`, over vectors of `size`, with the model's eps and form."""
        weight = self.source.vector(f"{name}.weight", (size,))
        return RmsNorm(weight, self.config.norm_eps, self.config.norm_plus_one)

    def rope_table(self, rope: Rope) -> Tensor:
        """The rotary table, float32 [positions, rotary_dim]; layers with equal `Rope` share it."""
        if rope not in self.tables:
            self.tables[rope] = rope_table(rope, self.positions, self.device)
        return self.tables[rope]


def build_mixer(spec: Mixer, build: Build, prefix: str) -> MixerLayer:
    """The mixer of the layer whose module is `prefix` (`model.layers.3`)."""
    if isinstance(spec, Attention):
        from engine.layers.attention import AttentionLayer

        return AttentionLayer(spec, build, prefix)
    if isinstance(spec, DeltaNet):
        from engine.layers.deltanet import DeltaNetLayer

        return DeltaNetLayer(spec, build, prefix)
    assert isinstance(spec, LatentAttention)
    from engine.layers.mla import LatentAttentionLayer

    return LatentAttentionLayer(spec, build, prefix)


def build_ffn(spec: Ffn, build: Build, prefix: str) -> FfnLayer:
    """The feed-forward part of the layer whose module is `prefix`."""
    if isinstance(spec, DenseFfn):
        from engine.layers.ffn import DenseFfnLayer

        return DenseFfnLayer(spec, build, prefix)
    from engine.layers.moe import MoeLayer

    return MoeLayer(spec, build, prefix)
