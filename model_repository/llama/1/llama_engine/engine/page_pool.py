"""The pages of a KV cache by state: free, held by sequences, or idle, which is cached but held by none.

A page is cached if it is full and other sequences can find it by its digest, whether a sequence holds it or not. The
metric `llama_kv_cache_pages` calls held pages used, and idle ones cached.

When no page is free, the least recently used idle page is evicted. A salt that has half of all pages evicts its own
first: a flood of prompts under one salt leaves the other half to others.

Sources: vLLM's KV cache manager, nano-vllm's block manager.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from llama_engine.engine.kv_events import KvEvents

NULL_PAGE = 0
"""The page of positions that have none."""


class PagePool:
    """Counts the holders of pages, and finds cached pages by digest. Not thread-safe, except for `num_available`."""

    def __init__(self, pages: int, kv_events: KvEvents | None) -> None:
        """pages: their number. kv_events: publishes which cached pages are forgotten."""
        self._pages, self._kv_events = pages, kv_events
        # The list is descending, so that pop() returns the lowest at first. Page numbers are 1 to `pages`.
        self._free = list(range(pages, NULL_PAGE, -1))
        self._holders = [0] * (pages + 1)
        # The two maps hold the cached pages.
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        # The salt of each page that isn't free, and the number of these pages by salt.
        self._salt_of: dict[int, str] = {}
        self._num_pages_of = Counter[str]()
        # The idle pages, least recently used first, in all and by salt.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._idle_of: dict[str, OrderedDict[int, None]] = {}
        self._evicted = 0

    @property
    def num_free(self) -> int:
        """Number of pages that are neither held nor cached."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Number of cached pages that no sequence holds."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Number of pages that no sequence holds."""
        return len(self._free) + len(self._idle)

    def take_evictions(self) -> int:
        """Return the number of pages evicted since the last call."""
        evicted, self._evicted = self._evicted, 0
        return evicted

    def num_held(self, pages: Iterable[int]) -> int:
        """Return how many of these pages sequences hold."""
        return sum(self._holders[page] > 0 for page in pages)

    def find(self, digest: bytes) -> int | None:
        """Return the page that is cached under a digest; None if there is none."""
        return self._page_of.get(digest)

    def cache(self, digest: bytes, page: int) -> None:
        """Let `find` return a page."""
        self._page_of[digest], self._digest_of[page] = page, digest

    def forget(self, page: int) -> None:
        """Let `find` not return a page any more; no effect on a page that is not cached."""
        digest = self._digest_of.pop(page, None)
        if digest is None:
            return
        del self._page_of[digest]
        if self._kv_events is not None:
            self._kv_events.removed(digest)

    def hold(self, pages: Iterable[int]) -> None:
        """Add a holder to each of these pages, which are cached or held."""
        for page in pages:
            if not self._holders[page]:
                self._remove_idle(page)
            self._holders[page] += 1

    def take(self, salt: str) -> int:
        """Return a page that no sequence holds, held once, for a sequence of a salt; there must be one."""
        if self._free:
            page = self._free.pop()
        else:
            own = self._idle_of.get(salt) if 2 * self._num_pages_of[salt] >= self._pages else None
            page = next(iter(own or self._idle))
            self._remove_idle(page)
            self._disown(page)
            self.forget(page)
            self._evicted += 1
        self._holders[page] = 1
        self._salt_of[page] = salt
        self._num_pages_of[salt] += 1
        return page

    def drop(self, pages: Iterable[int]) -> None:
        """Remove a holder from each of these pages; those without any become idle if they are cached, else free."""
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._digest_of:
                self._idle[page] = None
                self._idle_of.setdefault(self._salt_of[page], OrderedDict())[page] = None
            else:
                self._disown(page)
                self._free.append(page)

    def _remove_idle(self, page: int) -> None:
        salt = self._salt_of[page]
        del self._idle[page], self._idle_of[salt][page]
        if not self._idle_of[salt]:
            del self._idle_of[salt]

    def _disown(self, page: int) -> None:
        salt = self._salt_of.pop(page)
        self._num_pages_of[salt] -= 1
        if not self._num_pages_of[salt]:
            del self._num_pages_of[salt]
