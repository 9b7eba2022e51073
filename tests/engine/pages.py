"""The pages of an engine's KV cache, and what always holds for them."""

from collections import Counter

from llama_engine.engine import Engine


def free_pages(engine: Engine) -> list[int]:
    """The pages that hold nothing."""
    return list(engine._manager._free)


def assert_consistent(engine: Engine) -> None:
    """Every page has one state; the page that a sequence writes to is its alone; counts agree with the sequences."""
    manager = engine._manager
    inside = [*engine._batch.sequences, *engine._prefill.sequences]
    holders = Counter(page for sequence in inside for page in sequence.pages)
    cached = list(manager._cached)
    assert dict(holders) == {page: count for page, count in enumerate(manager._holders) if count}
    assert sorted([*holders, *cached, *manager._free]) == list(range(1, manager.pages + 1))
    assert {digest: page for page, digest in manager._digest_of.items()} == manager._page_of
    assert set(cached) <= set(manager._digest_of)
    assert sorted(page for pages in manager._cached_of.values() for page in pages) == sorted(cached)
    assert set(manager._salt_of) == {*holders, *cached}
    assert Counter(manager._salt_of.values()) == manager._num_pages_of
    for sequence in inside:
        written = sequence.pages[sequence.num_cached // manager.page_size :]
        assert all(holders[page] == 1 and page not in manager._digest_of for page in written)
        assert (sequence.kv_slot is None) == (not sequence.pages)
