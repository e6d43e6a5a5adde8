"""Triton kernels of sample.py."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels._device import load_sum


@triton.jit
def _log_exponential(word):
    """log of the exponential variate -log(1 - u), u = (word + 1/2) / 2^32 in (0, 1); a series where u is small."""
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = u * (1.0 + u * (0.5 + u * 0.3333333333))
    return tl.log(tl.where(u < 0.0078125, series, -tl.log(1.0 - u)))


@triton.jit
def _truncates(top_k, top_p):
    return (top_k > 0) | (top_p < 1.0)


@triton.jit
def choose_block_kernel(
    logits_ptr, best_ptr, best_id_ptr, top_ptr, x_ptr, score_ptr, temperature_ptr, top_k_ptr, top_p_ptr, seed_ptr,
    position_ptr, vocab, split_stride, row_stride,
    SPLITS: tl.constexpr, LANES: tl.constexpr, DRAW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best score and its lowest token, and the largest x, of 4 * LANES tokens of a row. Grid (rows, blocks).

    Score: the logit of a greedy row, x - log(E) of a drawn one. Rows with top-k or top-p leave x and the scores.
    """
    row = tl.program_id(0)
    block = tl.program_id(1)
    lane = tl.arange(0, LANES)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    drawn = False
    if DRAW:
        temperature = tl.load(temperature_ptr + row)
        drawn = temperature > 0
        stores = _truncates(tl.load(top_k_ptr + row), tl.load(top_p_ptr + row))
        counter = block * LANES + lane
        zero = counter * 0
        seed = tl.load(seed_ptr + row)
        words = tl.philox_impl(
            counter.to(tl.uint32), (zero + tl.load(position_ptr + row)).to(tl.uint32), zero.to(tl.uint32),
            zero.to(tl.uint32), (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32),
        )  # fmt: skip
    best = tl.full([LANES], float("-inf"), tl.float32)
    best_id = tl.zeros([LANES], tl.int32) + 4 * LANES * block + lane
    top = best
    for word in tl.static_range(4):
        token = (block * 4 + word) * LANES + lane
        inside = token < vocab
        x = load_sum(logits_ptr + row.to(tl.int64) * row_stride + token, inside, split_stride, SPLITS)
        x = tl.where(inside, x, float("-inf"))
        score = x
        if DRAW:  # noqa: SIM102 - the outer branch is taken when compiling
            if drawn:
                x = x / temperature
                score = x - _log_exponential(words[word])
                if stores:
                    at = row.to(tl.int64) * vocab + token
                    tl.store(x_ptr + at, x, mask=inside)
                    tl.store(score_ptr + at, score, mask=inside)
        best_id = tl.where(score > best, token, best_id)
        best = tl.maximum(best, score)
        top = tl.maximum(top, x)
    value = tl.max(best, axis=0)
    place = row * tl.num_programs(1) + block
    tl.store(best_ptr + place, value)
    tl.store(best_id_ptr + place, tl.min(tl.where(best == value, best_id, 0x7FFFFFFF), axis=0))
    tl.store(top_ptr + place, tl.max(top, axis=0))


@triton.jit
def _ordered(x):
    """int32 that orders as the float32 does."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _count_above(x_row, vocab, a, b, c, CHUNK: tl.constexpr):
    """How many of the row's ordered values exceed a, b and c."""
    above_a = tl.zeros([CHUNK], tl.int32)
    above_b = tl.zeros([CHUNK], tl.int32)
    above_c = tl.zeros([CHUNK], tl.int32)
    for start in tl.range(0, vocab, CHUNK, num_stages=2):
        token = start + tl.arange(0, CHUNK)
        key = _ordered(tl.load(x_row + token, mask=token < vocab, other=float("-inf"))).to(tl.int64)
        above_a += (key > a).to(tl.int32)
        above_b += (key > b).to(tl.int32)
        above_c += (key > c).to(tl.int32)
    return tl.sum(above_a, axis=0), tl.sum(above_b, axis=0), tl.sum(above_c, axis=0)


