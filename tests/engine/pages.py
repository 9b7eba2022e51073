"""The pages of an engine's KV cache, and what always holds for them."""

from collections import Counter

from llama_engine.engine.engine import Engine


def free_pages(engine: Engine) -> list[int]:
    """The pages that hold nothing."""
    return list(engine._pages._pool._free)


def assert_consistent(engine: Engine) -> None:
    """Pages that no sequence holds are available; the page that a sequence writes to is its alone."""
    sequences, shape = [*engine._batch.sequences, *engine._prefill.sequences], engine.plan.shape
    holders = Counter(page for sequence in sequences for page in sequence.pages)
    assert len(holders) + engine._pages.num_available == shape.pages
    for sequence in sequences:
        written = sequence.pages[sequence.num_computed // shape.page_size :]
        assert all(holders[page] == 1 for page in written)
        assert (sequence.kv_slot is None) == (not sequence.pages)
