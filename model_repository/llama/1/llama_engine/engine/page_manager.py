"""Assigns slots and pages of the KV cache to sequences, and finds the pages that have their prefixes.

A sequence whose prefill has begun has a slot in the model runner's page table, and pages of the `PagePool`. A full page
can be cached: other sequences then match it, by a digest of the cache salt, the adapter and all tokens up to the page's
end, share it, and never write to it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import blake2b

from llama_engine.engine.kv_events import KvEvents
from llama_engine.engine.page_pool import NULL_PAGE, PagePool
from llama_engine.engine.sequence import Sequence
from llama_engine.errors import GenerationError
from llama_engine.kernels.cache_shape import KVCacheShape
from llama_engine.model.model_runner import ModelRunner


@dataclass(frozen=True)
class CacheCounts:
    """Pages by state; evictions, and tokens looked up and found, since the counts were last taken.

    used_pages: held by sequences. idle_pages: held by none, but with a prefix. queried_tokens: tokens of admitted
    sequences that were looked up; hit_tokens: those found. evicted_pages: cached pages taken for other tokens.
    """

    used_pages: int
    idle_pages: int
    free_pages: int
    queried_tokens: int
    hit_tokens: int
    evicted_pages: int


class PageManager:
    """Assigns the slots and pages of a KV cache to sequences. Not thread-safe, except for `num_available`."""

    def __init__(self, shape: KVCacheShape, model: ModelRunner, caching: bool, kv_events: KvEvents | None) -> None:
        """caching: whether pages with a prefix are kept for later sequences. kv_events: publishes which these are."""
        self.page_size = shape.page_size
        self._shape, self._model = shape, model
        self._caching, self._kv_events = caching, kv_events
        # Descending, so that pop() returns the lowest at first.
        self._free_slots = list(reversed(range(shape.slots)))
        self._pool = PagePool(shape.pages, kv_events)
        self._queried = self._hits = 0

    @property
    def num_available(self) -> int:
        """Number of pages that no sequence holds."""
        return self._pool.num_available

    def take_counts(self) -> CacheCounts:
        """Return the pages by state, and what was evicted, looked up and found since the last call."""
        pool = self._pool
        used = self._shape.pages - pool.num_available
        counts = CacheCounts(used, pool.num_idle, pool.num_free, self._queried, self._hits, pool.take_evictions())
        self._queried = self._hits = 0
        return counts

    def may_grow(self, sequence: Sequence) -> bool:
        """Return whether a sequence with pages may need more of them for its output."""
        # The last token is never written.
        last = sequence.num_prompt_tokens + sequence.request.max_tokens - 1
        return last > len(sequence.pages) * self.page_size

    def num_new_pages(self, sequence: Sequence) -> int:
        """Return how many available pages a sequence without pages takes."""
        if sequence.prompt_source() is not None:
            # The choice takes over the prompt's pages, and gets one for the partly filled page.
            return 1
        return self._shape.pages_of(sequence.num_tokens) - self._pool.num_held(self.match_prefix(sequence))

    def match_prefix(self, sequence: Sequence) -> list[int]:
        """Return the pages that have a sequence's longest cached prefix. The last token always remains to be computed.

        Holds none of them: `allocate` does. A prompt whose log probabilities or embedding are requested is computed as
        a whole.
        """
        matching: list[int] = []
        for digest in self._digests(sequence, self._num_shareable_pages(sequence)):
            page = self._pool.find(digest)
            if page is None:
                break
            matching.append(page)
        return matching

    def uncomputed_pages(self, sequence: Sequence, matching: int) -> list[bytes]:
        """Return the digests of the pages that a sequence computes for others, after `matching` cached ones."""
        return self._digests(sequence, self._num_shareable_pages(sequence))[matching:]

    def allocate(self, sequence: Sequence, headroom: int) -> bool:
        """Give a sequence a slot and pages for all of its tokens; their cached prefix needs no computation.

        Return False, changing nothing, if fewer than `headroom` pages would remain.
        """
        matching = self.match_prefix(sequence)
        count = self._shape.pages_of(sequence.num_tokens) - len(matching)
        idle = len(matching) - self._pool.num_held(matching)
        if self.num_available - idle - count < headroom:
            return False
        self._pool.hold(matching)
        sequence.pages = matching + [self._pool.take(sequence.request.cache_salt) for _ in range(count)]
        sequence.num_computed = len(matching) * self.page_size
        sequence.num_matchable_pages = len(matching)
        if not sequence.has_sampled:
            sequence.num_cached_prompt_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
            if self._caches(sequence) and sequence.scored_from is None:
                self._queried += sequence.num_tokens
                self._hits += sequence.num_computed
        self._assign_slot(sequence)
        return True

    def extend(self, sequence: Sequence) -> bool:
        """Give a sequence a page for its next position if it needs one; return False if none is available."""
        if self._room(sequence):
            return True
        if not self.num_available:
            return False
        self._append_page(sequence)
        return True

    def extend_for_draft(self, sequence: Sequence, count: int) -> int:
        """Give a sequence pages for positions after its next one; return how many it has, at most `count`."""
        while self._room(sequence) < count + 1 and self.num_available:
            self._append_page(sequence)
        return min(self._room(sequence) - 1, count)

    def trim(self, sequence: Sequence) -> None:
        """Take back the pages behind the computed positions, which a draft got."""
        kept = self._shape.pages_of(sequence.num_computed)
        unused = sequence.pages[kept:]
        if not unused:
            return
        assert sequence.kv_slot is not None
        self._model.cache.set_pages(sequence.kv_slot, kept, [NULL_PAGE] * len(unused))
        del sequence.pages[kept:]
        self._pool.drop(unused)

    def fork(self, source: Sequence, target: Sequence, headroom: int) -> bool:
        """Give `target` a slot, the full pages of the prompt that it has in common with `source`, and a page to write.

        `copy_rest` completes the prompt. Return False, changing nothing, if fewer than `headroom` pages would remain.
        """
        full, rest = divmod(source.num_prompt_tokens, self.page_size)
        if self.num_available - bool(rest) < headroom:
            return False
        self._pool.hold(source.pages[:full])
        target.pages = source.pages[:full] + ([self._pool.take(target.request.cache_salt)] if rest else [])
        target.num_matchable_pages = min(source.num_matchable_pages, full)
        self._assign_slot(target)
        return True

    def copy_rest(self, source: Sequence, target: Sequence) -> None:
        """Copy the prompt's last page, unless it is full, from `source` to `target` after `fork`."""
        last = len(target.pages) - 1
        if target.pages[last] != source.pages[last]:
            self._model.cache.copy(source.pages[last], target.pages[last])
        target.num_computed = target.num_cached_prompt_tokens = target.num_prompt_tokens

    def cache_pages(self, sequence: Sequence) -> None:
        """Let other sequences match the full pages of a sequence. Call it when its next token proves them finite."""
        full = sequence.num_computed // self.page_size
        if not self._caches(sequence) or sequence.num_matchable_pages == full:
            return
        digests = self._digests(sequence, full)
        # Two sequences may have computed the same page; the second one's is not cached.
        new = [index for index in range(sequence.num_matchable_pages, full) if self._pool.find(digests[index]) is None]
        for index in new:
            self._pool.cache(digests[index], sequence.pages[index])
        if self._kv_events is not None:
            self._kv_events.stored(sequence, new)
        sequence.num_matchable_pages = full

    def release(self, sequence: Sequence) -> None:
        """Take the slot and all pages from a sequence, if it has them; cached pages become idle, others free.

        After a GenerationError the pages' content is unknown, and none of them stays cached.
        """
        if isinstance(sequence.result, GenerationError):
            for page in sequence.pages:
                self._pool.forget(page)
        # Drop the last page first, so that a prefix is evicted from its end.
        self._pool.drop(reversed(sequence.pages))
        sequence.pages = []
        sequence.num_computed = sequence.num_matchable_pages = 0
        if sequence.kv_slot is not None:
            if sequence.request.adapter is not None:
                # An adapter may be unloaded when no slot has it.
                self._model.loras.set(sequence.kv_slot, 0)
            self._free_slots.append(sequence.kv_slot)
            sequence.kv_slot = None

    def _caches(self, sequence: Sequence) -> bool:
        """Return whether a sequence takes over cached pages and leaves its own; one for an embedding does neither."""
        return self._caching and not sequence.request.return_embedding

    def _room(self, sequence: Sequence) -> int:
        """Return how many positions a sequence's pages have besides the computed ones."""
        return len(sequence.pages) * self.page_size - sequence.num_computed

    def _append_page(self, sequence: Sequence) -> None:
        assert sequence.kv_slot is not None
        sequence.pages.append(self._pool.take(sequence.request.cache_salt))
        self._model.cache.set_pages(sequence.kv_slot, len(sequence.pages) - 1, sequence.pages[-1:])

    def _assign_slot(self, sequence: Sequence) -> None:
        """Give a sequence a free slot, and write its pages to the page table there."""
        sequence.kv_slot = self._free_slots.pop()
        unused = self._shape.columns - len(sequence.pages)
        self._model.cache.set_pages(sequence.kv_slot, 0, sequence.pages + [NULL_PAGE] * unused)
        adapter = sequence.request.adapter
        self._model.loras.set(sequence.kv_slot, adapter.index if adapter else 0)

    def _num_shareable_pages(self, sequence: Sequence) -> int:
        """Return how many full pages a sequence without pages could take over, or compute for others."""
        if not self._caches(sequence):
            return 0
        # Cached pages have no hidden states, so that a prefix whose tokens get scores is computed again.
        return ((sequence.scored_from or sequence.num_tokens) - 1) // self.page_size

    def _digests(self, sequence: Sequence, count: int) -> list[bytes]:
        """Return the digests of a sequence's first `count` pages, of its root and all tokens up to each page's end."""
        digests = sequence.page_digests
        while len(digests) < count:
            first = len(digests) * self.page_size
            parent = digests[-1] if digests else sequence.request.prefix_root
            tokens = array("i", sequence.tokens(first, first + self.page_size)).tobytes()
            digests.append(blake2b(parent + tokens, digest_size=32).digest())
        return digests[:count]
