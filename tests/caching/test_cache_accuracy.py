"""What an 8-bit cache costs on a real model: SmolLM2-135M-Instruct, float32 activations, 512 tokens of English."""

import csv

import pytest

from tests.engine.test_smollm2 import gguf  # noqa: F401
from tools import cache_accuracy


@pytest.fixture(scope="module")
def rows(gguf):  # noqa: F811
    measured = cache_accuracy.measure(gguf, "cpu", ("bf16", "int8", "fp8"), answer_tokens=0)
    return {row.cache_dtype: row for row in measured}


def test_the_reference_differs_from_itself_in_nothing(rows):
    reference = rows["bf16"]
    assert (reference.logit_error, reference.kl, reference.agreement, reference.perplexity_change) == (0, 0, 1, 0)
    assert 2 < reference.perplexity < 40


@pytest.mark.parametrize(("cache_dtype", "logit_error", "agreement"), [("int8", 0.1, 0.97), ("fp8", 0.2, 0.92)])
def test_eight_bits_keep_perplexity_within_1_percent(rows, cache_dtype, logit_error, agreement):
    row = rows[cache_dtype]
    assert abs(row.perplexity_change) < 0.01
    assert 0 < row.logit_error < logit_error
    assert row.agreement >= agreement
    # 3 heads of 64 values, keys and values, 30 layers: one byte a value and a scale of 4 a head.
    assert row.bytes_per_token == 2 * 3 * (64 + 4) * 30


def test_the_table_is_written_with_one_row_a_dtype(rows, tmp_path):
    cache_accuracy.write(list(rows.values()), tmp_path / "new" / "a.csv")
    with (tmp_path / "new" / "a.csv").open() as file:
        assert [row["cache_dtype"] for row in csv.DictReader(file)] == ["bf16", "int8", "fp8"]
