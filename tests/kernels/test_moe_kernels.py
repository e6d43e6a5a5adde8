"""The expert kernels against their references, in the Triton interpreter."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

from engine.config import MoeFfn
from engine.kernels import moe
from engine.quant import pack_mxfp4, quantize, stack_experts

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs the Triton interpreter")


def make_weight(codes: str, experts: int, n: int, k: int, scale_dtype: torch.dtype = torch.float32):
    if codes == "dense":
        return torch.randn(experts, n, k) * k**-0.5
    if codes == "int4":
        return stack_experts([quantize(torch.randn(n, k) * k**-0.5, scale_dtype=scale_dtype) for _ in range(experts)])
    blocks = torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8)
    scales = torch.randint(120, 125, (experts, n, k // 32), dtype=torch.uint8)
    return stack_experts([pack_mxfp4(b, s) for b, s in zip(blocks, scales, strict=True)], "mxfp4")


@pytest.mark.parametrize("codes", ["int4", "mxfp4", "dense"])
@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(1, 512, 64), (5, 192, 128), (70, 128, 64)])
@pytest.mark.parametrize("clamp", [None, 0.5])
def test_experts_match_reference(codes, tokens, hidden, inner, clamp):
    torch.manual_seed(tokens)
    count = 4
    bias = [torch.randn(count, 2 * inner), torch.randn(count, hidden)] if clamp else [None, None]
    experts = moe.Experts(make_weight(codes, count, 2 * inner, hidden), make_weight(codes, count, hidden, inner), *bias)
    spec = MoeFfn(count, 2, inner, clamp=clamp, alpha=1.702 if clamp else 1.0)
    x = torch.randn(tokens, hidden)
    ids = torch.stack([torch.randperm(count)[:2] for _ in range(tokens)]).to(torch.int32)
    weights = torch.rand(tokens, 2)
    expected = moe.moe_experts_reference(x, ids, weights, experts, spec)
    got = moe.moe_experts_triton(x, ids, weights, experts, spec, asm=False)
    got = got.sum(0) if got.dim() == 3 else got
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
