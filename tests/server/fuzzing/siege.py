"""A server under batches of attacks, and what it must have come through: alive, idle, flat, and answering as before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import grpc
from server.clients import WIRES, Inputs, ask, generate
from server.fuzzing.attack import HUNG
from server.fuzzing.campaign import Campaign, Good, by_fault
from server.fuzzing.drawing import Batch, shrunk
from server.fuzzing.sending import Attack, send
from server.fuzzing.verdict import fault
from server.metrics import Metrics
from server.servers import HTTP, is_decoupled
from server.streams import STREAM_WIRES, whole
from triton_local.server import LocalTriton
from triton_supervisor.process_table import model_processes

from perf.overhead.processes import ServerProcesses
from perf.soak import resources

WARM_UP = 0.2
"""Share of the attacks before the first reading that counts: one-time allocations have happened by then."""

MORE = {"rss_mib": 48.0, "descriptors": 4.0, "threads": 8.0}
"""Growth allowed for each process."""

MORE_SHARED_MIB = 48.0

COMPUTED = 1 / 40
"""Share of the attacks that must be computed, and that the model must refuse: Triton refuses most itself."""

MANY = 1_000
"""Attacks from which on the share is judged; of fewer, one must be computed and one refused."""

MOST_SHRUNK = 3
"""Different faults of a batch that are shrunk: each takes up to some minutes."""


def unary_of(server: LocalTriton) -> str:
    """Return the model that answers /infer and ModelInfer."""
    return "llama_unary" if is_decoupled(server) else "llama"


@dataclass
class Siege:
    """An idle server, then batches of attacks on it. figures: its resources after each batch, by attacks sent.

    failures: what it did not come through, in words, with the attacks shrunk.
    """

    server: LocalTriton
    figures: dict[int, dict[str, float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pid = self.server.pid
        self._models = model_processes(self._pid)
        self._metrics = Metrics(self.server)
        self.good = list(_good(self.server))
        self.campaign = Campaign(self.server, self.good)

    def run(self, batch: Batch) -> None:
        """Attack, wait until the server is idle, and read its resources; shrink what has found something."""
        known = len(self.campaign.faults)
        self.campaign.run(batch.attacks)
        again = f"seed {batch.seed}, {len(batch.attacks)} attacks"
        if self.gone:
            self.failures.append(f"{again}: a process is gone; sent last: {self.campaign.gone}")
            return
        for wrong, attacks in islice(by_fault(self.campaign.faults[known:]).items(), MOST_SHRUNK):
            # A neighbour in a batch may have the fault of another attack: shrunk is one that has it alone.
            alone = (attack for attack in attacks if wrong != HUNG and self._has(wrong, attack))
            attack = next(alone, attacks[0])
            smallest = repr(attack) if wrong == HUNG else shrunk(batch, attack, partial(self._has, wrong))
            self.failures.append(f"{again}: {wrong}: {smallest}")
        self.figures[self.campaign.sent] = self._idle()

    @property
    def gone(self) -> bool:
        """Whether the server, or a process of its models, has ended or is another one."""
        ended = bool(self.campaign.gone) or self.server.exit_code is not None
        return ended or (self.server.pid, model_processes(self._pid)) != (self._pid, self._models)

    def finish(self) -> None:
        """Add to `failures` what does not hold at the end."""
        if not self.failures:
            self.failures += self._wrong()

    def computed(self) -> float:
        """Return how many attacks were computed."""
        # Valid requests are computed, too: once for their answers alone, then in between.
        good = len(self.good) + self.campaign.asked
        return self._metrics.grown("llama_requests_total", finish_reason="length") - good

    def refused(self) -> float:
        """Return how many attacks the model refused."""
        return self._metrics.grown("llama_requests_total", finish_reason="invalid")

    def growth(self) -> dict[str, float]:
        """Return how much more the server takes than after the warm-up."""
        first = next(sent for sent in self.figures if sent >= WARM_UP * self.campaign.sent)
        before, after = self.figures[first], self.figures[self.campaign.sent]
        return {name: after[name] - before[name] for name in after}

    def _wrong(self) -> Iterator[str]:
        """Yield each condition that does not hold."""
        yield from self.campaign.spoiled
        for number, (asking, answer) in enumerate(self.good):
            if (now := asking()) != answer:
                yield f"good request {number} at the end: {now!r} instead of {answer!r}"
        for name, grown in self.growth().items():
            most = MORE_SHARED_MIB if name == "shared_memory_mib" else MORE.get(name.partition("_")[2])
            if most is not None and grown > most:
                yield f"{name} has grown by {grown:.1f}, {most:g} allowed: {self.figures}"
        counts = {"computed": self.computed(), "refused by the model": self.refused()}
        least = COMPUTED * self.campaign.sent if self.campaign.sent >= MANY else 0
        for name, count in counts.items():
            if count <= least:
                yield f"of {self.campaign.sent} attacks only {count:g} were {name}"
        if failed := self._metrics.grown("llama_requests_total", finish_reason="error"):
            yield f"{failed:g} requests ended with a server error"

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
            return fault(attack, send(self.server, channel, attack)) == wrong


def _good(server: LocalTriton) -> Iterator[Good]:
    """Yield valid requests over every endpoint, each with the answer it gets alone."""
    for number in range(8):
        request = {"text_input": f"Good {number}", "max_tokens": 8, "min_tokens": 8, "temperature": 1.0, "seed": number}
        answer = ask(server, generate, **request)
        if is_decoupled(server):
            for wire in STREAM_WIRES:
                yield partial(whole, server, wire, request), answer
        else:
            yield partial(ask, server, WIRES[number % len(WIRES)], **request), answer
        # To the last bit of each probability.
        asking = partial(_body, server, {**request, "num_logprobs": 3})
        yield asking, asking()


def _body(server: LocalTriton, inputs: Inputs) -> object:
    url = f"http://{server.http_url}/v2/models/{unary_of(server)}/generate"
    return HTTP.post(url, json=dict(inputs)).raise_for_status().json()
