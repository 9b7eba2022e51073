"""A server under test: its name in the results, what it runs with, and a baseline's process."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from triton_local.server import LocalTriton

from perf.environment import ROOT
from perf.load.generator import generate
from perf.load.protocols import Request, Target
from perf.roofline import Weights

HOST = "127.0.0.1"
LOGS = ROOT / ".work" / "baselines"

_FIRST_TOKEN_S = 240.0
_POLL_S = 0.5
_GRACE_S = 20.0


class NotRunError(Exception):
    """A server can't be measured here; `str()` is the reason, in one line, for the results."""


@dataclass(frozen=True)
class Running:
    """A server that is ready.

    command: as `shown` formats it. settings: for the results. pid: its first process, the ancestor of the others.
    weights_mib: of the weights in its format. triton: of our server, for the ports of gRPC and metrics.
    """

    target: Target
    command: str
    settings: Mapping[str, object]
    pid: int
    weights_mib: float
    triton: LocalTriton | None = None


Start = Callable[[Path, int], AbstractContextManager[Running]]
"""Starts a fresh server of the checkpoint at that path with that number of threads for its matrix products; it is
stopped on leaving."""


@dataclass(frozen=True)
class Server:
    """key: in results. weights: their format.

    converted: the format of `quantized` in which it gets a checkpoint. stored: that format's title, for results, where
    they compare formats; its measurements have no limit. same_answers: servers of that name give the same answers.
    """

    key: str
    title: str
    weights: Weights
    start: Start
    converted: str | None = None
    stored: str | None = None
    same_answers: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return the fields that every measurement of it begins with."""
        return {"server": self.key, "title": self.title, "weights": self.stored or self.weights.upper()}


def shown(command: Sequence[str], checkpoint: Path) -> str:
    """Return the command as typed in the project's folder, for results.

    The checkpoint stands there by its name, other paths outside of the folder by their last part.
    """
    words: list[str] = []
    for word in command:
        word = checkpoint.resolve().name if word == str(checkpoint) else word.replace(f"{ROOT}/", "")
        words.append(Path(word).name if word.startswith("/") else word)
    return shlex.join(words)


@contextmanager
def running(target: Target, command: Sequence[str], environment: Mapping[str, str], ready_s: float) -> Iterator[int]:
    """Run the command until the block ends; on entry it has completed a token at the target. Yields its process id.

    environment: added to the current one. ready_s: until then. Raises NotRunError if it fails before.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{target.name}.log"
    with log.open("w") as output:
        # A group of its own, so that the baseline's children end with it.
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=output, stderr=output, start_new_session=True
        )
    try:
        _wait(process, target, ready_s, log)
        yield process.pid
    finally:
        for signum in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signum)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)


def _wait(process: subprocess.Popen[bytes], target: Target, ready_s: float, log: Path) -> None:
    """Return once the server has completed a token: some servers allocate or compile only then."""
    deadline = time.monotonic() + ready_s
    while True:
        (record,) = generate(target, [Request("Return a list of", 1)], 1, _FIRST_TOKEN_S)
        if not record.error:
            return
        if process.poll() is not None or time.monotonic() > deadline:
            *_, last = ["its log is empty", *log.read_text(errors="replace").strip().splitlines()]
            raise NotRunError(f"{target.name} didn't complete a token: {record.error}; {last.strip()[:300]}")
        time.sleep(_POLL_S)
