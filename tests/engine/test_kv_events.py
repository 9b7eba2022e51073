"""KV cache events: a subscriber that knows vLLM's format has the cached pages, live and replayed, and none too many."""

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import zmq
from adjacent_ports import adjacent_ports
from engine.engines import engine_of, run
from engine.prompts import random_request
from engine.scheduling import running
from llama_engine.engine import kv_events
from llama_engine.engine.engine import Engine
from llama_engine.engine.kv_events import KvEvents
from llama_engine.engine.sequence import Sequence
from llama_engine.errors import InvalidSettings
from llama_engine.model.loader import LoadedModel
from llama_engine.request.adapter_choice import Adapter
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.text.output_text import OutputText

SECONDS = 20
PAGE = 4


# The format: the fields of vLLM's structs.
class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


# The time, the events, the data-parallel rank.
EventBatch = tuple[float, list[BlockStored | BlockRemoved | AllBlocksCleared], int]


class Subscriber:
    """Mirrors the cached blocks: a salt, and the tokens up to the page's end.

    numbers: of the messages that came. runs: numbers of blocks in the events that stored some.
    """

    def __init__(self, port: int, topic: bytes = b"") -> None:
        self._topic = topic
        self.blocks: dict[bytes | int, tuple[str, tuple[int, ...]]] = {}
        self.numbers: list[int] = []
        self.runs: list[int] = []
        self.cleared = False
        # Those that are gone, too: a page can be cached when its parent no longer is.
        self._known = self.blocks.copy()
        self._context = zmq.Context()
        self._live, self._replay = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._live.subscribe(topic)
        self._live.connect(f"tcp://127.0.0.1:{port}")
        self._replay.connect(f"tcp://127.0.0.1:{port + 1}")

    def close(self) -> None:
        self._context.destroy(linger=0)

    def follow(self, until: Callable[[], bool]) -> None:
        """Take live messages, and a replay of those that are missing, until the condition holds."""
        end = time.monotonic() + SECONDS
        while not until():
            assert time.monotonic() < end, "the events don't come"
            if self._live.poll(50):
                frames, expected = self._live.recv_multipart(), self.numbers[-1] + 1 if self.numbers else 0
                if int.from_bytes(frames[1], "big") == expected:
                    self._take(*frames)
                elif int.from_bytes(frames[1], "big") > expected:
                    self.replay(expected)

    def replay(self, first: int) -> None:
        """Take all messages from a sequence number on."""
        self._replay.send_multipart([b"", first.to_bytes(8, "big")])
        while self._replay.poll(SECONDS * 1000):
            _, *frames = self._replay.recv_multipart()
            if frames == [b"", b"\xff" * 8, b""]:
                return
            self._take(*frames)
        raise AssertionError("the replay has no end")

    def _take(self, topic: bytes, number: bytes, message: bytes) -> None:
        assert topic == self._topic
        self.numbers.append(int.from_bytes(number, "big"))
        _, events, _ = msgspec.msgpack.decode(message, type=EventBatch)
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved(block_hashes=[block]):
                    self.blocks.pop(block, None)
                case AllBlocksCleared():
                    self.cleared = True
                    self.blocks.clear()

    def _store(self, event: BlockStored) -> None:
        size, extra, parent = event.block_size, (event.extra_keys or [None])[0], event.parent_block_hash
        assert (event.medium, len(event.block_hashes) * size) == ("GPU", len(event.token_ids))
        self.runs.append(len(event.block_hashes))
        salt, before = (extra[0] if extra else "", ()) if parent is None else self._known[parent]
        for index, block in enumerate(event.block_hashes, 1):
            assert block not in self.blocks
            self.blocks[block] = self._known[block] = salt, (*before, *event.token_ids[: index * size])


@pytest.fixture
def port() -> int:
    """A free port whose next one is free, too."""
    return adjacent_ports(2)


@contextmanager
def _published(port: int) -> Iterator[tuple[KvEvents, Subscriber]]:
    """Events of no engine, and a subscriber that has the first ones: it isn't connected at once."""
    with closing(KvEvents(f"tcp://127.0.0.1:{port}", PAGE)) as events, closing(Subscriber(port)) as subscriber:
        while not subscriber._live.poll(20):
            events.removed(b"nothing")
        yield events, subscriber


