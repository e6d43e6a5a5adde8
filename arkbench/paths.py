"""Where the data that ships with the package lies: a checkout's `scenarios/`, or the wheel's copy of it."""

from __future__ import annotations

from pathlib import Path


def scenarios_dir() -> Path:
    """The folder with the scenario files and, in `published/`, the published figures."""
    packaged = Path(__file__).parent / "_scenarios"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "scenarios"


def published_dir() -> Path:
    """The folder with the published tables, the claims and the tests of the claims."""
    return scenarios_dir() / "published"
