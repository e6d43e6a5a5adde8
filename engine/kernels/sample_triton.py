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
    logits_ptr, best_ptr, best_id_ptr, top_ptr, mass_ptr, x_ptr, score_ptr, temperature_ptr, top_k_ptr, top_p_ptr,
    seed_ptr, position_ptr, vocab, split_stride, row_stride,
    SPLITS: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, DRAW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best score and its lowest token of 4 * LANES tokens of a row. Grid (rows, blocks).

    Score: the logit of a greedy row, x - log(E) of a drawn one. Rows with top-k or top-p leave x and the scores, and of
    every GROUP tokens the largest x and the sum of exp(x - that).
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
                    groups = tl.reshape(x, [LANES // GROUP, GROUP])
                    top = tl.max(groups, axis=1)
                    mass = tl.sum(tl.where(groups > float("-inf"), tl.exp(groups - top[:, None]), 0.0), axis=1)
                    word_row = (row * tl.num_programs(1) + block) * 4 + word
                    group = word_row * (LANES // GROUP) + tl.arange(0, LANES // GROUP)
                    tl.store(top_ptr + group, top)
                    tl.store(mass_ptr + group, mass)
        best_id = tl.where(score > best, token, best_id)
        best = tl.maximum(best, score)
    value = tl.max(best, axis=0)
    place = row * tl.num_programs(1) + block
    tl.store(best_ptr + place, value)
    tl.store(best_id_ptr + place, tl.min(tl.where(best == value, best_id, 0x7FFFFFFF), axis=0))


@triton.jit
def _ordered(x):
    """int32 that orders as the float32 does, -0 like 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
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
def _sum2(x):
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def _max2(x):
    return tl.max(tl.max(x, axis=1), axis=0)


@triton.jit
def _from_ordered(key):
    """The float32 of which key is _ordered."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _cut_in_registers(x, count):
    """A value that `count` of x [A, B] reach; with ties, the largest that more do; -inf where fewer are above that."""
    low = _ordered(tl.full([], float("-inf"), tl.float32)).to(tl.int64)
    high = _ordered(_max2(x)).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        reach = _sum2((x >= _from_ordered(middle.to(tl.int32))).to(tl.int32))
        low = tl.where(reach >= count, middle, low)
        high = tl.where(reach == count, middle + 1, tl.where(reach < count, middle, high))
    return _from_ordered(low.to(tl.int32))


@triton.jit
def _highest_groups(tops, groups, count, list_ptr, GROUPS: tl.constexpr, KEPT: tl.constexpr):
    """Of groups of tokens with the largest values tops [1, GROUPS]: a bound that `count` of them reach, how many do,
    and the first KEPT that do [KEPT, 1], by way of list int32 [KEPT]."""
    group = tl.arange(0, GROUPS)[None, :]
    bound = _cut_in_registers(tops, count)
    reaches = (tops >= bound) & (group < groups)
    rank = tl.cumsum(reaches.to(tl.int32), axis=1) - 1
    reaching = _sum2(reaches.to(tl.int32))
    tl.store(list_ptr + rank, group, mask=reaches & (rank < KEPT))
    tl.debug_barrier()
    place = tl.arange(0, KEPT)[:, None]
    return bound, reaching, tl.load(list_ptr + place, mask=place < reaching, other=0)


@triton.jit
def _draw_from_few(
    token, x_row, score_row, tops, masses, list_ptr, groups, vocab, top_k, top_p,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """(the draw, whether it is one): from the KEPT groups of GROUP tokens with the largest values, held in registers.

    Every token that reaches the bound of those groups is among them. So is the set, if it has at least top_k tokens or
    a share top_p of the mass. See _draw_from_all for the search.
    """
    top = _max2(tops)
    has_k = (top_k > 0) & (top_k < vocab)
    total = _sum2(masses * tl.where(tops > float("-inf"), tl.exp(tops - top), 0.0))
    bound, reaching, chosen = _highest_groups(
        tops, groups, tl.where(has_k, tl.minimum(top_k, KEPT), KEPT), list_ptr, GROUPS, KEPT
    )
    index = chosen * GROUP + tl.arange(0, GROUP)[None, :]
    held = tl.arange(0, KEPT)[:, None] < reaching
    x = tl.load(x_row + index, mask=held & (index < vocab), other=float("-inf"))
    if has_k:
        holds = _sum2((x >= bound).to(tl.int32)) >= top_k
        bound = tl.maximum(bound, _cut_in_registers(x, top_k))
        total = _sum2(tl.where(x >= bound, tl.exp(x - top), 0.0))
    else:
        holds = _sum2(tl.where(x >= bound, tl.exp(x - top), 0.0)) >= top_p * total
    holds = holds & (reaching <= KEPT)
    outside = holds
    while outside:
        x_token = tl.load(x_row + token)
        higher = (x >= bound) & (x > x_token)
        above = _sum2(tl.where(higher, tl.exp(x - top), 0.0))
        within = (x_token >= bound) & ((top_p >= 1.0) | (above < top_p * total))
        outside = (_sum2(higher.to(tl.int32)) > 0) & (not within)
        if outside:
            score = tl.load(score_row + index, mask=higher, other=float("-inf"))
            best = _max2(score)
            token = -_max2(tl.where(higher & (score == best), -index, -0x7FFFFFFF))
    return token, holds


@triton.jit
def _draw_from_all(token, x_row, score_row, top, vocab, top_k, top_p, CHUNK: tl.constexpr):
    """The draw from passes over all values of a row.

    The best-scored token of all is the draw if it lies in the set. If not, nothing at or below it does: the best-scored
    of those above it is the next candidate, found in the pass that judged the last one.
    """
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
    return token


@triton.jit
def choose_row_kernel(
    best_ptr, best_id_ptr, top_ptr, mass_ptr, x_ptr, score_ptr, tokens_ptr, temperature_ptr, top_k_ptr, top_p_ptr,
    list_ptr, pool_ptr, slots_ptr, ring_ptr, ring_row_ptr, ring_stride, vocab, blocks, groups,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, GROUP: tl.constexpr,
    DRAW: tl.constexpr, PLACES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The token of one row from its blocks; for top-k and top-p, from its highest groups of GROUP tokens, or where
    those do not hold the set, from passes over its values. Grid (rows,).

    What choose_block_kernel has not written was complete before that kernel let this one start: it is read before the
    wait. Bytes moved: 8 a block; with top-k or top-p 8 a group and 4 to 8 a token of KEPT groups, or of the row.
    """
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCKS)
    if DRAW:
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        truncated = (tl.load(temperature_ptr + row) > 0) & _truncates(top_k, top_p)
    if PLACES:
        pool_place = pool_ptr + tl.load(slots_ptr + row)
        ring_place = ring_ptr + tl.load(ring_row_ptr) * ring_stride + row
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = row * blocks + lane
    best = tl.load(best_ptr + at, mask=lane < blocks, other=float("-inf"))
    best_id = tl.load(best_id_ptr + at, mask=lane < blocks, other=0x7FFFFFFF)
    token = tl.min(tl.where(best == tl.max(best, axis=0), best_id, 0x7FFFFFFF), axis=0)
    if DRAW:  # noqa: SIM102 - the outer branch is taken when compiling
        if truncated:
            group = tl.arange(0, GROUPS)[None, :]
            tops = tl.load(top_ptr + row * groups + group, mask=group < groups, other=float("-inf"))
            masses = tl.load(mass_ptr + row * groups + group, mask=group < groups, other=0.0)
            x_row = x_ptr + row.to(tl.int64) * vocab
            score_row = score_ptr + row.to(tl.int64) * vocab
            token, found = _draw_from_few(
                token, x_row, score_row, tops, masses, list_ptr + row * KEPT, groups, vocab, top_k, top_p,
                GROUPS, KEPT, GROUP,
            )  # fmt: skip
            if not found:
                token = _draw_from_all(token, x_row, score_row, _max2(tops), vocab, top_k, top_p, CHUNK)
    tl.store(tokens_ptr + row, token)
    if PLACES:
        tl.store(pool_place, token)
        tl.store(ring_place, token)
