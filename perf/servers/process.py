"""A baseline's process: started, ready once it has completed a token, and stopped with its children."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from triton_local.command import ServerCommand
from triton_local.process import GuardedProcess, Guarding

from perf.environment import ROOT
from perf.load.generator import send_one
from perf.load.protocols import Request, Target
from perf.servers.server import NotRunError

HOST = "127.0.0.1"
LOGS = ROOT / ".work" / "baselines"

_FIRST_TOKEN_S = 240.0
_POLL_S = 0.2
_GRACE_S = 20.0


def shown_checkpoint(text: str, checkpoint: Path) -> str:
    """Return a setting or log line with the checkpoint by its name only: its path is specific to this machine."""
    name = checkpoint.resolve().name
    # As it was given, where that is the whole value; made absolute by a server, anywhere.
    if text == str(checkpoint) or text.endswith(f"={checkpoint}"):
        text = text.removesuffix(str(checkpoint)) + name
    for path in (checkpoint.absolute(), checkpoint.resolve()):
        text = text.replace(str(path), name)
    return text.replace(f"{ROOT}/", "")


def shown(command: Sequence[str], checkpoint: Path) -> str:
    """Return the command as typed in the project's folder, for results; paths outside of it by their last part."""
    words = [shown_checkpoint(word, checkpoint) for word in command]
    return shlex.join([Path(word).name if word.startswith("/") else word for word in words])


@contextmanager
def free_port() -> Iterator[int]:
    """Hold a free port until a server has bound it: it is not listened on, and a server that names it gets it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((HOST, 0))
        yield int(held.getsockname()[1])


@contextmanager
def running(
    target: Target, command: Sequence[str], environment: Mapping[str, str], ready_s: float
) -> Iterator[GuardedProcess]:
    """Run the command until the block ends; on entry it has completed a token at the target.

    environment: added to the current one. ready_s: until the server listens. Raises NotRunError if it fails before.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{target.name}.log"
    with log.open("w") as lines:

        def write(line: str) -> None:
            lines.write(line + "\n")
            lines.flush()

        process = GuardedProcess(
            ServerCommand(tuple(command), {**os.environ, **environment}),
            # A prefix for shared memory that no baseline uses: theirs has other names.
            f"baseline_{uuid.uuid4().hex[:12]}_",
            Guarding(grace=_GRACE_S, longest_end=_GRACE_S),
            write,
        )
        try:
            _wait_until_listening(process, target, ready_s, log)
            _complete_a_token(process, target, log)
            yield process
        finally:
            process.stop()


def _wait_until_listening(process: GuardedProcess, target: Target, ready_s: float, log: Path) -> None:
    deadline = time.monotonic() + ready_s
    port = int(target.url.rpartition(":")[2])
    while True:
        if (code := process.exit_code()) is not None:
            raise NotRunError(f"{target.name} ended with code {code} before it was ready: {_last_line(log)}")
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
        if time.monotonic() > deadline:
            raise NotRunError(f"{target.name} didn't listen within {ready_s:g} s: {_last_line(log)}")
        time.sleep(_POLL_S)


def _complete_a_token(process: GuardedProcess, target: Target, log: Path) -> None:
    # The first one may be slow: some servers allocate or compile only now.
    record = asyncio.run(send_one(target, Request("Return a list of", 1), _FIRST_TOKEN_S))
    if record.error:
        ended = "" if process.exit_code() is None else f"; it ended with code {process.exit_code()}: {_last_line(log)}"
        raise NotRunError(f"{target.name} didn't complete a token: {record.error}{ended}")


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1].strip()[:300]} ({str(log).replace(f'{ROOT}/', '')})" if lines else "its log is empty"
