"""The OpenAI endpoint beside a local server: a child process that starts last and ends first."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from importlib.util import find_spec

from triton_supervisor.triton import Address, AnswerError, exchange

from triton_local.errors import InvalidSettingError, StartFailedError
from triton_local.ports import choose_ports, reachable_host, resolve_host

_LISTENS = re.compile(r"serving (.+?)(?:, .+)?, listening on ")
_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "tokenizers")
_END_S = 10.0
"""Seconds beyond the grace period for the endpoint's own end."""
_MODELS_S = 5.0
"""Timeout of the endpoint's list of models."""


class OpenAIEndpoint:
    """An endpoint; its log goes to stderr. A context manager, which ends it.

    host, port: where it listens; port 0 is any free one. grace: seconds that accepted requests have at its end.
    """

    def __init__(self, host: str, port: int, grace: int) -> None:
        """Start nothing. Raises InvalidSettingError without the endpoint's packages, or its port."""
        for package in _PACKAGES:
            if find_spec(package) is None:
                raise InvalidSettingError(
                    f"the OpenAI endpoint needs the package {package}: install the extra openai, or set no OpenAI port"
                )
        self._host = resolve_host(host)
        self._port_holder = ExitStack()
        self._port = choose_ports(self._host, {"openai": port}, self._port_holder)["openai"]
        self.address = f"{reachable_host(self._host)}:{self._port}"
        """HOST:PORT for clients on this machine."""
        self.url = f"http://{self.address}/v1"
        """The base URL for OpenAI clients."""
        self._grace = grace
        self._process: subprocess.Popen[str] | None = None
        self.served_name = ""

    def __enter__(self) -> OpenAIEndpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def exit_code(self) -> int | None:
        """The process's, -N for signal N; None while it runs, or before its start."""
        return None if self._process is None else self._process.poll()

    def start(self, grpc_address: str, metrics_address: str | None = None) -> None:
        """Start the process with the server at `grpc_address` as backend; wait until it listens. Sets `served_name`.

        metrics_address: address of the server's metrics; None is the next port.

        Call it in the main thread: the kernel kills the process when the thread that started it ends. Raises
        StartFailedError if the process exits before it listens; stderr has the reason.
        """
        options = ["--host", self._host, "--port", str(self._port), "--grace", str(self._grace)]
        options += ["--triton", grpc_address]
        options += [] if metrics_address is None else ["--triton-metrics", metrics_address]
        self._process = subprocess.Popen(
            # The kernel kills the endpoint when the launcher is gone, even by SIGKILL.
            ["setpriv", "--pdeathsig=KILL", sys.executable, "-m", "triton_llama_openai", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            # Ctrl-C at the terminal is the launcher's: it ends the endpoint before the server.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        listens = _LISTENS.search(self._process.stdout.readline())
        if listens is None:
            code = self._process.wait()
            raise StartFailedError(f"the OpenAI endpoint ended with code {code} before it listened")
        self.served_name = listens[1]

    def kill(self) -> None:
        """Kill the process. Returns at once."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """End it gracefully; kill it after the grace period. Harmless once it has ended."""
        if self._process is not None:
            with self._process as process:
                process.terminate()
                try:
                    process.wait(self._grace + _END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
        self._port_holder.close()


def example_command(address: str, model: str) -> str:
    """Return a command that asks the endpoint at HOST:PORT, as a shell takes it: for a chat, or else an embedding."""
    path: str
    body: dict[str, object]
    question = "What is the capital of France?"
    if _embeds_alone(address):
        path, body = "embeddings", {"model": model, "input": question}
    else:
        messages = [{"role": "user", "content": question}]
        path, body = "chat/completions", {"model": model, "messages": messages, "max_tokens": 60, "temperature": 0}
    return f"curl -s http://{address}/v1/{path} -d {shlex.quote(json.dumps(body))}"


def _embeds_alone(address: str) -> bool:
    """Return whether the model serves embeddings alone; False where the list of models needs an API key."""
    try:
        answer = exchange(Address.parse(address), "GET", "/v1/models", _MODELS_S)
    except AnswerError:
        # The caller's loop reports an endpoint that has ended.
        return False
    return answer.status == 200 and [model["tasks"] for model in json.loads(answer.body)["data"]][:1] == [["embed"]]
