"""Runs ordered steps on one device: uploads what the step needs, launches it, and hands back the tokens.

On a GPU nothing here waits: inputs go up through a ring of pinned buffers, sampled tokens stay on the device in the
token pool (where the next decode step finds them) and come down through a ring of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cache import Cache
from engine.graphs import Graphs, GraphShapes, longest_prompt
from engine.inputs import StepInputs
from engine.kernels._launch import whole
from engine.kernels.sample import TokenPlaces, sample
from engine.kernels.start import start_decode
from engine.layers.linear import Kernels
from engine.models.decoder import Decoder
from engine.order import Banned, StepOrder, make_order
from engine.rings import DownRing, UpRing
from engine.sampler import TokenLogprobs, forbid, log_probabilities
from engine.scheduler import StepPlan


@dataclass
class StepResult:
    """The tokens of a launched step; `wait` blocks until the host has them."""

    plan: StepPlan
    ring: DownRing
    row: int
    samples: int
    logprobs: list[TokenLogprobs | None] | None = None

    def ready(self) -> bool:
        return self.ring.arrived(self.row)

    def wait(self) -> list[int]:
        return self.ring.read(self.row, self.samples)


class Stage:
    """A decoder (the whole model or a range of its layers), its cache and the buffers of its steps.

    `resident`: decode steps take their tokens from the token pool on the device; without it (the driven loop) they take
    them from the host. `ring_depth`: more than the
    steps that may be in flight.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: Cache,
        device: torch.device,
        dtype: torch.dtype,
        max_streams: int,
        max_model_len: int,
        ring_depth: int,
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        self.device = device
        self.dtype = dtype
        self.max_streams = max_streams
        self.max_model_len = max_model_len
        self.ring_depth = ring_depth
        self.token_pool = torch.zeros(max_streams + 1, dtype=torch.int32, device=device)
        self.up = UpRing(device, ring_depth)
        self.down = DownRing(device, ring_depth, max_streams)
        self.graphs: Graphs | None = None
        self._graphs_by_kernels: dict[str, Graphs] = {}
        self.resident = True

    @torch.inference_mode()
    def capture(self, kernels: Kernels) -> None:
        """Captures the steps that are replayed; those of each kind of kernels are kept."""
        if kernels not in self._graphs_by_kernels:
            longest = longest_prompt(self.decoder.config, kernels)
            shapes = GraphShapes.of(self.max_streams, self.max_model_len, longest)
            self._graphs_by_kernels[kernels] = Graphs(self, shapes)
        self.graphs = self._graphs_by_kernels[kernels]

    def set_kernels(self, kernels: Kernels) -> None:
        """Turns the switch `kernels`."""
        self.decoder.set_kernels(kernels)
        if self.graphs is not None:
            self.capture(kernels)

    def synchronize(self) -> None:
        """Waits for the device: what the driven loop does before it hands a step over."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def order(self, plan: StepPlan, banned: Banned) -> StepOrder:
        """The plan as numbers, in the form that this stage (and every other of the model) executes."""
        shapes = None if self.graphs is None else self.graphs.shapes
        return make_order(plan, banned, self.cache.page_size, self.ring_depth, self.resident, shapes)

    def launch(self, plan: StepPlan, banned: Banned) -> StepResult:
        """Starts a step of a model that is whole here. `banned`: (sampled row, tokens that may not be chosen there)."""
        order = self.order(plan, banned)
        _, logprobs = self.execute(order)
        row = order.step % self.ring_depth
        self.down.fetch(row)
        return StepResult(plan, self.down, row, order.samples, logprobs)

    @torch.inference_mode()
    def execute(
        self, order: StepOrder, residual: Tensor | None = None
    ) -> tuple[Tensor | None, list[TokenLogprobs | None] | None]:
        """Runs a step. `residual` [rows, hidden]: from the stage before, overwritten.

        Returns (residual for the next stage, or None on the last; log probabilities of the sampled rows, where wanted).
        The residual of a captured step must be copied before the next step.
        """
        self.cache.update_table(order.fresh_slots, order.new_pages)
        self.cache.copy_states(order.restores)
        if order.graph and self.graphs is not None:
            result = self.graphs.replay(order, residual), None
        else:
            result = self._run_eagerly(order, residual)
        self.cache.copy_states(order.snapshots)
        return result

    def _run_eagerly(
        self, order: StepOrder, residual: Tensor | None
    ) -> tuple[Tensor | None, list[TokenLogprobs | None] | None]:
        inputs = self.upload(order, None)
        pooled = order.decode and order.resident
        result = self.forward(inputs, order.decode, pooled, order.max_query, order.max_kv, residual)
        if not self.decoder.is_last:
            return result, None
        return None, self._sample(order, inputs, result) if order.samples else None

    def _sample(self, order: StepOrder, inputs: StepInputs, logits: Tensor) -> list[TokenLogprobs | None] | None:
        if order.banned or order.logprobs:
            logits = forbid(whole(logits), order.banned)
        tokens = self.choose(logits, inputs, order.greedy)
        return log_probabilities(logits, tokens, order.logprobs) if order.logprobs else None

    def upload(self, order: StepOrder, into: Tensor | None) -> StepInputs:
        """Copies a step's numbers to the device: into the buffer `into`, or into a new one."""
        nbytes = order.packed.nbytes
        host = self.up.take(nbytes)
        host[:nbytes].numpy()[:] = order.packed
        return StepInputs.over(self.up.send(host, nbytes, into), order.shape)

    def forward(
        self,
        inputs: StepInputs,
        decode: bool,
        pooled: bool,
        max_query: int,
        max_kv: int,
        residual: Tensor | None = None,
    ) -> Tensor:
        """The decoder over the packed inputs: logits [S, vocab] or Partials on the last stage, else the residual.

        `pooled`: the tokens are in the token pool, not in the inputs.
        """
        table, slots = self.cache.page_table, inputs.state_slots
        if pooled and self.decoder.is_first:
            scale = self.decoder.config.embedding_scale
            residual, page_table = start_decode(self.token_pool, slots, table, self.decoder.embedding, scale)
        else:
            page_table = table.index_select(0, slots)
        batch = inputs.batch(page_table, decode, max_query, max_kv)
        return self.decoder(batch, self.cache.layers, residual)

    def choose(self, logits: Tensor, inputs: StepInputs, greedy: bool) -> Tensor:
        """Samples (`greedy`: no row draws); the tokens [S] int32 go into the token pool and into the output ring."""
        places = TokenPlaces(self.token_pool, inputs.sample_slots, self.down.tokens, inputs.ring)
        return sample(logits, inputs.sampling(greedy), places)
