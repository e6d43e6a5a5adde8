"""An existing benchmark client, unmodified, against the server: AIPerf, where it is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

AIPERF = os.environ.get("ARKBENCH_AIPERF") or shutil.which("aiperf")


def byte_tokenizer(folder: Path) -> None:
    """A tokenizer of one token a byte, so that AIPerf needs none from the network."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=alphabet[0]).save_pretrained(folder)


@pytest.mark.skipif(AIPERF is None, reason="AIPerf is not here: pip install aiperf, or name it in ARKBENCH_AIPERF")
def test_aiperf_measures_the_server(words: Any, tmp_path: Path) -> None:
    byte_tokenizer(tmp_path / "tokenizer")
    before = words.metric("arkbench_output_tokens_total")
    command = [
        str(AIPERF), "profile", "-m", "words", "--url", words.url.removesuffix("/v1"), "--endpoint-type", "chat",
        "--streaming", "--tokenizer", str(tmp_path / "tokenizer"), "--concurrency", "2", "--request-count", "6",
        "--synthetic-input-tokens-mean", "20", "--output-tokens-mean", "8", "--use-server-token-count",
        "--extra-inputs", "ignore_eos:true", "--ui", "none", "--artifact-dir", str(tmp_path / "out"),
    ]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    (exported,) = (tmp_path / "out").rglob("profile_export_aiperf.json")
    figures = json.loads(exported.read_text())
    assert figures["request_count"]["avg"] == 6
    assert figures["output_sequence_length"]["avg"] == 8
    assert words.metric("arkbench_output_tokens_total") - before == 48