def _sequence(tokens: tuple[int, ...]) -> Sequence:
    output = OutputText(min_tokens=0, max_tokens=1, stop_words=(), end_tokens=())
    digests = [bytes([page, *tokens[:7]]) for page in range(len(tokens) // PAGE)]
    return Sequence(GenerationRequest(prompt="", prompt_tokens=tokens), output, page_digests=digests)


def _cached(engine: Engine, sequences: list[Sequence]) -> set[tuple[str, tuple[int, ...]]]:
    """The salts and tokens of the sequences' pages that are in the KV cache."""
    size, digests = engine.plan.shape.page_size, engine._pages._pool._page_of
    return {
        (sequence.request.cache_salt, sequence.tokens(0, (index + 1) * size))
        for sequence in sequences
        for index, digest in enumerate(sequence.page_digests)
        if digest in digests
    }


def test_a_subscriber_has_the_cached_pages(int8: LoadedModel, port: int) -> None:
    randomness = random.Random(4)
    short = replace(int8, max_model_len=128)
    engine = engine_of(short, 8, kv_cache_tokens="512", kv_events=f"tcp://127.0.0.1:{port}/kv@pod@llama")
    assert engine.kv_events is not None
    with closing(engine.kv_events), closing(Subscriber(port, b"kv@pod@llama")) as live:
        requests = [random_request(short, randomness) for _ in range(60)]
        sequences = [
            engine.builder.build(replace(request, cache_salt=salt))
            for salt in ("", "a", "b", "")
            for request in randomness.sample(requests, 30)
        ]
        randomness.shuffle(sequences)
        evicted = sum(step.cache.evicted_pages for step in run(engine, sequences).steps if step.cache is not None)
        expected = _cached(engine, sequences)
        live.follow(lambda: set(live.blocks.values()) == expected)
        assert len(expected) == len(live.blocks) == len(engine._pages._pool._page_of) > 20
        assert evicted > 50
        assert max(live.runs) > 1
        assert {salt for salt, _ in expected} == {"", "a", "b"}


@pytest.mark.parametrize(("number", "lora_id"), [(7, 7), (0, None)])
def test_pages_of_an_adapter_name_it_as_vllm_does(port: int, number: int, lora_id: int | None) -> None:
    sequence = _sequence(tuple(range(12)))
    sequence.request = replace(sequence.request, cache_salt="s", adapter=Adapter("sql", number, "d", 16, 3))
    with closing(KvEvents(f"tcp://127.0.0.1:{port}", PAGE)) as events:
        stored = events._stored(sequence, [0, 1])
    assert (stored["lora_name"], stored["lora_id"]) == ("sql", lora_id)
    assert stored["extra_keys"] == [["sql", "s"], ["sql"]]


def test_a_replay_begins_at_a_sequence_number(port: int) -> None:
    with _published(port) as (events, subscriber), closing(Subscriber(port)) as late:
        for number in range(5):
            events.stored(_sequence((number,) * PAGE), [0])
            subscriber.follow(lambda: len(subscriber.blocks) > number)  # noqa: B023 - called in this iteration
        first = subscriber.numbers[-3]
        late.replay(first)
        assert late.numbers == [first, first + 1, first + 2]
        assert len(late.blocks) == 3
        late.replay(first + 100)
        assert len(late.numbers) == 3


def test_after_an_overflow_a_subscriber_knows_nothing_that_is_wrong(
    int8: LoadedModel, port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MAX_PENDING", 8)
    engine = engine_of(int8)
    with _published(port) as (events, subscriber):
        # The thread sends nothing meanwhile: a call that has begun has ended once there is another.
        with patch.object(events, "_send_pending") as held:
            while not held.called:
                time.sleep(0.001)
            for number in range(100):
                sequence = _sequence((number,) * PAGE)
                events.stored(sequence, [0])
                if number % 2:
                    events.removed(sequence.page_digests[0])
            events.stored(_sequence((100,) * PAGE), [0])
        subscriber.follow(lambda: subscriber.cleared)
        known = {tokens[0] for _, tokens in subscriber.blocks.values()}
        assert {100} <= known < {*range(0, 101, 2)}
        engine.kv_events = events
        assert engine.step().dropped_kv_events > 50
    assert [record.message for record in caplog.records] == ["KV cache events were dropped; subscribers start anew"]


def test_they_end_with_the_scheduler(int8: LoadedModel, port: int) -> None:
    with running(int8, 1, kv_events=f"tcp://127.0.0.1:{port}"):
        assert "kv-events" in [thread.name for thread in threading.enumerate()]
    assert "kv-events" not in [thread.name for thread in threading.enumerate()]


def test_an_address_in_use_is_refused(port: int) -> None:
    with _published(port), pytest.raises(InvalidSettings, match=r"^kv_events is 'tcp://127.*Address already in use"):
        KvEvents(f"tcp://127.0.0.1:{port + 1}", PAGE)


def test_an_address_that_others_reach_is_warned_of(port: int, caplog: pytest.LogCaptureFixture) -> None:
    with _published(port):
        assert not caplog.records
        # In use, so that no test reaches the network.
        with pytest.raises(InvalidSettings):
            KvEvents(f"tcp://*:{port}", PAGE)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_without_its_packages_the_message_says_what_to_install(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(InvalidSettings, match="kv_events needs pyzmq and msgspec: pip install"):
        KvEvents(f"tcp://127.0.0.1:{port}", PAGE)
