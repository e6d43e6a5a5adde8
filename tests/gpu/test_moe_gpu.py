"""The expert layer at true sizes: choice and grouping exactly, products near float32, 50 replays bit for bit."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from tools.gpu_moe import MODELS, check_layer, layer_of

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=MODELS)
def layer(request):
    return layer_of(request.param)


@pytest.mark.parametrize("tokens", [1, 5, 64, 300, 2048])
def test_experts_agree_with_the_reference_and_repeat(layer, tokens):
    torch.manual_seed(tokens)
    check_layer(layer, torch.randn(tokens, layer.hidden, device="cuda").bfloat16())
