"""The servers of the tests, by name, each started before its tests come and ended behind their backs.

A start is mostly imports, on one core, while the tests of another server wait for that one: with two cores a server
that is started ahead costs next to nothing. An end is mostly waiting, so nobody waits for it. A test needs the servers
whose names are among its fixtures and its parameters. What is asked of the servers is the tests' business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from server.repositories import copy_repository
from server.servers import SUPERVISED, in_use, new_server
from triton_local.server import LocalTriton
from triton_local.supervised import Supervised


@dataclass(frozen=True)
class Plan:
    """What a server is: its config, its settings, and what differs from the project's repository, if anything does.

    options: for tritonserver. shim, queue_policy: as for `copy_repository`. supervised: as for `new_server`.
    """

    variant: str = "default"
    environment: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    shim: str = ""
    queue_policy: str = ""
    supervised: Supervised | None = SUPERVISED


# No outlier reaches this threshold, so rows don't depend on each other, and bitsandbytes' own product is some five
# times slower than ours on a CPU: what runs on these servers can be seen running in metrics that are 0.2 s old.
SLOW = {"LLAMA_INT8_THRESHOLD": "1000"}
_TWO_SLOTS = {"LLAMA_SLOTS": "2", **SLOW}
_QUEUE_OF_THREE = (
    "max_queue_size: 3, timeout_action: REJECT, allow_timeout_override: true, "
    # Triton takes a request's own timeout only where it is shorter than this one; 0 is none.
    "default_timeout_microseconds: 600000000"
)
# Few slots and small prefills, so that rows wait, enter beside others and are read in chunks.
_FP32 = {
    "LLAMA_QUANTIZATION": "none",
    "LLAMA_DTYPE": "float32",
    "LLAMA_SLOTS": "8",
    "LLAMA_PREFILL_TOKENS": "48",
}
# Not even these settings keep rows from ending: Triton unloads a model when nobody is left in it.
_NO_DRAIN = {**_TWO_SLOTS, "LLAMA_DRAIN_SECONDS": "0"}
# Bare Triton cuts off at its exit timeout whatever still runs: time enough for it on a machine that is busy otherwise.
_EXPLICIT = ("--model-control-mode=explicit", "--load-model=llama", "--exit-timeout-secs=120")
# A model that does nothing more is found dead after so long; one that works beside other tests must not be.
_SOON = Supervised(stuck_after=30.0)

PLANS = {
    # The product as it is: config.pbtxt, INT8, the embedded checkpoint, 32 slots; and the same streaming.
    "triton": Plan(),
    "streaming": Plan("streaming"),
    # Two slots and a queue of three, in one response and in pieces.
    "narrow": Plan(environment=_TWO_SLOTS, queue_policy=_QUEUE_OF_THREE),
    "narrow_streaming": Plan("streaming", _TWO_SLOTS, queue_policy=_QUEUE_OF_THREE),
    "fp32": Plan(environment=_FP32),
    "fp32_streaming": Plan("streaming", _FP32),
    # The other configs.
    "batched_int8": Plan("batched_int8"),
    "batched_fp16": Plan("batched_fp16"),
    "naive_fp16": Plan("naive_fp16"),
    # Programs with something changed. Prompts beyond 128 tokens are read in chunks.
    "faulty": Plan("streaming", {"LLAMA_PREFILL_TOKENS": "128"}, shim="faults"),
    "faulty_default": Plan(shim="faults"),
    "split": Plan("streaming", shim="split_characters"),
    "stopping": Plan(environment=_TWO_SLOTS, shim="stops_early"),
    "stopping_streaming": Plan("streaming", _TWO_SLOTS, shim="stops_early"),
    # For fuzzing. Room for few tokens, so that nothing that is asked for by chance takes long.
    "fuzzed": Plan(environment={"LLAMA_MAX_MODEL_LEN": "64"}),
    "fuzzed_streaming": Plan("streaming", {"LLAMA_MAX_MODEL_LEN": "64"}),
    # For tests that end them.
    "unloaded": Plan(environment=_NO_DRAIN, options=_EXPLICIT, supervised=None),
    "unloaded_streaming": Plan("streaming", _NO_DRAIN, options=_EXPLICIT, supervised=None),
    "killed": Plan("streaming"),
    "killed_model": Plan(environment=_TWO_SLOTS),
    "killed_model_streaming": Plan("streaming", _TWO_SLOTS),
    "stuck_model": Plan("streaming", _TWO_SLOTS, supervised=_SOON),
    "broken_model": Plan(shim="breaks_for_good", supervised=_SOON),
    "stopped": Plan(),
}


class Fleet:
    """The servers of a run of tests."""

    def __init__(self, order: Sequence[str], folder: Callable[[str], Path]) -> None:
        """order: names of the servers, as the tests will need them. folder: makes an empty folder of such a name."""
        self._to_come = list(order)
        self._folder = folder
        self._starts: dict[str, Future[LocalTriton]] = {}
        self._starting = ThreadPoolExecutor(2)
        self._ending = ThreadPoolExecutor()
        self._ends: list[Future[None]] = []

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Wait until every server has ended."""
        for start in self._starts.values():
            if not start.cancel():
                start.add_done_callback(self._end)
        self._starting.shutdown()
        self._ending.shutdown()
        for end in self._ends:
            end.result()

    @contextmanager
    def server(self, name: str) -> Iterator[LocalTriton]:
        """Hand out the server of this name, ready; it is this caller's alone, and told to end behind the block."""
        start = self._start(name)
        if self._to_come:
            # One is enough to keep a second core busy.
            self._start(self._to_come[0])
        del self._starts[name]
        server = start.result()
        try:
            with in_use(name, server):
                yield server
        finally:
            self._end(start)

    def _start(self, name: str) -> Future[LocalTriton]:
        if name in self._to_come:
            self._to_come.remove(name)
        if name not in self._starts:
            self._starts[name] = self._starting.submit(self._started, name)
        return self._starts[name]

    def _started(self, name: str) -> LocalTriton:
        plan = PLANS[name]
        changed = plan.shim or plan.queue_policy
        repository = copy_repository(self._folder(name), plan.shim, plan.queue_policy) if changed else None
        server = new_server(plan.variant, plan.environment, repository, plan.options, plan.supervised)
        server.start()
        return server

    def _end(self, start: Future[LocalTriton]) -> None:
        # A server that failed to start has ended; whoever asked for it has been told.
        if not start.exception():
            self._ends.append(self._ending.submit(start.result().stop))