@triton.jit
def _kth_cut(x_row, vocab, top_k, top, CHUNK: tl.constexpr):
    """A cut (in the order of _ordered) above which top-k's set lies: a search in four parts a pass."""
    low = tl.full([], -2147483648, tl.int64)
    high = _ordered(top).to(tl.int64)
    found = False
    while (high - low > 1) & (not found):
        step = tl.maximum((high - low) // 4, 1)
        a = low + step
        b = tl.minimum(a + step, high - 1)
        c = tl.minimum(b + step, high - 1)
        above_a, above_b, above_c = _count_above(x_row, vocab, a, b, c, CHUNK)
        high = tl.where(above_a < top_k, a, tl.where(above_b < top_k, b, tl.where(above_c < top_k, c, high)))
        low = tl.where(above_c >= top_k, c, tl.where(above_b >= top_k, b, tl.where(above_a >= top_k, a, low)))
        found = (above_a == top_k) | (above_b == top_k) | (above_c == top_k)
    return low


@triton.jit
def choose_row_kernel(
    best_ptr, best_id_ptr, top_ptr, x_ptr, score_ptr, tokens_ptr, temperature_ptr, top_k_ptr, top_p_ptr, vocab, blocks,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, DRAW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The token of one row from its blocks; for top-k and top-p, from passes over its values. Grid (rows,).

    The best-scored token of all is the draw if it lies in the set. If not, nothing at or below it does: the best-scored
    of those above it is the next candidate, found in the pass that judged the last one.
    """
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCKS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = row * blocks + lane
    best = tl.load(best_ptr + at, mask=lane < blocks, other=float("-inf"))
    best_id = tl.load(best_id_ptr + at, mask=lane < blocks, other=0x7FFFFFFF)
    token = tl.min(tl.where(best == tl.max(best, axis=0), best_id, 0x7FFFFFFF), axis=0)
    if DRAW:
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        if (tl.load(temperature_ptr + row) > 0) & _truncates(top_k, top_p):
            top = tl.max(tl.load(top_ptr + at, mask=lane < blocks, other=float("-inf")), axis=0)
            x_row = x_ptr + row.to(tl.int64) * vocab
            score_row = score_ptr + row.to(tl.int64) * vocab
            cut = tl.full([], -2147483648, tl.int64)
            if (top_k > 0) & (top_k < vocab) & (top_p < 1.0):
                cut = _kth_cut(x_row, vocab, top_k, top, CHUNK)
            allowed = tl.where(top_k > 0, top_k, vocab)
            outside = True
            while outside:
                x_token = tl.load(x_row + token)
                count = tl.zeros([CHUNK], tl.int32)
                above = tl.zeros([CHUNK], tl.float32)
                total = tl.zeros([CHUNK], tl.float32)
                score = tl.full([CHUNK], float("-inf"), tl.float32)
                next_id = tl.full([CHUNK], 0x7FFFFFFF, tl.int32)
                for start in tl.range(0, vocab, CHUNK, num_stages=2):
                    other = start + tl.arange(0, CHUNK)
                    x = tl.load(x_row + other, mask=other < vocab, other=float("-inf"))
                    other_score = tl.load(score_row + other, mask=other < vocab, other=float("-inf"))
                    mass = tl.where(_ordered(x).to(tl.int64) > cut, tl.exp(x - top), 0.0)
                    higher = x > x_token
                    total += mass
                    above += tl.where(higher, mass, 0.0)
                    count += higher.to(tl.int32)
                    better = higher & (other_score > score)
                    score = tl.where(better, other_score, score)
                    next_id = tl.where(better, other, next_id)
                within_p = (top_p >= 1.0) | (tl.sum(above, axis=0) < top_p * tl.sum(total, axis=0))
                higher_count = tl.sum(count, axis=0)
                outside = (higher_count > 0) & ((higher_count >= allowed) | (not within_p))
                if outside:
                    value = tl.max(score, axis=0)
                    token = tl.min(tl.where(score == value, next_id, 0x7FFFFFFF), axis=0)
    tl.store(tokens_ptr + row, token)
