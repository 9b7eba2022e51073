"""The pages of the KV cache: which are free, which sequences hold them, which prefix they have.

A page is free, held by sequences, or cached: no sequence holds it, but a sequence that begins with the same tokens
finds it. Only full pages are found, by a digest of the cache salt and all tokens up to the page's end. Sequences share
such a page and never write to it. When no page is free, the least recently used cached page is evicted. A salt that has
half of all pages evicts its own first: a flood of prompts under one salt leaves the other half to others.

Sources: vLLM's KV cache manager, nano-vllm's block manager.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

from llama_engine.sequence import Sequence

NULL_PAGE = 0
"""The page of positions that have none."""


@dataclass(frozen=True)
class CacheCounts:
    """Pages by state, and events since the counts were last taken.

    used_pages: held by sequences. cached_pages: held by none, but with a prefix. queried_tokens: tokens of admitted
    sequences that were looked up; hit_tokens: those found. evicted_pages: cached pages taken for other tokens.
    """

    used_pages: int
    cached_pages: int
    free_pages: int
    queried_tokens: int
    hit_tokens: int
    evicted_pages: int


class BlockManager:
    """Assigns the pages of a KV cache to sequences. Not thread-safe, except for `num_available`."""

    def __init__(self, pages: int, page_size: int, caching: bool) -> None:
        """Page numbers are 1 to `pages`. page_size: positions per page. caching: whether prefixes are found again."""
        self.pages, self.page_size = pages, page_size
        self._caching = caching
        # Descending: pop() returns the lowest at first.
        self._free = list(range(pages, NULL_PAGE, -1))
        self._holders = [0] * (pages + 1)
        self._page_of: dict[bytes, int] = {}
        # Of pages that can be found.
        self._digest_of: dict[int, bytes] = {}
        # Of pages that aren't free, and the number of these pages by salt.
        self._salt_of: dict[int, str] = {}
        self._num_pages_of = Counter[str]()
        # The cached pages, least recently used first; and those of each salt.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._cached_of: dict[str, OrderedDict[int, None]] = {}
        self._queried = self._hits = self._evicted = 0

    @property
    def num_available(self) -> int:
        """Number of pages that no sequence holds."""
        return len(self._free) + len(self._cached)

    def take_counts(self) -> CacheCounts:
        """Return the numbers of pages, and of events since the last call."""
        used = self.pages - self.num_available
        counts = CacheCounts(used, len(self._cached), len(self._free), self._queried, self._hits, self._evicted)
        self._queried = self._hits = self._evicted = 0
        return counts

    def num_pages(self, tokens: int) -> int:
        """Return the number of pages that hold `tokens` positions."""
        return -(-tokens // self.page_size)

    def may_grow(self, sequence: Sequence) -> bool:
        """Return whether a sequence with pages may need more of them for its output."""
        # The last token is never written.
        last = sequence.num_prompt_tokens + sequence.request.max_tokens - 1
        return last > len(sequence.pages) * self.page_size

    def num_new_pages(self, sequence: Sequence) -> int:
        """Return how many available pages a sequence without pages takes."""
        if sequence.prompt_source() is not None:
            # It takes over the prompt, and gets a page for its rest.
            return 1
        shared = sum(self._holders[page] > 0 for page in self.find(sequence))
        return self.num_pages(sequence.num_tokens) - shared

    def find(self, sequence: Sequence) -> list[int]:
        """Return the pages that have a sequence's longest cached prefix. Its last token always remains to be computed.

        A prompt whose log probabilities are requested is computed as a whole.
        """
        cached: list[int] = []
        for index in range(self._num_shareable_pages(sequence)):
            page = self._page_of.get(self._digest(sequence, index))
            if page is None:
                break
            cached.append(page)
        return cached

    def missing(self, sequence: Sequence, cached: int) -> set[bytes]:
        """Return the digests of the pages that a sequence computes for others, if `cached` of its pages are cached."""
        return {self._digest(sequence, index) for index in range(cached, self._num_shareable_pages(sequence))}

    def next_missing(self, sequence: Sequence, cached: int) -> bytes | None:
        """Return the digest of the first page that `missing` has; None if it has none."""
        return self._digest(sequence, cached) if cached < self._num_shareable_pages(sequence) else None

    def allocate(self, sequence: Sequence, headroom: int) -> bool:
        """Give a sequence that has no pages those for all of its tokens, the cached ones among them.

        Return False, changing nothing, if fewer than `headroom` pages would remain.
        """
        cached = self.find(sequence)
        count = self.num_pages(sequence.num_tokens) - len(cached)
        idle = sum(not self._holders[page] for page in cached)
        if self.num_available - idle - count < headroom:
            return False
        for page in cached:
            self._hold(page)
        sequence.pages = cached + [self._take(sequence.request.cache_salt) for _ in range(count)]
        sequence.num_cached = len(cached) * self.page_size
        sequence.num_findable_pages = len(cached)
        if self._caching and not sequence.has_sampled and sequence.scored_from is None:
            self._queried += sequence.num_tokens
            self._hits += sequence.num_cached
        return True

    def extend(self, sequence: Sequence) -> bool:
        """Give a sequence a page for its next position if it needs one; return False if none is available."""
        if sequence.num_cached < len(sequence.pages) * self.page_size:
            return True
        if not self.num_available:
            return False
        sequence.pages.append(self._take(sequence.request.cache_salt))
        return True

    def fork(self, source: Sequence, target: Sequence, headroom: int) -> bool:
        """Give `target` the prompt's full pages of `source`, which has the same prompt, and a new page for the rest.

        The caller copies the last page. Return False, changing nothing, if fewer than `headroom` pages would remain.
        """
        full, rest = divmod(source.num_prompt_tokens, self.page_size)
        if self.num_available - bool(rest) < headroom:
            return False
        for page in source.pages[:full]:
            self._hold(page)
        target.pages = source.pages[:full] + ([self._take(target.request.cache_salt)] if rest else [])
        target.num_findable_pages = min(source.num_findable_pages, full)
        return True

    def publish(self, sequence: Sequence) -> None:
        """Let other sequences find the full pages of a sequence. Call it when its next token proves them finite."""
        full = sequence.num_cached // self.page_size
        if not self._caching or sequence.num_findable_pages == full:
            return
        for index in range(sequence.num_findable_pages, full):
            digest, page = self._digest(sequence, index), sequence.pages[index]
            # Two sequences may have computed the same page; the second one's is not found.
            if digest not in self._page_of:
                self._page_of[digest], self._digest_of[page] = page, digest
        sequence.num_findable_pages = full

    def release(self, sequence: Sequence) -> None:
        """Take all pages from a sequence; those that can be found are cached, others are free."""
        # The last page first, so that a prefix is evicted from its end.
        for page in reversed(sequence.pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            salt = self._salt_of[page]
            if page in self._digest_of:
                self._cached[page] = None
                self._cached_of.setdefault(salt, OrderedDict())[page] = None
            else:
                self._disown(page)
                self._free.append(page)
        sequence.pages = []
        sequence.num_cached = sequence.num_findable_pages = 0

    def forget(self, sequence: Sequence) -> None:
        """Let no sequence find the pages of a sequence any more: after a failure their content is unknown."""
        for page in sequence.pages:
            if page in self._digest_of:
                del self._page_of[self._digest_of.pop(page)]

    def _num_shareable_pages(self, sequence: Sequence) -> int:
        """Return how many full pages a sequence without pages could take over, or compute for others."""
        if not self._caching:
            return 0
        # Of what is cached, no hidden states are left: those before the first scored token are computed.
        return ((sequence.scored_from or sequence.num_tokens) - 1) // self.page_size

    def _hold(self, page: int) -> None:
        if not self._holders[page]:
            self._uncache(page)
        self._holders[page] += 1

    def _uncache(self, page: int) -> None:
        salt = self._salt_of[page]
        del self._cached[page], self._cached_of[salt][page]
        if not self._cached_of[salt]:
            del self._cached_of[salt]

    def _disown(self, page: int) -> None:
        salt = self._salt_of.pop(page)
        self._num_pages_of[salt] -= 1
        if not self._num_pages_of[salt]:
            del self._num_pages_of[salt]

    def _take(self, salt: str) -> int:
        """Return a page that no sequence holds, held once, for a sequence of a salt; there must be one."""
        if self._free:
            page = self._free.pop()
        else:
            own = self._cached_of.get(salt) if 2 * self._num_pages_of[salt] >= self.pages else None
            page = next(iter(own or self._cached))
            self._uncache(page)
            self._disown(page)
            del self._page_of[self._digest_of.pop(page)]
            self._evicted += 1
        self._holders[page] = 1
        self._salt_of[page] = salt
        self._num_pages_of[salt] += 1
        return page

    def _digest(self, sequence: Sequence, index: int) -> bytes:
        """Return the digest of a sequence's tokens up to the end of its page `index`, and of its salt."""
        digests = sequence.page_digests
        while len(digests) <= index:
            first = len(digests) * self.page_size
            parent = digests[-1] if digests else blake2b(sequence.request.cache_salt.encode()).digest()
            tokens = array("i", sequence.tokens(first, first + self.page_size)).tobytes()
            digests.append(blake2b(parent + tokens, digest_size=32).digest())
        return digests[index]
