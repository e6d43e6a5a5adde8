from __future__ import annotations

from pathlib import Path

import pytest

from arkbench.report import render
from tests.report import factory


@pytest.fixture(scope="session")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of the three runs that most tests look at: folder by name."""
    base = tmp_path_factory.mktemp("runs")
    folders = {
        "fused": factory.fused_kernels(base / "fused"),
        "gaps": factory.with_gaps(base / "gaps"),
        "pipelined": factory.pipelined_prefill(base / "pipelined"),
    }
    for folder in folders.values():
        render([folder], folder)
    return folders
