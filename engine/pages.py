"""Who owns which page of the cache. Pure Python: the scheduler uses it, and the device never sees it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol


class Keeper(Protocol):
    """Knows which pages are worth keeping when nobody owns them any more."""

    def holds(self, page: int) -> bool: ...

    def drop(self, page: int) -> list[int]:
        """Forgets a page; returns it and the pages that cannot be found without it."""
        ...


class PagePool:
    """Pages 1 to pages - 1 with reference counts; page 0 is the null page and belongs to nobody.

    Steps run behind the host, so a released page may still be written by a step in flight: `release` takes the last
    such step and the page is free again only when `completed` says that it is over. A page that `keeper` holds is kept
    then, and given away when nothing else is left, the one released longest ago first. `on_free` is called with the
    pages that became free (tests poison them).
    """

    def __init__(
        self, pages: int, on_free: Callable[[list[int]], None] | None = None, keeper: Keeper | None = None
    ) -> None:
        self.capacity = pages - 1
        self._free = OrderedDict.fromkeys(range(1, pages))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._fenced: OrderedDict[int, int] = OrderedDict()
        self._references = [0] * pages
        self.on_free = on_free
        self.keeper = keeper

    @property
    def free(self) -> int:
        """Pages that can be taken now, the kept ones included."""
        return len(self._free) + len(self._kept)

    @property
    def fenced(self) -> int:
        """Pages that will be free when the steps in flight are over."""
        return len(self._fenced)

    @property
    def kept(self) -> int:
        """Pages that nobody owns and whose content can still be found."""
        return len(self._kept)

    def unowned(self, pages: Iterable[int]) -> int:
        """How many of these pages count as free: sharing them takes them."""
        return sum(page in self._kept for page in pages)

    def take(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None if there are not that many."""
        if count > self.free:
            return None
        while len(self._free) < count:
            self._evict()
        return self._own([self._free.popitem(last=False)[0] for _ in range(count)])

    def take_these(self, pages: Sequence[int]) -> list[int]:
        """These pages, all of them free, with one reference each."""
        for page in pages:
            del self._free[page]
        return self._own(list(pages))

    def _own(self, pages: list[int]) -> list[int]:
        for page in pages:
            self._references[page] = 1
        return pages

    def _evict(self) -> None:
        assert self.keeper is not None
        gone = [page for page in self.keeper.drop(next(iter(self._kept))) if page in self._kept]
        for page in gone:
            del self._kept[page]
        self._make_free(gone)

    def share(self, pages: Iterable[int]) -> None:
        """Adds a reference to pages that somebody owns or that are kept."""
        for page in pages:
            if self._references[page] == 0:
                held = self._kept if page in self._kept else self._fenced
                assert page in held, f"page {page} is nobody's"
                del held[page]
            self._references[page] += 1

    def release(self, pages: Iterable[int], after: int) -> None:
        """Gives up one reference to each; pages with none left are free once step `after` is over."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is nobody's"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._fenced[page] = after

    def completed(self, step: int) -> None:
        """Step `step`, and all before it, are over."""
        over = []
        while self._fenced and next(iter(self._fenced.values())) <= step:
            over.append(self._fenced.popitem(last=False)[0])
        kept = [page for page in over if self.keeper is not None and self.keeper.holds(page)]
        self._kept.update(dict.fromkeys(kept))
        self._make_free([page for page in over if page not in self._kept])

    def _make_free(self, pages: list[int]) -> None:
        self._free.update(dict.fromkeys(pages))
        if pages and self.on_free is not None:
            self.on_free(pages)
