"""The scenarios of the caching techniques on the CPU, in small, from the file to the report."""

import json
import re

import pytest
from typer.testing import CliRunner

from arkbench.cli import app
from arkbench.report import data
from arkbench.report.technique_section import TECHNIQUES, technique_blocks
from arkbench.scenario import scenario_files
from engine.cache import Cache
from tests.report import factory

SMALL = """
name = "{name}"
title = "{name}"
models = ["SmolLM2-135M"]
repetitions = 1
[matrix]
preset = "best"
switches = {switches}
"""

MIXED = (
    SMALL.format(name="paged-attention", switches='{ cache = ["contiguous", "paged"] }')
    + """
[[workloads]]
type = "burst"
prompt_mix = [{ tokens = 16, share = 5 }, { tokens = 60, share = 3 }, { tokens = 240, share = 2 }]
at_once = 12
output_tokens = 16
cache_tokens = 1280
"""
)

SHARED = (
    SMALL.format(name="prompt-caching", switches='{ prompt_cache = ["off", "on"] }')
    + """
[[workloads]]
type = "conversation"
users = 4
turns = 2
streams = 2
shared_tokens = 200
turn_tokens = 20
output_tokens = 6
[[workloads]]
type = "burst"
prompt_tokens = 100
at_once = 2
output_tokens = 2
"""
)


TURNS = (
    SMALL.format(name="prompt-caching", switches='{ prompt_cache = ["off", "on"] }')
    + """
[[workloads]]
type = "conversation"
users = 4
turns = 4
streams = 2
shared_tokens = 200
turn_tokens = 20
output_tokens = 8
"""
)


def run(folder, text, layers=1):
    (folder / "scenario.toml").write_text(text)
    options = ["--device", "cpu", "--model", f"SmolLM2-135M@layers={layers}", "--output", str(folder / "run")]
    result = CliRunner().invoke(app, ["run", str(folder / "scenario.toml"), *options])
    assert result.exit_code == 0, result.output
    (loaded,) = data.load([folder / "run"])
    return loaded


def rows_of(loaded, scenario):
    return [row for block in technique_blocks(scenario, [loaded]) if hasattr(block, "rows") for row in block.rows]


def test_paging_holds_more_requests_of_mixed_length_in_the_same_cache(tmp_path):
    """20 pages of 64 tokens: five runs of 256, or the pages that 12 requests take, of which 2 are long."""
    loaded = run(tmp_path, MIXED)
    assert list(loaded.summary["valid"]) == ["true", "true"]
    (row,) = rows_of(loaded, "paged-attention")
    assert row[1:3] == ["burst-n12-mix", "requests that the full cache holds"]
    assert 4.5 <= row[3].value <= 5
    assert 8 <= row[5].value < 12
    assert row[6] == pytest.approx(row[5].value / row[3].value)
    hashes = dict(zip(loaded.cells["variant"], loaded.cells["output_hash"], strict=True))
    assert hashes["contiguous"] == hashes["paged"] != ""
    text = (tmp_path / "run" / "report.md").read_text()
    said = re.search(r"paged against contiguous: requests that the full cache holds ([\d.]+)", text)
    assert float(said[1]) == pytest.approx(row[5].value / row[3].value, rel=0.01)


def test_cached_tokens_of_every_request_are_exact(tmp_path):
    loaded = run(tmp_path, SHARED)
    assert set(loaded.summary["valid"]) == {"true"}
    lines = [json.loads(line) for line in (tmp_path / "run" / "requests.jsonl").read_text().splitlines()]
    cached = {}
    for line in lines:
        cached.setdefault((line["variant"], line["cell"].split("-")[0]), {})[line["request"]] = line["cached_tokens"]
    assert set(cached["off", "conversation"].values()) == {0}
    # The first of 4 users computes the 200 common tokens, the others find 3 pages of 64. A first turn leaves
    # 220 + 6 tokens, the last of them never an input: 225 computed, 3 full pages.
    assert cached["on", "conversation"] == {0: 0, 1: 192, 2: 192, 3: 192, 4: 192, 5: 192, 6: 192, 7: 192}
    assert cached["on", "burst"] == {0: 0, 1: 0}
    hashes = loaded.cells.groupby("cell")["output_hash"].nunique()
    assert set(hashes) == {1}


def test_near_ties_that_rounding_decides_are_not_called_wrong(tmp_path):
    """Products in bfloat16 of four layers: some of the 128 tokens are nearly tied with another."""
    answers = run(tmp_path, TURNS, layers=4).meta["answers"]
    assert answers["compared"] == 1
    assert not any(d["fault"] for d in answers["different"])
    assert all(d["near_tie"] and d["gap"] <= 1 / 64 for d in answers["different"])


def test_an_emptied_page_is_called_wrong(tmp_path, monkeypatch):
    """A page is emptied as it is put into a page table: what writes its own pages loses nothing by it."""

    def update_and_empty(cache, fresh, entries):
        update(cache, fresh, entries)
        for _, index, page in entries:
            for layer in cache.layers if index == 0 else ():
                layer.k[page] = layer.v[page] = 0

    update = Cache.update_table
    monkeypatch.setattr(Cache, "update_table", update_and_empty)
    (difference,) = run(tmp_path, TURNS, layers=4).meta["answers"]["different"]
    assert difference["fault"] and difference["gap"] > 1 / 64
    text = (tmp_path / "run" / "report.md").read_text()
    assert "off and on gave different tokens (switches: prompt\\_cache; a fault: these switches must not change" in text


def test_every_technique_has_its_scenario_and_names_its_variants():
    from arkbench import scenario

    for name, technique in TECHNIQUES.items():
        assert name in scenario_files()
        assert {technique.base, *technique.new} == set(scenario.load(name).scenario.all_variants())


def test_what_a_technique_brings_is_said_in_words(tmp_path):
    cells = [
        factory.cell("prompt-caching", variant, "conversation", "Qwen3-8B", "c", ttft_p50_s=ttft, cached_tokens=cached)
        for variant, ttft, cached in (("off", 0.4, 0.0), ("on", 0.05, 4000.0))
    ]
    cells += [
        factory.cell("prompt-caching", v, "burst", "Qwen3-8B", "b", prompt_tokens=4000, at_once=1, prefill_tok_s=rate)
        for v, rate in (("off", 1000.0), ("on", 995.0))
    ]
    (loaded,) = data.load([factory.write_run(tmp_path / "run", cells)])
    sentences, table = technique_blocks("prompt-caching", [loaded])
    assert sentences.items == [
        "on against off: median TTFT 8.00× better.",
        "on against off: combined prefill rate 0.5 % worse.",
    ]
    assert [[row[1], row[3].value, row[5].value] for row in table.rows] == [
        ["c", 0.4, 0.05],
        ["c", 0.0, 4000.0],
        ["burst of 1 × 4,000", 1000.0, 995.0],
    ]
    assert technique_blocks("quick", [loaded]) == []
