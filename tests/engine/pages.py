"""The pages of an engine's KV cache, and what always holds for them."""

from collections import Counter

from llama_engine.engine.engine import Engine


def free_pages(engine: Engine) -> list[int]:
    """The pages that hold nothing."""
    return list(engine._pages._free)


def assert_consistent(engine: Engine) -> None:
    """Every page has one state; the page that a sequence writes to is its alone; counts agree with the sequences."""
    manager, shape = engine._pages, engine.plan.shape
    inside = [*engine._batch.sequences, *engine._prefill.sequences]
    holders = Counter(page for sequence in inside for page in sequence.pages)
    idle = list(manager._idle)
    assert dict(holders) == {page: count for page, count in enumerate(manager._holders) if count}
    assert sorted([*holders, *idle, *manager._free]) == list(range(1, shape.pages + 1))
    assert {digest: page for page, digest in manager._digest_of.items()} == manager._page_of
    assert set(idle) <= set(manager._digest_of)
    assert sorted(page for pages in manager._idle_of.values() for page in pages) == sorted(idle)
    assert set(manager._salt_of) == {*holders, *idle}
    assert Counter(manager._salt_of.values()) == manager._num_pages_of
    for sequence in inside:
        written = sequence.pages[sequence.num_cached // shape.page_size :]
        assert all(holders[page] == 1 and page not in manager._digest_of for page in written)
        assert (sequence.kv_slot is None) == (not sequence.pages)
