"""Runs planned steps on one device: packs what the step needs, launches it, and hands back the tokens.

On a GPU nothing here waits: inputs go up through a ring of pinned buffers, sampled tokens stay on the device in the
token pool (where the next decode step finds them) and come down through a ring of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.cache import Cache
from engine.config import Attention, DenseFfn, LayerSpec
from engine.graphs import Graphs
from engine.inputs import StepInputs, StepShape
from engine.kernels._launch import whole
from engine.kernels.sample import sample
from engine.models.decoder import Decoder
from engine.request import SamplingParams
from engine.rings import DownRing, UpRing
from engine.sampler import TokenLogprobs, forbid, is_greedy, is_plain, log_probabilities
from engine.scheduler import Piece, StepPlan

RING_DEPTH = 4


@dataclass
class StepResult:
    """The tokens of a launched step; `wait` blocks until the host has them."""

    plan: StepPlan
    ring: DownRing
    row: int
    samples: int
    logprobs: list[TokenLogprobs | None] | None = None

    def wait(self) -> list[int]:
        return self.ring.read(self.row, self.samples)


class Stage:
    """A decoder, its cache and the buffers of its steps.

    `resident`: decode steps take their tokens from the token pool on the device and run as captured graphs; without
    it (the driven loop) they take them from the host and are launched kernel by kernel.
    """

    def __init__(
        self, decoder: Decoder, cache: Cache, device: torch.device, max_streams: int, max_model_len: int
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        self.device = device
        self.max_model_len = max_model_len
        self.token_pool = torch.zeros(max_streams + 1, dtype=torch.int32, device=device)
        self.up = UpRing(device, RING_DEPTH)
        self.down = DownRing(device, RING_DEPTH, max_streams)
        self.graphs: Graphs | None = None
        self._graphs_by_kernels: dict[str, Graphs] = {}
        self.resident = True

    @torch.inference_mode()
    def capture(self, max_streams: int, kernels: str) -> None:
        """Captures the steps that are replayed; those of each kind of kernels are kept."""
        if kernels not in self._graphs_by_kernels:
            # The standard kernels unpack whole matrices: there the GPU is the limit, not the host's launches.
            prompts = kernels == "fused" and all(plain_layer(layer) for layer in self.decoder.config.layers)
            self._graphs_by_kernels[kernels] = Graphs(self, max_streams, prompts)
        self.graphs = self._graphs_by_kernels[kernels]

    @torch.inference_mode()
    def launch(self, plan: StepPlan, banned: list[tuple[int, frozenset[int]]]) -> StepResult:
        """Starts a step. `banned`: (sampled row, tokens that may not be chosen there)."""
        self.cache.update_table(plan.fresh_slots, plan.new_pages)
        self.cache.copy_states(plan.restores)
        sampling = [piece.track.request.sampling for piece in plan.pieces if piece.samples]
        plain = not banned and all(is_plain(s) for s in sampling)
        row = plan.step % RING_DEPTH
        shape = self.graphs.shape_for(plan) if plain and self.resident and self.graphs is not None else None
        if shape is not None:
            self.graphs.replay(plan, shape, row, is_greedy(sampling))
            logprobs = None
        else:
            logprobs = self._run_eagerly(plan, row, banned, sampling)
        self.cache.copy_states(plan.snapshots)
        self.down.fetch(row)
        return StepResult(plan, self.down, row, len(sampling), logprobs)

    def _run_eagerly(
        self, plan: StepPlan, row: int, banned: list[tuple[int, frozenset[int]]], sampling: list[SamplingParams]
    ) -> list[TokenLogprobs | None] | None:
        shape = plan_shape(plan)
        inputs = self.upload(plan, row, shape, None)
        longest = max(piece.start + piece.count for piece in plan.pieces)
        logits = self.forward(inputs, plan.decode, max(piece.count for piece in plan.pieces), longest)
        if shape.samples == 0:
            return None
        wanted = [params.logprobs for params in sampling]
        wants_logprobs = any(n is not None for n in wanted)
        if banned or wants_logprobs:
            logits = forbid(whole(logits), banned)
        tokens = self.choose(logits, inputs, is_greedy(sampling))
        if not wants_logprobs:
            return None
        return log_probabilities(logits, tokens, wanted)

    def upload(self, plan: StepPlan, row: int, shape: StepShape, into: Tensor | None) -> StepInputs:
        """Packs the plan and copies it to the device: into the buffer `into`, or into a new one."""
        nbytes = StepInputs.nbytes(shape)
        host = self.up.take(nbytes)
        fill(StepInputs.over(host, shape).numpy(), plan, row, self.cache.page_size)
        return StepInputs.over(self.up.send(host, nbytes, into), shape)

    def forward(self, inputs: StepInputs, decode: bool, max_query: int, max_kv: int) -> Tensor:
        """The decoder over the packed inputs: logits [S, vocab] or Partials."""
        if decode and self.resident:
            inputs.tokens = self.token_pool.index_select(0, inputs.state_slots)
        page_table = self.cache.page_table.index_select(0, inputs.state_slots)
        return self.decoder(inputs.batch(page_table, decode, max_query, max_kv), self.cache.layers)

    def choose(self, logits: Tensor, inputs: StepInputs, greedy: bool) -> Tensor:
        """Samples (`greedy`: no row draws); the tokens [S] int32 go into the token pool and into the output ring."""
        tokens = sample(logits, inputs.sampling(greedy))
        self.token_pool.index_copy_(0, inputs.sample_slots, tokens)
        self.down.store(inputs.ring, tokens)
        return tokens


def plain_layer(layer: LayerSpec) -> bool:
    """Whether a layer takes rows of no request, which pad a captured prompt step."""
    return isinstance(layer.mixer, Attention) and isinstance(layer.ffn, DenseFfn)


def plan_shape(plan: StepPlan) -> StepShape:
    return StepShape(
        rows=sum(piece.count for piece in plan.pieces),
        requests=len(plan.pieces),
        samples=sum(piece.samples for piece in plan.pieces),
    )


def fill(arrays: dict[str, np.ndarray], plan: StepPlan, ring_row: int, page_size: int) -> None:
    """Writes a plan into the host's arrays; rows past the plan's (of a graph's bucket) are padding: all zeros."""
    pieces, count = plan.pieces, len(plan.pieces)
    for array in arrays.values():
        array[...] = 0
    arrays["ring"][0] = ring_row
    arrays["state_slots"][:count] = [piece.slot for piece in pieces]
    arrays["kv_len"][:count] = [piece.start + piece.count for piece in pieces]
    ends = np.cumsum([piece.count for piece in pieces])
    starts = arrays["query_start"]
    starts[1 : count + 1] = ends
    starts[count + 1 :] = ends[-1] + (np.arange(1, len(starts) - count) if plan.decode else 0)
    if plan.decode:
        _fill_decode_rows(arrays, pieces, page_size)
    else:
        _fill_prompt_rows(arrays, pieces, page_size)
    _fill_samples(arrays, [(piece, end) for piece, end in zip(pieces, ends.tolist(), strict=True) if piece.samples])


def _fill_decode_rows(arrays: dict[str, np.ndarray], pieces: Sequence[Piece], page_size: int) -> None:
    count = len(pieces)
    arrays["positions"][:count] = [piece.start for piece in pieces]
    arrays["slots"][:count] = [
        piece.track.pages[piece.start // page_size] * page_size + piece.start % page_size for piece in pieces
    ]
    arrays["tokens"][:count] = [
        piece.track.tokens[piece.start] if piece.start < len(piece.track.tokens) else 0 for piece in pieces
    ]


def _fill_prompt_rows(arrays: dict[str, np.ndarray], pieces: Sequence[Piece], page_size: int) -> None:
    begin = 0
    for piece in pieces:
        stop, end = piece.start + piece.count, begin + piece.count
        positions = np.arange(piece.start, stop)
        pages = np.asarray(piece.track.pages[: -(-stop // page_size)])
        arrays["positions"][begin:end] = positions
        arrays["slots"][begin:end] = pages[positions // page_size] * page_size + positions % page_size
        arrays["tokens"][begin:end] = piece.track.tokens[piece.start : stop]
        begin = end


def _fill_samples(arrays: dict[str, np.ndarray], sampled: list[tuple[Piece, int]]) -> None:
    count = len(sampled)
    params = [piece.track.request.sampling for piece, _ in sampled]
    arrays["sample_rows"][:count] = [end - 1 for _, end in sampled]
    arrays["sample_slots"][:count] = [piece.slot for piece, _ in sampled]
    arrays["sample_positions"][:count] = [piece.start + piece.count for piece, _ in sampled]
    arrays["seeds"][:count] = [piece.track.seed for piece, _ in sampled]
    arrays["temperature"][:count] = [p.temperature for p in params]
    arrays["top_k"][:count] = [p.top_k for p in params]
    arrays["top_p"][:count] = [p.top_p for p in params]
