"""The OpenAI endpoint beside a local server: a child process that starts last and ends first."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from types import TracebackType

from triton_supervisor import child

from triton_local.errors import InvalidSettingError, StartFailedError
from triton_local.ports import HeldPorts, reachable_host, resolve_host

_LISTENS = re.compile(r"serving (.+?)(?:, .+)?, listening on ")
_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "tokenizers")
_END_S = 10.0
"""Seconds beyond the grace period for the endpoint's own end."""


class OpenAIEndpoint:
    """An endpoint; its log goes to stderr. A context manager, which ends it.

    host, port: where it listens; the port is reserved from the beginning, 0 is any free one. grace: seconds that
    accepted requests have at its end. model: LLAMA_MODEL, None for the environment's, else the embedded checkpoint.
    """

    def __init__(self, host: str, port: int, grace: int, model: str | None = None) -> None:
        """Start nothing. Raises InvalidSettingError without the endpoint's packages, or its port."""
        for package in _PACKAGES:
            if find_spec(package) is None:
                raise InvalidSettingError(
                    f"the OpenAI endpoint needs the package {package}: install the extra openai, or set no OpenAI port"
                )
        self._host = resolve_host(host)
        self._held = HeldPorts(self._host, {"openai": port})
        self._grace = grace
        self._model = model
        # Held by the main thread when a signal's handler ends the endpoint, too.
        self._lock = threading.RLock()
        self._ending = False
        self._process: subprocess.Popen[str] | None = None
        self.served_name = ""

    def __enter__(self) -> OpenAIEndpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """HOST:PORT for clients on this machine."""
        return f"{reachable_host(self._host)}:{self._held.numbers['openai']}"

    @property
    def url(self) -> str:
        """The base URL for OpenAI clients."""
        return f"http://{self.address}/v1"

    def start(self, grpc_url: str, say: Callable[[str], None]) -> None:
        """Start the process with the server at `grpc_url` as its backend; wait until it listens. Sets `served_name`.

        A thread restarts the process whenever it exits unexpectedly, until a restart fails, and calls `say` with a
        line for each exit. Raises StartFailedError if the process exits before it listens; stderr has the reason.
        """
        process = self._run(grpc_url)
        threading.Thread(target=self._watch, args=(process, grpc_url, say), name="openai-endpoint", daemon=True).start()

    def end_then(self, action: Callable[[], None]) -> None:
        """Start its graceful end, and call `action`, in another thread, once it has ended. Returns at once."""

        def end() -> None:
            self.stop()
            action()

        self._ending = True
        threading.Thread(target=end, name="openai-endpoint-end", daemon=True).start()

    def kill(self) -> None:
        """Kill the process, which is then not restarted. Returns at once; the port stays reserved."""
        with self._lock:
            self._ending = True
            if self._process is not None:
                self._process.kill()

    def stop(self) -> None:
        """End it gracefully; kill it after the grace period. Harmless once it has ended."""
        with self._lock:
            self._ending = True
            process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(self._grace + _END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._held.close()

    def _run(self, grpc_url: str) -> subprocess.Popen[str]:
        """Start the process and wait until it listens. Raises StartFailedError if it ends instead."""
        with self._lock:
            if self._ending:
                raise StartFailedError("the OpenAI endpoint is ending")
            self._process = process = subprocess.Popen(
                [*_command(), *self._options(grpc_url)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                # It takes the tokenizer from LLAMA_MODEL, as the server does, unless its own settings say more.
                env={**os.environ, "LLAMA_MODEL": self._model} if self._model else None,
                # Ctrl-C at the terminal is the launcher's: it ends the endpoint before the server.
                start_new_session=True,
            )
        assert process.stdout is not None
        listens = _LISTENS.search(process.stdout.readline())
        if listens is None:
            with process:
                raise StartFailedError(f"the OpenAI endpoint ended with code {process.wait()} before it listened")
        self.served_name = listens[1]
        return process

    def _watch(self, process: subprocess.Popen[str], grpc_url: str, say: Callable[[str], None]) -> None:
        while True:
            with process:
                code = process.wait()
            if self._ending:
                return
            say(f"the OpenAI endpoint has ended with code {code}; starting it again")
            try:
                process = self._run(grpc_url)
            except StartFailedError as error:
                if not self._ending:
                    say(f"{error}; Triton goes on serving without it")
                return

    def _options(self, grpc_url: str) -> list[str]:
        port = self._held.numbers["openai"]
        return ["--host", self._host, "--port", str(port), "--triton", grpc_url, "--grace", str(self._grace)]


def _command() -> list[str]:
    # The kernel kills the endpoint when the launcher is gone, even by SIGKILL.
    wrapper = [sys.executable, "-I", "-S", child.__file__, str(os.getpid())]
    return [*wrapper, sys.executable, "-m", "triton_llama_openai"]
