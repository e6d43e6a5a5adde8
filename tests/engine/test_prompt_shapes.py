"""Which prompt steps are captured as graphs."""

import pytest

from engine.graphs import GraphShapes, longest_prompt
from engine.inputs import StepShape
from engine.models import model_config


@pytest.mark.parametrize(
    ("model", "kernels", "longest"),
    [
        ("Llama-3.2-1B", "fused", 2048),
        ("Qwen3-8B", "fused", 1024),
        ("Qwen3-14B", "fused", 512),
        ("Llama-3.2-1B", "standard", 0),
        ("Qwen3.6-35B-A3B", "fused", 0),
        ("GLM-4.7-Flash", "fused", 0),
    ],
)
def test_longer_prompts_are_captured_where_launches_are_the_limit(model, kernels, longest):
    assert longest_prompt(model_config(model), kernels) == longest


def test_shapes_end_at_the_longest_prompt_and_at_the_longest_request():
    assert [s.rows for s in GraphShapes.of(4, 9000, 1024).prompt] == [64, 128, 256, 512, 768, 1024]
    assert [s.rows for s in GraphShapes.of(4, 800, 1024).prompt] == [64, 128, 256, 512, 768]
    assert [s.rows for s in GraphShapes.of(4, 9000, 512).prompt] == [64, 128, 256, 512]
    assert GraphShapes.of(4, 9000, 0).prompt == ()
    assert GraphShapes.of(4, 9000, 64).prompt == (StepShape(64, 4, 4),)
    assert GraphShapes.of(99, 9000, 64).prompt == (StepShape(64, 8, 8),)
