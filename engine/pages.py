"""Who owns which page of the cache. Pure Python: the scheduler uses it, and the device never sees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable


class PagePool:
    """Pages 1 to pages - 1 with reference counts; page 0 is the null page and belongs to nobody.

    Steps run behind the host, so a released page may still be written by a step in flight: `release` takes the last
    such step and the page is free again only when `completed` says that it is over. `on_free` is called with the
    pages that became free (tests poison them).
    """

    def __init__(self, pages: int, on_free: Callable[[list[int]], None] | None = None) -> None:
        self.capacity = pages - 1
        self._free = deque(range(1, pages))
        self._references = [0] * pages
        self._fenced: deque[tuple[int, int]] = deque()
        self.on_free = on_free

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def fenced(self) -> int:
        """Pages that will be free when the steps in flight are over."""
        return len(self._fenced)

    def take(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None if there are not that many."""
        if count > len(self._free):
            return None
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds a reference to pages that somebody owns."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is nobody's"
            self._references[page] += 1

    def release(self, pages: Iterable[int], after: int) -> None:
        """Gives up one reference to each; pages with none left are free once step `after` is over."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is nobody's"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._fenced.append((after, page))

    def completed(self, step: int) -> None:
        """Step `step`, and all before it, are over."""
        freed = []
        while self._fenced and self._fenced[0][0] <= step:
            freed.append(self._fenced.popleft()[1])
        self._free.extend(freed)
        if freed and self.on_free is not None:
            self.on_free(freed)
