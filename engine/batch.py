"""The description of one step on the device: everything a layer needs to know about the tokens it is given.

It is passed explicitly to every layer; there is no global context. In a captured graph the tensors are persistent
buffers that the host overwrites between replays.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Batch:
    """T token rows that belong to R requests (rows of a request are consecutive).

    tokens [T] int32, positions [T] int32, slots [T] int32: where each token's key and value go
    (page * page_size + offset; rows of padding point into page 0, the null page).
    query_start [R + 1] int32: first row of each request. kv_len [R] int32: tokens of the request in the cache
    after this step, the new ones included (0 for a padding request).
    page_table [R, max_pages] int32, rows filled up with page 0.
    state_slots [R] int32: recurrent-state slot of each request; slot 0 is the null slot, for padding.
    sample_rows [S] int32: the rows whose logits are wanted.
    decode: every request has exactly one row (T == R).
    max_query, max_kv: host bounds on rows a request and on kv_len, the largest ones in a step that is not captured (a
    captured graph holds its bucket's bounds).
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    query_start: Tensor
    kv_len: Tensor
    page_table: Tensor
    state_slots: Tensor
    sample_rows: Tensor
    decode: bool
    max_query: int
    max_kv: int

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]


@dataclass
class LayerCache:
    """The paged cache of one attention layer.

    k, v [pages, kv_heads, page_size, head_dim] in the cache dtype (torch.int8 or torch.float8_e4m3fn for the 8-bit
    forms, with k_scale, v_scale [pages, kv_heads, page_size] float32: value = stored * scale). Page 0 is the null page.
    Latent attention keeps its latents in `k` [pages, 1, page_size, kv_rank] and its rotated part in
    `v` [pages, 1, page_size, rope_dim]. `contiguous`: the pages of every request follow each other.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    contiguous: bool = False

    @property
    def page_size(self) -> int:
        return self.k.shape[2]


@dataclass
class StateCache:
    """The recurrent state of one DeltaNet layer, by slot; slot 0 is the null slot.

    conv [slots, conv, channels] in the activation dtype: the input column of position p stands in row p % conv, so that
    a step writes a row which nobody reads. state [slots, value_heads, key_dim, value_dim] float32.
    A request at position 0 starts from zeros whatever its slot holds: a slot needs no clearing.
    """

    conv: Tensor
    state: Tensor
