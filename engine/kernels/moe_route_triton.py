"""The Triton kernels that choose the experts of every token and group the visits by expert."""

import triton
import triton.language as tl

NO_EXPERT = tl.constexpr(-(2**31))


@triton.jit(do_not_specialize=["tokens"])
def router_logits_kernel(
    x, weight, out, tokens, outputs, K, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr
):
    """out [tokens, outputs] float32 = x [tokens, K] times weight [outputs, K]."""
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    acc = tl.zeros((M, N), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        at = rows.to(tl.int64)[:, None] * K + k[None, :]
        a = tl.load(x + at, mask=(rows < tokens)[:, None] & (k < K)[None, :], other=0.0)
        at = columns[None, :] * K + k[:, None]
        b = tl.load(weight + at, mask=(columns < outputs)[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(a, b.to(a.dtype), acc, input_precision="ieee")
    at = rows.to(tl.int64)[:, None] * outputs + columns[None, :]
    tl.store(out + at, acc, mask=(rows < tokens)[:, None] & (columns < outputs)[None, :])


@triton.jit
def _choose(
    score, shared_logit, bias, selection_bias, ids, weights, token, inside, M: tl.constexpr,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, RULE: tl.constexpr,
    RENORMALIZE: tl.constexpr, SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SELECTION: tl.constexpr,
    SHARED: tl.constexpr, SHARED_GATE: tl.constexpr,
):  # fmt: skip
    """Stores the experts of M tokens and their weights; equal scores go to the lower expert.

    score [M, BINS]: the logits; shared_logit [M]; token and inside [M].
    """
    expert = tl.arange(0, BINS)[None, :]
    known = expert < EXPERTS
    score = tl.where(known, score, float("-inf"))
    if HAS_BIAS:
        score += tl.load(bias + expert, mask=known, other=0.0).to(tl.float32)
    if RULE == "softmax":
        score = tl.exp(score - tl.max(score, axis=1)[:, None])
        score = score / tl.sum(score, axis=1)[:, None]
    elif RULE == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-score))
    choice = score
    if HAS_SELECTION:
        choice += tl.load(selection_bias + expert, mask=known, other=0.0).to(tl.float32)
    # Whole numbers in the order of the scores: their reductions are single instructions, and whatever a score is (even
    # not a number), it comes before what is no expert.
    key = choice.to(tl.int32, bitcast=True)
    key = tl.where(known, tl.where(key < 0, key ^ 0x7FFFFFFF, key), NO_EXPERT)
    slot = tl.arange(0, 16)[None, :]
    chosen = tl.zeros((M, 16), tl.int32)
    for i in tl.static_range(TOP_K):
        best = tl.max(key, axis=1)[:, None]
        first = tl.min(tl.where(key == best, expert, BINS), axis=1)[:, None]
        chosen = tl.where(slot == i, first, chosen)
        key = tl.where(expert == first, NO_EXPERT, key)
    value = tl.where(slot < TOP_K, tl.gather(score, chosen, axis=1), float("-inf"))
    if RULE == "topk_softmax":
        value = tl.exp(value - tl.max(value, axis=1)[:, None])
    value = tl.where(slot < TOP_K, value, 0.0)
    if RENORMALIZE or RULE == "topk_softmax":
        value = value / tl.sum(value, axis=1)[:, None]
    value *= SCALE
    if SHARED:
        gate = tl.full((M,), 1.0, tl.float32)
        if SHARED_GATE:
            gate = 1.0 / (1.0 + tl.exp(-shared_logit))
        chosen = tl.where(slot == TOP_K, EXPERTS, chosen)
        value = tl.where(slot == TOP_K, gate[:, None], value)
    at = token[:, None] * SLOTS + slot
    tl.store(ids + at, chosen, mask=inside[:, None] & (slot < SLOTS))
    tl.store(weights + at, value, mask=inside[:, None] & (slot < SLOTS))


@triton.jit(do_not_specialize=["tokens"])
def route_kernel(
    logits, bias, selection_bias, ids, weights, tokens, M: tl.constexpr, OUTPUTS: tl.constexpr,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, RULE: tl.constexpr,
    RENORMALIZE: tl.constexpr, SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SELECTION: tl.constexpr,
    SHARED: tl.constexpr, SHARED_GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The experts of M tokens from their logits [tokens, OUTPUTS]. SLOTS = TOP_K (+ 1 shared)."""
    token = tl.program_id(0) * M + tl.arange(0, M)
    expert = tl.arange(0, BINS)
    inside = token < tokens
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = logits + token.to(tl.int64) * OUTPUTS
    score = tl.load(row[:, None] + expert[None, :], mask=inside[:, None] & (expert < EXPERTS)[None, :], other=0.0)
    shared = tl.load(row + EXPERTS, mask=inside & SHARED_GATE, other=0.0)
    _choose(
        score, shared, bias, selection_bias, ids, weights, token, inside, M, EXPERTS, BINS, TOP_K, SLOTS, RULE,
        RENORMALIZE, SCALE, HAS_BIAS, HAS_SELECTION, SHARED, SHARED_GATE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def few_route_kernel(
    x, weight, bias, selection_bias, parts, arrived, logits, ids, weights, tokens, K,
    M: tl.constexpr, CHOOSE: tl.constexpr, W: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    OUTPUTS: tl.constexpr, EXPERTS: tl.constexpr, BINS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    RULE: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SELECTION: tl.constexpr, SHARED: tl.constexpr, SHARED_GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Logits and choice of a decode step in one launch; grid (16 outputs, slices of K, blocks of M tokens).

    A program leaves its slice (W warps of BLOCK_K inputs) in parts float32 [SPLITS, tokens, OUTPUTS]; the last of a
    block of tokens to arrive adds them in order, stores the logits and chooses for the first CHOOSE tokens (M, or all
    tokens where they are fewer). arrived int32, one a block: zero before and after. The weight's slice is read before
    the wait. Bytes moved: the weight once a block of tokens, x once for every 16 outputs (from L2), the parts.
    """
    split, first = tl.program_id(1), tl.program_id(2) * M
    output = tl.program_id(0) * 16 + tl.arange(0, 16)
    k = (split * W + tl.arange(0, W))[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    at = output[None, :, None].to(tl.int64) * K + k[:, None, :]
    known = (output < OUTPUTS)[None, :, None] & (k < K)[:, None, :]
    w = tl.load(weight + at, mask=known, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = first + tl.arange(0, M)
    inside = token < tokens
    at = token[None, None, :].to(tl.int64) * K + k[:, :, None]
    rows = tl.load(x + at, mask=inside[None, None, :] & (k < K)[:, :, None], other=0.0)
    part = tl.sum(tl.dot(w.to(rows.dtype), rows, input_precision="ieee"), axis=0)
    at = (split * tokens + token)[None, :] * OUTPUTS + output[:, None]
    tl.store(parts + at, part, mask=inside[None, :] & (output < OUTPUTS)[:, None])
    tl.debug_barrier()
    counter = arrived + tl.program_id(2)
    programs = tl.num_programs(0) * SPLITS
    if tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1:
        tl.debug_barrier()
        tl.atomic_xchg(counter, 0, sem="relaxed")
        own = first + tl.arange(0, CHOOSE)
        live = own < tokens
        expert = tl.arange(0, BINS)[None, :]
        column = live[:, None] & (expert < EXPERTS)
        score = tl.zeros((CHOOSE, BINS), tl.float32)
        shared = tl.zeros((CHOOSE,), tl.float32)
        for s in tl.static_range(SPLITS):
            row = parts + (s * tokens + own) * OUTPUTS
            score += tl.load(row[:, None] + expert, mask=column, other=0.0, cache_modifier=".cg")
            shared += tl.load(row + EXPERTS, mask=live & SHARED_GATE, other=0.0, cache_modifier=".cg")
        row = logits + own * OUTPUTS
        tl.store(row[:, None] + expert, score, mask=column)
        tl.store(row + EXPERTS, shared, mask=live & SHARED_GATE)
        _choose(
            score, shared, bias, selection_bias, ids, weights, own, live, CHOOSE, EXPERTS, BINS, TOP_K, SLOTS, RULE,
            RENORMALIZE, SCALE, HAS_BIAS, HAS_SELECTION, SHARED, SHARED_GATE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["pairs", "blocks"])
def group_few_kernel(
    ids, order, block_expert, pairs, blocks, EXPERTS: tl.constexpr, BINS: tl.constexpr, PAIRS: tl.constexpr,
    M: tl.constexpr, FILL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program e lists the pairs of expert e, in their order, in blocks of M; nothing is exchanged between programs.

    For up to PAIRS pairs: each counts all experts itself to know where its blocks begin (4 bytes a pair, from L2).
    Program 0 also marks the blocks that nobody needs.
    """
    own = tl.program_id(0)
    expert = tl.arange(0, BINS)
    index = tl.arange(0, PAIRS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    visited = tl.load(ids + index, mask=index < pairs, other=EXPERTS)
    counts = tl.histogram(visited, BINS)
    needed = tl.where(expert < EXPERTS, (counts + M - 1) // M, 0)
    first = tl.sum(tl.where(expert < own, needed, 0), axis=0)
    count = tl.sum(tl.where(expert == own, counts, 0), axis=0)
    mine = (count + M - 1) // M
    hit = (visited == own).to(tl.int32)
    tl.store(order + first * M + tl.cumsum(hit, 0) - 1, index, mask=hit != 0)
    empty = count + tl.arange(0, M)
    tl.store(order + first * M + empty, -1, mask=empty < mine * M)
    for start in range(0, mine, FILL):
        block = start + tl.arange(0, FILL)
        tl.store(block_expert + first + block, own, mask=block < mine)
    if own == 0:
        used = tl.sum(needed, axis=0)
        for start in range(used, blocks, FILL):
            block = start + tl.arange(0, FILL)
            tl.store(block_expert + block, -1, mask=block < blocks)


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(ids, counts, pairs, EXPERTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """counts int32 [chunks, BINS]: the visits to each expert among each CHUNK pairs; a program a chunk."""
    index = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    visited = tl.load(ids + index, mask=index < pairs, other=EXPERTS)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), tl.histogram(visited, BINS))


@triton.jit(do_not_specialize=["pairs", "chunks", "blocks"])
def place_kernel(
    ids, counts, order, block_expert, pairs, chunks, blocks, EXPERTS: tl.constexpr, BINS: tl.constexpr,
    CHUNK: tl.constexpr, M: tl.constexpr, FILL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program p puts the pairs of chunk p into their blocks and fills in what blocks p * FILL .. hold beside them.

    From count_kernel's counts every program finds where each expert's blocks begin and what earlier chunks put there;
    the rank within the chunk is by comparison, so the order is that of the pairs. Bytes moved: the counts once a
    program (from L2), ids and order once.
    """
    own = tl.program_id(0)
    expert = tl.arange(0, BINS)
    index = own * CHUNK + tl.arange(0, CHUNK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    visited = tl.load(ids + index, mask=index < pairs, other=EXPERTS)
    total = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)
    for start in range(0, chunks, 8):
        chunk = start + tl.arange(0, 8)[:, None]
        part = tl.load(counts + chunk * BINS + expert[None, :], mask=chunk < chunks, other=0)
        total += tl.sum(part, axis=0)
        before += tl.sum(tl.where(chunk < own, part, 0), axis=0)
    needed = tl.where(expert < EXPERTS, (total + M - 1) // M, 0)
    end = tl.cumsum(needed, 0)
    begin = end - needed
    rank = tl.zeros((CHUNK,), tl.int32)
    for start in range(own * CHUNK, own * CHUNK + CHUNK, 32):
        other = start + tl.arange(0, 32)
        same = tl.load(ids + other, mask=other < pairs, other=-1)[None, :] == visited[:, None]
        rank += tl.sum((same & (other[None, :] < index[:, None])).to(tl.int32), axis=1)
    tl.store(order + tl.gather(begin * M + before, visited, 0) + rank, index, mask=index < pairs)
    block = own * FILL + tl.arange(0, FILL)
    holds = tl.sum((end[None, :] <= block[:, None]).to(tl.int32), axis=1)
    used = holds < EXPERTS
    holds = tl.minimum(holds, BINS - 1)
    pairs_in = tl.gather(total, holds, 0) - (block - tl.gather(begin, holds, 0)) * M
    tl.store(block_expert + block, tl.where(used, holds, -1), mask=block < blocks)
    slot = tl.arange(0, M)[None, :]
    empty = used[:, None] & (slot >= pairs_in[:, None]) & (block < blocks)[:, None]
    tl.store(order + block[:, None] * M + slot, -1, mask=empty)
