"""Device functions that several kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_sum(pointers, mask, split_stride, SPLITS: tl.constexpr):
    """The sum of SPLITS partial sums, split_stride elements apart, in order; float32, 0 where masked."""
    total = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(pointers + split * split_stride, mask=mask, other=0.0).to(tl.float32)
    return total
