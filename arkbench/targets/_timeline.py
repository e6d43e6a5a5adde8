"""The file in which the bundled engine notes which stage worked on which piece when."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any


class TimelineFile:
    """Exists only where there are several stages; `path` goes into the engine's configuration."""

    def __init__(self, stages: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="arkbench-") if stages > 1 else None

    @property
    def path(self) -> str | None:
        return None if self._folder is None else str(Path(self._folder.name) / "timeline.jsonl")

    def take(self) -> tuple[dict[str, Any], ...]:
        """The lines since the last call; times are time.monotonic() seconds."""
        if self.path is None or not Path(self.path).exists():
            return ()
        lines = Path(self.path).read_text(encoding="utf-8").splitlines()
        Path(self.path).write_text("")
        return tuple(json.loads(line) for line in lines)
