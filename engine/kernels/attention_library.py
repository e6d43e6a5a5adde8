"""Long prompt pieces by PyTorch's attention kernels: the pages of one request are gathered, cuDNN or flash attention
does the rest.

On Hopper these kernels multiply in one warp group while another takes the softmax; ours does both in turn. They do not
read pages, so keys and values are copied once more, which long pieces outweigh.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import Batch, LayerCache
from engine.kernels._launch import launch, power_of_2

GATHERED_BYTES = 1 << 29
"""Most bytes of keys and values that are gathered."""


@dataclass(frozen=True)
class Rule:
    """rows: of the shortest piece for which the library is faster. first: the backend, "cudnn" or "flash", for a piece
    that begins its prompt, the other one where a GPU has no such. Later pieces go to flash attention: cuDNN's causal
    mask begins at the first key."""

    rows: int
    first: str


RULES = {64: Rule(4096, "cudnn"), 128: Rule(2048, "cudnn"), 256: Rule(2048, "cudnn")}
"""By the largest head dimension that a rule is for. Small models have heads of 64; for them the host's launches are the
limit at 2,048 rows, and PyTorch's calls cost the host more than ours."""


def rule_for(dim: int) -> Rule | None:
    """The rule for a head dimension; None where PyTorch's kernels do not take it."""
    return RULES[next(d for d in RULES if d >= dim)] if dim % 8 == 0 and dim <= max(RULES) else None


def padded_length(length: int) -> int:
    """The length in which cuDNN is called, up to 1/8 longer: for every other it plans anew, for tenths of a second."""
    step = max(128, power_of_2(length) // 16)
    return -(-length // step) * step


def library_backend(q: Tensor, cache: LayerCache, batch: Batch, window: int | None, sinks: Tensor | None) -> str | None:
    """ "cudnn" or "flash" where that is the faster way, else None.

    It takes one long piece of one prompt, in pages of q's dtype, outside of a captured graph: there, as
    engine/batch.py has it, max_kv is the request's kv_len.
    """
    rule = rule_for(q.shape[2])
    plain = window is None and sinks is None and cache.k.dtype == q.dtype and q.dtype != torch.float32
    one = batch.kv_len.shape[0] == 1 and q.shape[0] == batch.max_query
    gathered = 2 * padded_length(batch.max_kv) * cache.k.shape[1] * q.shape[2] * q.element_size()
    if not (plain and one and rule and q.shape[0] >= rule.rows and gathered <= GATHERED_BYTES):
        return None
    if torch.cuda.is_current_stream_capturing():
        return None
    wanted = _in_order(rule.first) if batch.max_kv == q.shape[0] else ("flash",)
    heads = q.shape[1], cache.k.shape[1]
    return next((name for name in wanted if supported(name, *heads, q.shape[2], q.dtype, q.device)), None)


def _in_order(first: str) -> tuple[str, ...]:
    return ("cudnn", "flash") if first == "cudnn" else ("flash", "cudnn")


@lru_cache(maxsize=64)
def supported(backend: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether PyTorch's kernel takes causal attention of these heads on the device: tried once."""
    cuda = torch.backends.cuda
    q, k, v = (torch.zeros(1, n, 128, dim, dtype=dtype, device=device) for n in (heads, kv_heads, kv_heads))
    can_use = {"cudnn": cuda.can_use_cudnn_attention, "flash": cuda.can_use_flash_attention}[backend]
    if not can_use(cuda.SDPAParams(q, k, v, None, 0.0, True, True)):
        return False
    try:
        causal_attention(q, k, v, dim**-0.5, backend)
    except RuntimeError:
        return False
    return True


def prefill_attention_library(q: Tensor, cache: LayerCache, batch: Batch, scale: float, backend: str) -> Tensor:
    """prefill_attention of the only request of the batch, whose kv_len is batch.max_kv: [T, heads, D].

    "cudnn" needs a piece that begins its prompt. Behind the end of the prompt it sees queries and keys of zeros, which
    the causal mask hides from all others.
    """
    rows, length = q.shape[0], batch.max_kv
    padded = padded_length(length) if backend == "cudnn" else length
    k, v = (t[None] for t in gather_pages(cache, batch.page_table[0], length, padded))
    query = F.pad(q, (0, 0, 0, 0, 0, padded - length)) if padded > length else q
    out = causal_attention(query.transpose(0, 1)[None], k, v, scale, backend)
    return out[0, :, :rows].transpose(0, 1).contiguous()


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, backend: str) -> Tensor:
    """q [1, heads, n, D] at the last n positions of k, v [1, kv_heads, length, D] -> [1, heads, n, D].

    On a CPU by PyTorch's plain form, whatever the backend.
    """
    aten = torch.ops.aten
    if not q.is_cuda:
        n, length = q.shape[2], k.shape[2]
        seen = torch.ones(n, length, dtype=torch.bool).tril(length - n)
        return F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
    if backend == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, False, 0.0, True, False, scale=scale)[0]
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)[0]


def gather_pages_reference(cache: LayerCache, pages: Tensor, length: int, padded: int) -> tuple[Tensor, Tensor]:
    """The first `length` keys and values of a request's `pages`, with zeros up to `padded`: [kv_heads, padded, D]."""
    pages = pages[: -(-length // cache.page_size)].long()
    k, v = (t[pages].transpose(0, 1).flatten(1, 2)[:, :length] for t in (cache.k, cache.v))
    return F.pad(k, (0, 0, 0, padded - length)), F.pad(v, (0, 0, 0, padded - length))


def gather_pages(cache: LayerCache, pages: Tensor, length: int, padded: int) -> tuple[Tensor, Tensor]:
    """See gather_pages_reference."""
    function = gather_pages_triton if cache.k.is_cuda else gather_pages_reference
    return function(cache, pages, length, padded)


def gather_pages_triton(cache: LayerCache, pages: Tensor, length: int, padded: int) -> tuple[Tensor, Tensor]:
    """gather_pages in one launch: every key and value read and written once."""
    from engine.kernels.attention_triton import gather_pages_kernel

    _, kv_heads, page_size, dim = cache.k.shape
    k, v = (torch.empty(kv_heads, padded, dim, dtype=cache.k.dtype, device=cache.k.device) for _ in range(2))
    block = 32
    launch(
        gather_pages_kernel, (-(-padded // block), kv_heads),
        cache.k, cache.v, pages, k, v, length, padded,
        DIM=dim, DIM_BLOCK=power_of_2(dim), PAGE=page_size, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return k, v
