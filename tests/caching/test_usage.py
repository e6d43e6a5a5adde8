"""Cached tokens over HTTP: the server's usage against what the engine must have found."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.engine.helpers import prompt_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def url(folders):
    engine = {
        "model": "", "weights": folders["qwen3"], "max_model_len": 256, "page_size": 16, "max_streams": 2,
        "switches": {"prompt_cache": "on", "weights_dtype": "fp32"},
    }  # fmt: skip
    command = [sys.executable, "-m", "engine.server", json.dumps({"port": 0, "engine": engine})]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        line = process.stdout.readline()
        assert line.startswith("ready: "), line
        yield line.split(" at ")[1].split()[0]
    finally:
        process.terminate()
        assert process.wait(30) == 0


def usage(url, prompt, **more):
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **more}
    answer = httpx.post(f"{url}/completions", json=body, timeout=20, trust_env=False)
    if not more:
        return answer.json()["usage"]
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return next(chunk["usage"] for chunk in chunks if chunk.get("usage"))


def test_usage_counts_the_prompt_tokens_that_were_not_computed_again(url):
    prompt = prompt_of(50, 1)
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    counts = [
        usage(url, prompt),
        usage(url, prompt),
        usage(url, prompt[:48], **streamed),
        usage(url, prompt[:20] + prompt_of(20, 2), **streamed),
    ]
    cached = [count["prompt_tokens_details"]["cached_tokens"] for count in counts]
    assert cached == [0, 48, 32, 16]
    assert [count["prompt_tokens"] for count in counts] == [50, 50, 48, 40]
