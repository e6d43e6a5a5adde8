"""The one decoder: every family is a `ModelConfig` (which layers) and a map of tensor names.

A stage holds a range of the layers; the first stage embeds tokens, the last one has the final norm and the head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import Batch, LayerCache, StateCache
from engine.config import LayerSpec
from engine.layers.build import Build, FfnLayer, MixerLayer, build_ffn, build_mixer
from engine.layers.linear import Kernels, Linear
from engine.layers.norm import RmsNorm

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"


@dataclass(frozen=True)
class DecoderLayer:
    """x += mixer(norm(x)); x += ffn(norm(x)), each addition deferred into the next norm."""

    mixer_norm: RmsNorm
    mixer: MixerLayer
    ffn_norm: RmsNorm
    ffn: FfnLayer

    @staticmethod
    def build(spec: LayerSpec, build: Build, index: int) -> DecoderLayer:
        prefix, hidden = f"model.layers.{index}", build.config.hidden
        return DecoderLayer(
            build.norm(f"{prefix}.input_layernorm", hidden),
            build_mixer(spec.mixer, build, prefix),
            build.norm(f"{prefix}.post_attention_layernorm", hidden),
            build_ffn(spec.ffn, build, prefix),
        )

    def __call__(self, y: Tensor | None, residual: Tensor, batch: Batch, cache: LayerCache | StateCache) -> Tensor:
        """y: the sublayer output not yet added to the residual (None at the first layer); returns the next such."""
        x = self.mixer_norm(residual) if y is None else self.mixer_norm.add(y, residual)
        x = self.ffn_norm.add(self.mixer(x, batch, cache), residual)
        return self.ffn(x, batch)


class Decoder:
    """The layers `first` to `last` (exclusive) of a model; the whole model by default."""

    def __init__(self, build: Build, first: int = 0, last: int | None = None) -> None:
        config = build.config
        self.config = config
        self.first, self.last = first, len(config.layers) if last is None else last
        self.is_first, self.is_last = self.first == 0, self.last == len(config.layers)
        table_shape = (config.vocab, config.hidden)
        tied_here = self.is_last and config.tied_embeddings
        self.embedding = build.source.tensor(f"{EMBEDDING}.weight", table_shape) if self.is_first else None
        self.layers = [DecoderLayer.build(config.layers[i], build, i) for i in range(self.first, self.last)]
        self.norm = build.norm("model.norm", config.hidden) if self.is_last else None
        head_name = EMBEDDING if tied_here else HEAD
        self.head: Linear | None = build.linear([head_name], [config.vocab], config.hidden) if self.is_last else None
        if tied_here and self.embedding is not None:
            self._share_table()
        self.linears = build.linears
        self.tables = build.tables

    def _share_table(self) -> None:
        """Keeps a dense tied head once: as the embedding table itself."""
        table, weight = self.embedding, self.head.weight
        if isinstance(weight, Tensor) and weight.dtype == table.dtype and torch.equal(weight, table):
            self.head.weight = table

    def set_kernels(self, kernels: Kernels) -> None:
        for linear in self.linears.values():
            linear.kernels = kernels

    def __call__(self, batch: Batch, caches: list[LayerCache | StateCache], residual: Tensor | None = None) -> Tensor:
        """Runs one step. `caches`: one for each layer held here. `residual` [T, H]: what the stage before handed over.

        Returns the logits of `batch.sample_rows`, [S, vocab] or Partials, on the last stage, else the residual [T, H].
        """
        if residual is None:
            residual = self.embed(batch.tokens)
        y = None
        for layer, cache in zip(self.layers, caches, strict=True):
            y = layer(y, residual, batch, cache)
        if not self.is_last:
            # A norm adds as it does inside a stage, to the bit; what it returns is the next stage's to make.
            self.layers[-1].ffn_norm.add(y, residual)
            return residual
        return self.logits(y, residual, batch)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [T] int32 -> [T, H]."""
        x = F.embedding(tokens, self.embedding)
        return x if self.config.embedding_scale == 1.0 else x * self.config.embedding_scale

    def logits(self, y: Tensor, residual: Tensor, batch: Batch) -> Tensor:
        """The logits of the rows that are sampled; in a decode step those are all rows, in order."""
        if not batch.decode:
            rows = batch.sample_rows
            y, residual = y.index_select(-2, rows), residual.index_select(0, rows)
        return self.head.partials(self.norm.add(y, residual))


def weight_bytes(decoder: Decoder) -> tuple[int, int]:
    """Bytes of (all weights, the matrices that one token's step reads: of experts those it visits, the head counted,
    the embedding table not)."""
    linears = decoder.linears.values()
    total = sum(linear.nbytes for linear in linears)
    step = sum(getattr(linear, "step_nbytes", linear.nbytes) for linear in linears)
    table = decoder.embedding
    shared = table is not None and decoder.head is not None and decoder.head.weight is table
    return total + (0 if table is None or shared else table.numel() * table.element_size()), step
