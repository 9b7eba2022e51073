"""The pages of the KV cache: which are evicted first. `test_exact_bits` has their contents."""

from collections.abc import Iterable
from unittest.mock import Mock

import torch
from llama_engine.engine.page_manager import PageManager
from llama_engine.engine.sequence import Sequence
from llama_engine.kernels.cache_shape import KVCacheShape
from llama_engine.model.model_runner import ModelRunner
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.text.output_text import OutputText

PAGE = 4


def _sequence(tokens: tuple[int, ...], salt: str = "") -> Sequence:
    request = GenerationRequest(prompt="", prompt_tokens=tokens, cache_salt=salt)
    output = OutputText(min_tokens=0, max_tokens=100, stop_words=(), end_tokens=())
    return Sequence(request, output)


def _manager(pages: int) -> PageManager:
    shape = KVCacheShape(
        layers=1, slots=1000, key_value_heads=1, max_model_len=1000, head_dim=1, dtype=torch.float32, page_size=PAGE,
        pages=pages,
    )  # fmt: skip
    return PageManager(shape, Mock(ModelRunner), caching=True, kv_events=None)


def _match(manager: PageManager, tokens: Iterable[int], salt: str = "") -> list[int]:
    """Return the cached pages of a prompt."""
    return manager.match_prefix(_sequence(tuple(tokens), salt))


def _cache(manager: PageManager, tokens: Iterable[int], salt: str = "") -> None:
    """Leave the cached pages of a sequence that has ended."""
    sequence = _sequence(tuple(tokens), salt)
    assert manager.allocate(sequence, 0)
    sequence.num_computed = sequence.num_tokens
    manager.cache_pages(sequence)
    manager.release(sequence)


def test_a_flood_under_one_salt_evicts_its_own_pages() -> None:
    manager = _manager(20)
    _cache(manager, range(17), "quiet")
    for flood in range(100):
        _cache(manager, range(100 * flood, 100 * flood + 33), "flood")
    assert len(_match(manager, range(17), "quiet")) == 4


def test_prefixes_of_salts_that_are_gone_are_evicted_before_recent_ones() -> None:
    manager = _manager(40)
    for user in range(100):
        _cache(manager, range(user, user + 13), f"user {user}")
    found = [len(_match(manager, range(user, user + 13), f"user {user}")) for user in range(100)]
    # Of three full pages each; the last ones have as many as there are pages.
    assert found[:86] == [0] * 86
    assert found[88:] == [3] * 12


def test_the_least_recently_used_prefix_is_evicted_from_its_end() -> None:
    manager = _manager(6)
    old, new = tuple(range(12)), tuple(range(100, 112))
    _cache(manager, old)
    _cache(manager, new)
    assert manager.allocate(_sequence((7, 7, 7)), 0)
    found = [len(_match(manager, (*tokens, 0))) for tokens in (old, new)]
    assert found == [2, 3]
