"""The pages of the KV cache: never lost, never written by two, and found again only under the same tokens and salt."""

import random
from collections.abc import Iterable
from unittest.mock import Mock

import torch
from llama_engine.engine.page_manager import PageManager
from llama_engine.engine.sequence import Sequence
from llama_engine.errors import GenerationError
from llama_engine.kernels.cache_shape import KVCacheShape
from llama_engine.model.model_runner import ModelRunner
from llama_engine.request.parser import GenerationRequest
from llama_engine.text.detokenizer import Detokenizer

PAGE = 4


def _sequence(tokens: tuple[int, ...], salt: str = "") -> Sequence:
    request = GenerationRequest(prompt="", prompt_tokens=tokens, cache_salt=salt)
    detokenizer = Detokenizer(min_tokens=0, max_tokens=100, stop_words=(), end_tokens=())
    return Sequence(request, detokenizer)


def _manager(pages: int) -> PageManager:
    shape = KVCacheShape(
        layers=1, slots=1000, key_value_heads=1, max_model_len=1000, head_dim=1, dtype=torch.float32, page_size=PAGE,
        pages=pages,
    )  # fmt: skip
    return PageManager(shape, Mock(ModelRunner), caching=True)


def _match(manager: PageManager, tokens: Iterable[int], salt: str = "") -> list[int]:
    """Return the cached pages of a prompt."""
    return manager.match_prefix(_sequence(tuple(tokens), salt))


def _computed(manager: PageManager, sequence: Sequence) -> Sequence:
    """A sequence with all of its tokens in cached pages."""
    assert manager.allocate(sequence, 0)
    sequence.num_cached = sequence.num_tokens
    manager.cache_pages(sequence)
    return sequence


def test_a_prefix_is_found_up_to_its_last_full_page_and_never_the_last_token() -> None:
    manager = _manager(10)
    first = _computed(manager, _sequence(tuple(range(10))))
    assert [len(_match(manager, range(length))) for length in (3, 4, 5, 8, 9, 11)] == [0, 0, 1, 1, 2, 2]
    assert _match(manager, (1, *range(1, 10))) == []
    manager.release(first)
    other = _sequence((*range(8), 99))
    assert manager.match_prefix(other) == _match(manager, range(9))
    assert manager.allocate(other, 0)
    assert other.num_cached == 8


def test_a_flood_under_one_salt_evicts_its_own_pages() -> None:
    manager = _manager(20)
    manager.release(_computed(manager, _sequence(tuple(range(17)), "quiet")))
    for flood in range(100):
        manager.release(_computed(manager, _sequence(tuple(range(100 * flood, 100 * flood + 33)), "flood")))
    assert len(_match(manager, range(17), "quiet")) == 4


def test_prefixes_of_salts_that_are_gone_are_evicted_before_recent_ones() -> None:
    manager = _manager(40)
    for user in range(100):
        manager.release(_computed(manager, _sequence(tuple(range(user, user + 13)), f"user {user}")))
    found = [len(_match(manager, range(user, user + 13), f"user {user}")) for user in range(100)]
    # Of three full pages each; the last ones have as many as there are pages.
    assert found[:86] == [0] * 86
    assert found[88:] == [3] * 12


def test_the_least_recently_used_prefix_is_evicted_from_its_end() -> None:
    manager = _manager(6)
    old, new = tuple(range(12)), tuple(range(100, 112))
    manager.release(_computed(manager, _sequence(old)))
    manager.release(_computed(manager, _sequence(new)))
    assert manager.allocate(_sequence((7, 7, 7)), 0)
    found = [len(_match(manager, (*tokens, 0))) for tokens in (old, new)]
    assert found == [2, 3]


def test_counts_add_up_and_are_taken_once() -> None:
    manager = _manager(6)
    manager.release(_computed(manager, _sequence(tuple(range(12)))))
    assert manager.allocate(_sequence(tuple(range(14))), 0)
    preempted = _sequence((9,))
    preempted.output_tokens, preempted.first_token_at = [8], 1.0
    assert manager.allocate(preempted, 0)
    manager.release(preempted)
    counts = manager.take_counts()
    assert (counts.used_pages, counts.cached_pages, counts.free_pages) == (4, 0, 2)
    assert (counts.queried_tokens, counts.hit_tokens, counts.evicted_pages) == (12 + 14, 12, 0)
    assert manager.take_counts().hit_tokens == 0


class _Simulation:
    """Random sequences that begin, grow, fork, fail and end. content: what each page holds, kept beside it."""

    def __init__(self) -> None:
        self.randomness = random.Random(3)
        self.manager = _manager(24)
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.inside: list[Sequence] = []
        self.found = self.refused = 0

    def begin(self) -> None:
        tokens = tuple(self.randomness.choices((1, 2), k=self.randomness.randint(1, 20)))
        sequence = _sequence(tokens, self.randomness.choice(("", "a", "b")))
        for index, page in enumerate(self.manager.match_prefix(sequence)):
            self.found += 1
            assert self.content[page] == (sequence.request.cache_salt, tokens[: (index + 1) * PAGE])
        if self.manager.allocate(sequence, len(self.inside)):
            self._compute(sequence)
            self.inside.append(sequence)
        else:
            self.refused += 1

    def grow(self) -> None:
        sequence = self.randomness.choice(self.inside)
        if self.manager.extend(sequence):
            sequence.output_tokens.append(self.randomness.choice((1, 2)))
            self._compute(sequence)
        else:
            self.end(sequence)

    def fork(self) -> None:
        source = self.randomness.choice(self.inside)
        sequence = _sequence(source.request.prompt_tokens, source.request.cache_salt)
        if self.manager.fork(source, sequence, 0):
            self._compute(sequence)
            self.inside.append(sequence)

    def end(self, sequence: Sequence) -> None:
        self.manager.release(sequence)
        self.inside.remove(sequence)

    def fail(self) -> None:
        sequence = self.randomness.choice(self.inside)
        sequence.finish(GenerationError(""))
        self.end(sequence)

    def _compute(self, sequence: Sequence) -> None:
        sequence.num_cached = sequence.num_tokens
        for index in range(sequence.num_cached_pages, sequence.num_cached // PAGE):
            self.content[sequence.pages[index]] = sequence.request.cache_salt, sequence.tokens(0, (index + 1) * PAGE)
        self.manager.cache_pages(sequence)


def test_what_is_found_has_the_tokens_it_is_found_for() -> None:
    simulation = _Simulation()
    actions = (simulation.grow, simulation.fork, simulation.fail)
    for _ in range(20_000):
        action = simulation.randomness.random()
        if action < 0.4 or not simulation.inside:
            simulation.begin()
        elif action < 0.55:
            simulation.end(simulation.randomness.choice(simulation.inside))
        else:
            simulation.randomness.choices(actions, (8, 1, 1))[0]()
    assert simulation.found > 500
    assert simulation.refused > 100
    for sequence in list(simulation.inside):
        simulation.end(sequence)
    assert simulation.manager.num_available == 24
