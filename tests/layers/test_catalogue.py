"""The table of published models: figures against those computed independently from the checkpoints' shapes."""

from __future__ import annotations

import pytest

from engine.models import catalogue, catalogue_entries


@pytest.fixture(scope="module")
def rows():
    return {row.name: row for row in catalogue()}


def test_every_published_model_has_a_row(rows):
    assert list(rows) == list(catalogue_entries())


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen3-32B", "Qwen3.6-27B", "Qwen3-Coder-30B", "Qwen3.6-35B-A3B"])
def test_bytes_read_for_a_token(rows, name):
    """All in 4 bits: within 2.5% of the published shapes' sum (routers are kept in 16 bits here)."""
    assert rows[name].token_bytes == pytest.approx(catalogue_entries()[name]["decode_bytes_4bit"], rel=0.025)


def test_published_precision_of_gpt_oss(rows):
    """MXFP4 experts and 16 bits elsewhere: 3.71 GB a token, 13.8 GB in all (the published files are 13.8 GB)."""
    assert rows["gpt-oss-20b"].token_bytes == pytest.approx(3.71e9, rel=0.005)
    assert rows["gpt-oss-20b"].weight_bytes == pytest.approx(13.76e9, rel=0.005)


@pytest.mark.parametrize(
    ("name", "of_16bit", "of_8bit"),
    [("Llama-3.1-8B", 131072, 67584), ("GLM-4.7-Flash", 54144, 27448), ("Qwen3.6-27B", 65536, 33280)],
)
def test_cache_bytes(rows, name, of_16bit, of_8bit):
    """The 8-bit forms hold one float32 scale a head (or a latent) for each of k and v besides."""
    assert (rows[name].cache_bytes_16bit, rows[name].cache_bytes_8bit) == (of_16bit, of_8bit)
