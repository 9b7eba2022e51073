"""A server under attacks with good requests in between, and what it must come through: alive, idle, flat, equal."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice

import grpc
from server.clients import WIRES, Inputs, ask
from server.fuzzing.attacks import GONE, HUNG, Attack
from server.fuzzing.drawing import Batch, shrunk
from server.fuzzing.verdict import fault
from server.metrics import Metrics
from server.servers import HTTP, is_decoupled
from server.streams import STREAM_WIRES, whole
from triton_local.server import LocalTriton
from triton_supervisor.process_table import model_processes

from perf.overhead.processes import ServerProcesses
from perf.soak import resources

WORKERS = 8
"""Connections at a time."""

GOOD_EVERY = 20
"""One request in 20 is a good one."""

MOST_HUNG = 3
"""Attacks that hang before the rest is left out: each takes a minute, and a few show the cause."""

REMEMBERED = 3 * WORKERS
"""Attacks that are shown when the server has gone: one may have broken what the next one met."""

WARM_UP = 0.2
"""Share of the attacks before the first reading that counts: one-time allocations have happened by then."""

MORE = {"rss_mib": 48.0, "descriptors": 4.0, "threads": 8.0}
"""Growth allowed for each process."""

MORE_SHARED_MIB = 48.0

COMPUTED = 1 / 40
"""Share of the attacks that must be computed, and that the model must refuse: Triton refuses most itself."""

MANY = 1_000
"""Attacks from which on the share is judged; of fewer, one must be computed and one refused."""

MOST_SHOWN = 3
"""Different faults of a batch that are shrunk, which takes up to some minutes each, and wrong good answers."""


def unary_of(server: LocalTriton) -> str:
    """Return the model that answers /infer and ModelInfer."""
    return "llama_unary" if is_decoupled(server) else "llama"


class Siege:
    """An idle server, then batches of attacks on it.

    sent: attacks. computed, refused: of them, by the model. asked: good requests in between. outcomes: attacks by route
    and status. figures: the server's resources after each batch, by attacks sent. failures: what it did not come
    through, in words, with the attacks shrunk.
    """

    def __init__(self, server: LocalTriton) -> None:
        self.server = server
        self.sent = self.asked = 0
        self.computed = self.refused = self._errors = 0.0
        self.outcomes = Counter[tuple[str, str]]()
        self.figures: dict[int, dict[str, float]] = {}
        self.failures: list[str] = []
        self._last: list[Attack] = []
        self._faults: dict[str, list[Attack]] = {}
        self._spoiled: list[str] = []
        self._refuses = False
        self._lock = threading.Lock()
        self._pid = server.pid
        self._models = model_processes(self._pid)
        self._metrics = Metrics(server)
        # Each with the answer it gets alone.
        self._good = [(asking, asking()) for asking in _good(server)]

    def run(self, batch: Batch) -> None:
        """Attack, wait until the server is idle, and read its resources; shrink what has found something."""
        self._faults = {}
        with grpc.insecure_channel(self.server.grpc_url) as channel, ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(lambda attack: self._send(attack, channel), batch.attacks))
        again = f"seed {batch.seed}, {len(batch.attacks)} attacks"
        if self.gone:
            self.failures.append(f"{again}: a process is gone; sent last: {self._last}")
            return
        for wrong, attacks in islice(self._faults.items(), MOST_SHOWN):
            # A neighbour in a batch may have the fault of another attack: shrunk is one that has it alone.
            alone = (attack for attack in attacks if wrong != HUNG and self._has(wrong, attack))
            attack = next(alone, attacks[0])
            smallest = repr(attack) if wrong == HUNG else shrunk(batch, attack, partial(self._has, wrong))
            self.failures.append(f"{again}: {wrong}: {smallest}")
        self.failures += self._spoiled[:MOST_SHOWN]
        self._spoiled.clear()
        self.figures[self.sent] = self._idle()
        ended = self._metrics.reasons()
        # Good requests are computed, too: once for their answers alone, then in between.
        self.computed = ended.get("length", 0) - len(self._good) - self.asked
        self.refused, self._errors = ended.get("invalid", 0), ended.get("error", 0)

    @property
    def gone(self) -> bool:
        """Whether the server, or a process of its models, has ended or is another one."""
        ended = self._refuses or self.server.exit_code is not None
        return ended or (self.server.pid, model_processes(self._pid)) != (self._pid, self._models)

    @property
    def ended(self) -> bool:
        """Whether the server refuses connections or hangs repeatedly, and the rest of a batch is left out."""
        return self._refuses or len(self._faults.get(HUNG, ())) >= MOST_HUNG

    def finish(self) -> None:
        """Add to `failures` what does not hold at the end."""
        if not self.failures:
            self.failures += self._wrong()

    def by_route(self) -> dict[str, dict[str, int]]:
        """Return the number of attacks by route and status."""
        found: dict[str, dict[str, int]] = {}
        for (route, status), count in sorted(self.outcomes.items()):
            found.setdefault(route, {})[status] = count
        return found

    def _send(self, attack: Attack, channel: grpc.Channel) -> None:
        if self.ended:
            return
        with self._lock:
            self.sent += 1
            number = self.sent
            if not self._refuses:
                self._last = [*self._last[1 - REMEMBERED :], attack]
        outcome = attack.send(self.server, channel)
        wrong = fault(attack, outcome)
        with self._lock:
            self.outcomes[attack.route, outcome.status] += 1
            if wrong == GONE or self.server.exit_code is not None:
                self._refuses = True
            elif wrong is not None:
                self._faults.setdefault(wrong, []).append(attack)
        if number % GOOD_EVERY == 0 and not self._refuses:
            self._ask(number // GOOD_EVERY)

    def _ask(self, number: int) -> None:
        asking, expected = self._good[number % len(self._good)]
        try:
            answer = asking()
        except Exception as error:  # noqa: BLE001 - any error spoils this request only
            answer = error
        with self._lock:
            self.asked += 1
            self._spoiled += [] if answer == expected else [f"good request: {answer!r} instead of {expected}"]

    def _wrong(self) -> Iterator[str]:
        """Yield each condition that does not hold."""
        for number, (asking, answer) in enumerate(self._good):
            if (now := asking()) != answer:
                yield f"good request {number} at the end: {now!r} instead of {answer!r}"
        before = self.figures[next(sent for sent in self.figures if sent >= WARM_UP * self.sent)]
        for name, value in self.figures[self.sent].items():
            most = MORE_SHARED_MIB if name == "shared_memory_mib" else MORE.get(name.partition("_")[2])
            if most is not None and value - before[name] > most:
                yield f"{name} has grown by {value - before[name]:.1f}, {most:g} allowed: {self.figures}"
        least = COMPUTED * self.sent if self.sent >= MANY else 0
        for name, count in (("computed", self.computed), ("refused by the model", self.refused)):
            if count <= least:
                yield f"of {self.sent} attacks only {count:g} were {name}"
        if self._errors:
            yield f"{self._errors:g} requests ended with a server error"

    def _idle(self) -> dict[str, float]:
        """Wait until the server has no request, nothing is left of earlier ones, and connections are closed."""
        self._metrics.wait_for_slots(0)
        if self.figures:
            most = next(iter(self.figures.values()))["triton_descriptors"] + MORE["descriptors"]
            self._metrics.wait(
                lambda _: self._resources()["triton_descriptors"] <= most, f"at most {most} descriptors are open"
            )
        return self._resources()

    def _resources(self) -> dict[str, float]:
        return resources.of(ServerProcesses.of(self._pid))

    def _has(self, wrong: str, attack: Attack) -> bool:
        """Whether an attack alone has this fault."""
        with grpc.insecure_channel(self.server.grpc_url) as channel:
            return fault(attack, attack.send(self.server, channel)) == wrong


def _good(server: LocalTriton) -> Iterator[Callable[[], object]]:
    """Yield good requests over every endpoint; of each answer one has every bit of its probabilities."""
    for number in range(8):
        request = {"text_input": f"Good {number}", "max_tokens": 8, "min_tokens": 8, "temperature": 1.0, "seed": number}
        if is_decoupled(server):
            yield partial(whole, server, STREAM_WIRES[number % len(STREAM_WIRES)], request)
        else:
            yield partial(ask, server, WIRES[number % len(WIRES)], **request)
        yield partial(_body, server, {**request, "num_logprobs": 3})


def _body(server: LocalTriton, inputs: Inputs) -> object:
    url = f"http://{server.http_url}/v2/models/{unary_of(server)}/generate"
    return HTTP.post(url, json=dict(inputs)).raise_for_status().json()
