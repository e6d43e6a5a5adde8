"""The device side of what requests remember: pages of keys and values, recurrent states, page tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import LayerCache, StateCache
from engine.config import Attention, DeltaNet, LatentAttention, Mixer, ModelConfig

_STORED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
SCALE_BYTES = 4


def stored_dtype(cache_dtype: str, activations: torch.dtype) -> torch.dtype:
    """How keys and values are kept. Float32 activations keep a 16-bit cache in float32: nothing is rounded there."""
    if activations == torch.float32 and cache_dtype in ("bf16", "fp16"):
        return torch.float32
    return _STORED[cache_dtype]


def _widths(mixer: Attention | LatentAttention) -> tuple[int, int, int]:
    """(kv heads, values a head in `k`, values a head in `v`)."""
    if isinstance(mixer, Attention):
        return mixer.kv_heads, mixer.head_dim, mixer.head_dim
    return 1, mixer.kv_rank, mixer.rope_dim


def conv_channels(mixer: DeltaNet) -> int:
    return 2 * mixer.key_heads * mixer.key_dim + mixer.value_heads * mixer.value_dim


def token_bytes(mixer: Mixer, stored: torch.dtype) -> int:
    """Cache bytes of one token in one layer."""
    if isinstance(mixer, DeltaNet):
        return 0
    heads, k, v = _widths(mixer)
    scales = 2 * SCALE_BYTES if stored.itemsize == 1 else 0
    return heads * ((k + v) * stored.itemsize + scales)


def state_bytes(mixer: Mixer, activations: torch.dtype) -> int:
    """Recurrent-state bytes of one request in one layer."""
    if not isinstance(mixer, DeltaNet):
        return 0
    state = mixer.value_heads * mixer.key_dim * mixer.value_dim * 4
    return state + conv_channels(mixer) * mixer.conv * activations.itemsize


def model_token_bytes(config: ModelConfig, stored: torch.dtype) -> int:
    return sum(token_bytes(layer.mixer, stored) for layer in config.layers)


def model_state_bytes(config: ModelConfig, activations: torch.dtype) -> int:
    return sum(state_bytes(layer.mixer, activations) for layer in config.layers)


@dataclass
class Cache:
    """`layers[i]`: the cache of the i-th layer held here. `page_table` int32 [slots, max_pages], by slot.

    Slot 0 and page 0 are the null ones: padding reads and writes them and nothing else. `states`: the tensors
    [layers, slots, ...] of which the recurrent layers hold their parts, so that one copy moves a slot of all of them.
    """

    layers: list[LayerCache | StateCache]
    page_table: Tensor
    page_size: int
    states: list[Tensor]

    @staticmethod
    def allocate(
        mixers: Sequence[Mixer],
        pages: int,
        page_size: int,
        max_streams: int,
        max_pages: int,
        stored: torch.dtype,
        activations: torch.dtype,
        device: torch.device,
        snapshots: int = 0,
        contiguous: bool = False,
    ) -> Cache:
        """A zeroed cache of `pages` pages (the null page counted) and max_streams + 1 slots.

        Behind the streams' slots, recurrent states have `snapshots` more.
        """
        slots = max_streams + 1 + snapshots
        states: list[Tensor] = []
        layers: dict[int, LayerCache | StateCache] = {}
        for spec in dict.fromkeys(mixer for mixer in mixers if isinstance(mixer, DeltaNet)):
            places = [i for i, mixer in enumerate(mixers) if mixer == spec]
            conv, state = _allocate_states(spec, len(places), slots, activations, device)
            states += [conv, state]
            layers |= {place: StateCache(conv[n], state[n]) for n, place in enumerate(places)}
        for i, mixer in enumerate(mixers):
            if not isinstance(mixer, DeltaNet):
                layers[i] = _allocate_pages(mixer, pages, page_size, stored, device, contiguous)
        table = torch.zeros((max_streams + 1, max_pages), dtype=torch.int32, device=device)
        return Cache([layers[i] for i in range(len(mixers))], table, page_size, states)

    def update_table(self, fresh_slots: Sequence[int], entries: Sequence[tuple[int, int, int]]) -> None:
        """Clears the rows of `fresh_slots`, then sets page_table[slot, index] = page for each (slot, index, page)."""
        if fresh_slots:
            self.page_table.index_fill_(0, self._upload([fresh_slots])[0], 0)
        if entries:
            slots, indices, pages = self._upload(list(zip(*entries, strict=True)))
            self.page_table.index_put_((slots, indices), pages.int())

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies the recurrent states of every layer: (from slot, to slot)."""
        for source, target in pairs:
            for states in self.states:
                states[:, target].copy_(states[:, source])

    def _upload(self, rows: Sequence[Sequence[int]]) -> Tensor:
        values = torch.tensor(rows, dtype=torch.int64)
        if self.page_table.device.type != "cuda":
            return values
        return values.pin_memory().to(self.page_table.device, non_blocking=True)

    @property
    def nbytes(self) -> int:
        held = [value for layer in self.layers for value in vars(layer).values() if isinstance(value, Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


def _allocate_states(
    mixer: DeltaNet, layers: int, slots: int, activations: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(conv, state) of `layers` equal layers: see StateCache."""
    conv = torch.zeros((layers, slots, mixer.conv, conv_channels(mixer)), dtype=activations, device=device)
    shape = (layers, slots, mixer.value_heads, mixer.key_dim, mixer.value_dim)
    return conv, torch.zeros(shape, dtype=torch.float32, device=device)


def _allocate_pages(
    mixer: Attention | LatentAttention,
    pages: int,
    page_size: int,
    stored: torch.dtype,
    device: torch.device,
    contiguous: bool,
) -> LayerCache:
    heads, k_width, v_width = _widths(mixer)
    k = torch.zeros((pages, heads, page_size, k_width), dtype=stored, device=device)
    v = torch.zeros((pages, heads, page_size, v_width), dtype=stored, device=device)
    if stored.itemsize > 1:
        return LayerCache(k, v, contiguous=contiguous)
    scales = torch.zeros((2, pages, heads, page_size), dtype=torch.float32, device=device)
    return LayerCache(k, v, scales[0], scales[1], contiguous)
