"""Choosing the next token: greedy, or drawn with temperature, top-k and top-p, by noise of (seed, position) alone.

A draw is the largest of x_i - log(E_i), where x = logits / temperature and E_i are exponential variates: that is a
sample of softmax(x) (the Gumbel-max trick), and restricted to a set of tokens one of the renormalised distribution.
The sets are closed under ties: top-k keeps every token that fewer than k exceed; top-p, of what top-k left, every token
above which less than p of the mass lies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels._launch import launch, partials_of, power_of_2, whole

NOISE_BLOCK = 2048
"""Tokens that share 512 Philox counters: token v of block b = v // 2048 takes word v % 2048 // 512 of counter
(512 b + v % 512, position, 0, 0) under key `seed`. Part of what a seed means: not a tuning parameter."""

GROUP = NOISE_BLOCK // 16
KEPT_GROUPS = 64
"""Groups of 128 tokens of a row that a program holds in registers: 16 values a thread of 16 warps."""

_MASK = 0xFFFFFFFF


@dataclass
class SamplingTensors:
    """Per row [R], on the device: temperature float32 (0: greedy), top_k int32 (0: off), top_p float32 (1: off), seed
    int64, position int32 (of the token being chosen).

    `greedy` is a promise of the host that every temperature is 0: no noise is made. A captured graph keeps it.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    position: Tensor
    greedy: bool = False


@dataclass(frozen=True)
class TokenPlaces:
    """Where chosen tokens are kept on the device: in pool int32 [slots] at `slots` int64 [R], where the next step finds
    them, and at the start of the row `row` int64 [1] of ring int32 [depth, >= R], whence they go to the host."""

    pool: Tensor
    slots: Tensor
    ring: Tensor
    row: Tensor

    def keep(self, tokens: Tensor) -> None:
        """Puts tokens int32 [R] there."""
        self.pool.index_copy_(0, self.slots, tokens)
        self.ring[:, : tokens.shape[0]].index_copy_(0, self.row, tokens[None])


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * b for unsigned 32-bit values held in int64."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(seed: int, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox-4x32-10 (Salmon et al., 2011): four words, unsigned 32-bit values held in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        high0, low0 = _multiply(0xD2511F53, c0)
        high1, low1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def exponential_noise(seed: int, position: int, vocab: int) -> Tensor:
    """E float32 [vocab]: exponential variates, all positive and finite, with full precision near 0, where they win."""
    lanes = torch.arange(-(-vocab // NOISE_BLOCK) * NOISE_BLOCK // 4)
    zero = torch.zeros_like(lanes)
    words = torch.stack(philox(seed, (lanes, zero + position, zero, zero)))
    words = words.reshape(4, -1, NOISE_BLOCK // 4).transpose(0, 1).reshape(-1)[:vocab]
    uniform = ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log1p(-uniform)


def sample_reference(logits: Tensor, params: SamplingTensors) -> Tensor:
    """logits [R, V] or Partials [S, R, V] -> tokens int32 [R]; of equal logits the lowest id. Sorts: the oracle."""
    wide = whole(logits).float()
    tokens = wide.argmax(-1).int()
    for row, temperature in enumerate([] if params.greedy else params.temperature.tolist()):
        if temperature > 0:
            kept = _kept(wide[row] / temperature, int(params.top_k[row]), float(params.top_p[row]))
            noise = exponential_noise(int(params.seed[row]), int(params.position[row]), wide.shape[1])
            tokens[row] = (kept - noise.to(kept.device).log()).argmax()
    return tokens


def _kept(x: Tensor, top_k: int, top_p: float) -> Tensor:
    """x [V] with everything outside top-k and top-p at -inf."""
    if 0 < top_k < len(x):
        x = x.masked_fill(x < x.topk(top_k).values[-1], float("-inf"))
    if top_p < 1:
        ranked = x.double().sort(descending=True).values
        mass = (ranked - ranked[0]).exp()
        above = mass.cumsum(0) - mass
        above = above[torch.searchsorted(-ranked, -ranked)]
        threshold = ranked[above < top_p * mass.sum()][-1] if top_p > 0 else ranked[0]
        x = x.masked_fill(x < threshold, float("-inf"))
    return x


def sample(logits: Tensor, params: SamplingTensors, places: TokenPlaces | None = None) -> Tensor:
    """See sample_reference; the tokens are kept in `places` too, where there are any."""
    if logits.is_cuda:
        return sample_triton(logits, params, places)
    tokens = sample_reference(logits, params)
    if places is not None:
        places.keep(tokens)
    return tokens


def sample_triton(logits: Tensor, params: SamplingTensors, places: TokenPlaces | None = None) -> Tensor:
    """sample in two launches: one reads the logits, split over the vocabulary; one finishes every row.

    A row with top-k or top-p is finished from the KEPT_GROUPS groups of tokens that hold its largest values, in
    registers; where the set reaches below those, by passes over all values. Such rows need 8 bytes a token of scratch.
    """
    from engine.kernels.sample_triton import choose_block_kernel, choose_row_kernel

    rows, vocab = logits.shape[-2:]
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if not rows:
        return tokens
    blocks = -(-vocab // NOISE_BLOCK)
    splits, split_stride, row_stride = partials_of(logits)
    best = torch.empty((rows, blocks), dtype=torch.float32, device=logits.device)
    best_id = torch.empty((rows, blocks), dtype=torch.int32, device=logits.device)
    groups = NOISE_BLOCK // GROUP * blocks
    top, mass = torch.empty((2, rows, groups), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((rows, KEPT_GROUPS), dtype=torch.int32, device=logits.device)
    scratch = torch.empty((2, rows, 0 if params.greedy else vocab), dtype=torch.float32, device=logits.device)
    launch(
        choose_block_kernel, (rows, blocks),
        logits, best, best_id, top, mass, scratch[0], scratch[1], params.temperature, params.top_k, params.top_p,
        params.seed, params.position, vocab, split_stride, row_stride,
        SPLITS=splits, LANES=NOISE_BLOCK // 4, GROUP=GROUP, DRAW=not params.greedy, num_warps=4,
    )  # fmt: skip
    kept = (None,) * 4 if places is None else (places.pool, places.slots, places.ring, places.row)
    launch(
        choose_row_kernel, (rows,),
        best, best_id, top, mass, scratch[0], scratch[1], tokens, params.temperature, params.top_k, params.top_p,
        chosen, *kept, 0 if places is None else places.ring.stride(0), vocab, blocks, groups,
        BLOCKS=power_of_2(blocks), CHUNK=min(4096, power_of_2(vocab)), GROUPS=power_of_2(groups), KEPT=KEPT_GROUPS,
        GROUP=GROUP, DRAW=not params.greedy, PLACES=places is not None, num_warps=4 if params.greedy else 16,
    )  # fmt: skip
    return tokens
