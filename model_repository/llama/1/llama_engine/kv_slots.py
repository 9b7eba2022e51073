"""Gives sequences their place in the KV cache: a slot, which is a row of the page table, and pages."""

from __future__ import annotations

from llama_engine.block_manager import NULL_PAGE, BlockManager
from llama_engine.errors import GenerationError
from llama_engine.model.kv_cache import KVCacheShape
from llama_engine.model.model_runner import ModelRunner
from llama_engine.sequence import Sequence


class KVSlots:
    """The slots of a KV cache, and the page table in the model runner. Not thread-safe."""

    def __init__(self, shape: KVCacheShape, manager: BlockManager, model: ModelRunner) -> None:
        self._columns, self._manager, self._model = shape.columns, manager, model
        # Descending: pop() returns the lowest.
        self._free = list(reversed(range(shape.slots)))

    def reserve(self, sequence: Sequence, headroom: int) -> bool:
        """Give a sequence a slot and pages for all of its tokens; their cached prefix needs no computation.

        Return False, changing nothing, if fewer than `headroom` pages would remain.
        """
        if not self._manager.allocate(sequence, headroom):
            return False
        if not sequence.has_sampled:
            sequence.num_cached_prompt_tokens = min(sequence.num_cached, sequence.num_prompt_tokens)
        self._add(sequence)
        return True

    def fork(self, source: Sequence, target: Sequence, headroom: int) -> bool:
        """Give `target` a slot, the full pages of the prompt that it has in common with `source`, and a page to write.

        `copy_rest` completes the prompt. Return False, changing nothing, if fewer than `headroom` pages would remain.
        """
        if not self._manager.fork(source, target, headroom):
            return False
        self._add(target)
        return True

    def copy_rest(self, source: Sequence, target: Sequence) -> None:
        """Copy the prompt's last page, unless it is full, from `source` to `target` after `fork`."""
        last = len(target.pages) - 1
        if target.pages[last] != source.pages[last]:
            self._model.copy(source.pages[last], target.pages[last])
        target.num_cached = target.num_cached_prompt_tokens = target.num_prompt_tokens

    def extend(self, sequence: Sequence) -> bool:
        """Give a sequence a page for its next position if it needs one; return False if none is available."""
        count = len(sequence.pages)
        if not self._manager.extend(sequence):
            return False
        if len(sequence.pages) > count:
            assert sequence.kv_slot is not None
            self._model.set_pages(sequence.kv_slot, count, sequence.pages[count:])
        return True

    def release(self, sequence: Sequence) -> None:
        """Free a sequence's slot and pages, if it has them. After a GenerationError its prefixes are not found."""
        if isinstance(sequence.result, GenerationError):
            self._manager.forget(sequence)
        self._manager.release(sequence)
        if sequence.kv_slot is not None:
            self._free.append(sequence.kv_slot)
            sequence.kv_slot = None

    def _add(self, sequence: Sequence) -> None:
        """Write a sequence's pages into a free row of the page table."""
        sequence.kv_slot = self._free.pop()
        unused = self._columns - len(sequence.pages)
        self._model.set_pages(sequence.kv_slot, 0, sequence.pages + [NULL_PAGE] * unused)
