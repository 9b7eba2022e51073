"""The servers of the tests, by name. The next one starts while tests use the one before, and servers stop in the
background: a start is mostly imports on one core, a stop mostly waiting.

A test needs the servers whose names are among its fixtures and parameters.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from server.servers import ROOT, SUPERVISED, in_use, new_server
from triton_local.process import Supervised
from triton_local.server import LocalTriton


@dataclass(frozen=True)
class Plan:
    """A server's config, settings, and changes to the model repository.

    shim, queue_policy, beside: as for `copy_repository`.
    """

    variant: str = "default"
    environment: Mapping[str, str] = field(default_factory=dict)
    shim: str = ""
    queue_policy: str = ""
    supervised: Supervised = SUPERVISED
    beside: Sequence[str] = ()


# Few slots and small prefills: sequences wait, join others, and are prefilled in chunks.
_FP32 = {
    "LLAMA_QUANTIZATION": "none",
    "LLAMA_DTYPE": "float32",
    "LLAMA_SLOTS": "8",
    "LLAMA_PREFILL_TOKENS": "48",
}
_TWO_SLOTS = {"LLAMA_SLOTS": "2"}
_QUEUE_OF_THREE = (
    "max_queue_size: 3, timeout_action: REJECT, allow_timeout_override: true, "
    # Triton takes a request's own timeout only where it is shorter than this one; 0 is none.
    "default_timeout_microseconds: 600000000"
)
# Few positions, so that no fuzzed request runs long.
_SHORT = {"LLAMA_MAX_MODEL_LEN": "64"}
_LATE_S = 16.0
"""Without a step, until a model counts as dead: a working one must not, beside other tests."""

_QUEUE_POLICY = re.compile(r"\bdefault_queue_policy \{[^{}]*\}")

SHARED = {
    # The product as it is: config.pbtxt, INT8, the embedded checkpoint, 32 slots; and the same streaming.
    "triton": Plan(),
    "streaming": Plan("streaming"),
    "batched_int8": Plan("batched_int8"),
    # For tests that act while a request runs.
    "slow_streaming": Plan("streaming", shim="slow_model"),
    # The same with two slots and a queue of three, and the models for other backends' clients.
    "narrow_default": Plan("default", _TWO_SLOTS, "slow_model", _QUEUE_OF_THREE, beside=("ensemble", "vllm_model")),
    "narrow_streaming": Plan(
        "streaming",
        _TWO_SLOTS,
        "slow_model",
        _QUEUE_OF_THREE,
        beside=("ensemble", "ensemble_uint32", "as_int32", "vllm_model"),
    ),
}
"""Servers that tests of several modules use, and leave as they are."""

PLANS = {
    **SHARED,
    "fp32_streaming": Plan("streaming", _FP32),
    # The other configs.
    "batched_fp16": Plan("batched_fp16"),
    "naive_fp16": Plan("naive_fp16"),
    "faulty": Plan("streaming", shim="faulty_model"),
    "failing": Plan("streaming", shim="faulty_model", supervised=Supervised(stuck_after=_LATE_S, restarts=0)),
    "fuzzed": Plan(environment=_SHORT),
    "fuzzed_streaming": Plan("streaming", _SHORT),
    # Triton shares mutexes with the model's process: a SIGSTOP can abort it later (boost's lock_exception).
    "stuck": Plan(shim="slow_model"),
    # For tests that kill it, and go on with the one that follows.
    "healing": Plan("streaming", _TWO_SLOTS, "slow_model", supervised=Supervised(stuck_after=_LATE_S)),
}


class Fleet:
    """The servers of one test run."""

    def __init__(self, order: Sequence[str], folder: Callable[[str], Path]) -> None:
        """order: names of the servers, in the order of the tests. folder: creates an empty folder of a name."""
        self._to_come = list(order)
        self._folder = folder
        self._starts: dict[str, Future[LocalTriton]] = {}
        self._ends: list[Future[None]] = []
        self._threads = ThreadPoolExecutor()

    def close(self) -> None:
        """Wait until every server has ended."""
        for start in self._starts.values():
            self._end(start)
        for end in self._ends:
            end.result()
        self._threads.shutdown()

    @contextmanager
    def server(self, name: str) -> Iterator[LocalTriton]:
        """Yield the server of this name, ready; it stops after the block."""
        start = self._start(name)
        if self._to_come:
            # One at a time keeps the second core busy.
            self._start(self._to_come[0])
        del self._starts[name]
        try:
            with in_use(name, start.result()) as server:
                yield server
        finally:
            self._end(start)

    def _start(self, name: str) -> Future[LocalTriton]:
        if name in self._to_come:
            self._to_come.remove(name)
        if name not in self._starts:
            self._starts[name] = self._threads.submit(self._started, name)
        return self._starts[name]

    def _started(self, name: str) -> LocalTriton:
        plan = PLANS[name]
        changed = plan.shim or plan.queue_policy or plan.beside
        changes = (plan.shim, plan.queue_policy, plan.beside)
        repository = copy_repository(self._folder(name), *changes) if changed else None
        options = [f"--load-model={model}" for model in plan.beside]
        server = new_server(plan.variant, plan.environment, repository, options, supervised=plan.supervised)
        server.start()
        return server

    def _end(self, start: Future[LocalTriton]) -> None:
        def end() -> None:
            # A server that failed to start has ended, and its test has failed.
            if not start.exception():
                start.result().stop()

        self._ends.append(self._threads.submit(end))


def copy_repository(folder: Path, shim: str = "", queue_policy: str = "", beside: Sequence[str] = ()) -> Path:
    """Copy the model repository into an empty folder and return its path.

    shim: the file of this name beside this one replaces model.py and imports it as `real_model`. queue_policy: fields
    of Triton's ModelQueuePolicy, in place of the in-flight configs' own. beside: models of compatibility/.
    """
    repository = folder / "model_repository"
    shutil.copytree(ROOT / "model_repository", repository, ignore=shutil.ignore_patterns("__pycache__"))
    # The embedded checkpoint's default path is beside the repository.
    (folder / "models").symlink_to(ROOT / "models")
    model = repository / "llama"
    if shim:
        (model / "1" / "model.py").rename(model / "1" / "real_model.py")
        shutil.copy(Path(__file__).parent / f"{shim}.py", model / "1" / "model.py")
    if queue_policy:
        for config in (model / "config.pbtxt", model / "configs" / "streaming.pbtxt"):
            text, found = _QUEUE_POLICY.subn(f"default_queue_policy {{ {queue_policy} }}", config.read_text())
            assert found == 1
            config.write_text(text)
    for name in beside:
        shutil.copytree(ROOT / "compatibility" / name, repository / name)
    return repository
