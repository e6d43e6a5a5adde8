"""Device function of fetch.py; for compute capability 9.0 and later."""

import triton
import triton.language as tl

CHUNK = tl.constexpr(2048)

PREFETCH = tl.constexpr(
    """{
    .reg .pred some;
    setp.ne.u32 some, $2, 0;
    @some cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.u32 $0, 0;
    }"""
)


@triton.jit
def fetch_chunks(
    first_ptr, second_ptr, first, second, whole, kv_len_ptr, requests, most_tokens, program, programs,
    REQUESTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Asks for `first` chunks of one weight and for `second` of the `whole` chunks of another, evenly spread.

    Every thread of `programs` programs of LANES threads asks for one chunk at a time. Nothing is asked for where the
    requests of the step have more than most_tokens tokens in the cache.
    """
    request = tl.arange(0, REQUESTS)
    tokens = tl.sum(tl.load(kv_len_ptr + request, mask=request < requests, other=0), axis=0)
    if tokens <= most_tokens:
        for start in range(program * LANES, first + second, programs * LANES):
            chunk = start + tl.arange(0, LANES)
            spread = (chunk - first).to(tl.int64) * whole // tl.maximum(second, 1)
            at_first = first_ptr.to(tl.int64, bitcast=True) + chunk.to(tl.int64) * CHUNK
            at_second = second_ptr.to(tl.int64, bitcast=True) + spread * CHUNK
            size = tl.where(chunk < first + second, CHUNK, 0)
            tl.inline_asm_elementwise(
                PREFETCH, "=r,l,r", [tl.where(chunk < first, at_first, at_second), size], dtype=tl.int32,
                is_pure=False, pack=1,
            )  # fmt: skip
