"""Runs a batch: several requests at a time, retried while the endpoint is busy or lost, each answer to its file."""

from __future__ import annotations

import asyncio
import json
import socket
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, repeat
from typing import Any, TypedDict

import aiohttp
from aiohttp.connector import AddrInfoType

from triton_llama.batch.answer_file import ID_PREFIX, AnswerFile
from triton_llama.batch.progress import Progress
from triton_llama.batch.request_lines import BatchRequest
from triton_llama.errors import AccessDeniedError, LlamaConnectionError, LlamaTimeoutError, one_line

LOWEST_PRIORITY = 2**31 - 1
_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Before each retry, the last one repeated; a longer Retry-After counts."""
_RETRIED = (408, 429, 502, 503, 504)
"""Statuses of a server that is busy or restarts, and of a proxy that can't reach it."""
_ACCESS_DENIED = (401, 403)
_SHOWN = 200
"""Characters of a response in a message."""
_CONNECT_TIMEOUT_S = 10.0
_FIRST_RESPONSE_S = 30.0
"""Seconds after which an endpoint that has never responded is taken for a wrong address."""
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPALIVE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""The options that end a connection whose machine has vanished; Linux has the first name, macOS the second one."""


class SendOptions(TypedDict):
    """Where and how a batch is sent."""

    url: str
    """The endpoint's, before /v1."""
    api_key: str | None
    concurrency: int
    """Requests at a time."""
    timeout: float
    """Maximum seconds of a request with all its retries."""
    model: str | None
    """The model of every request; None: what its line says."""
    seed: int | None
    """Determines, with the custom_id, the seed of a line that has none; None: the server draws one."""


@dataclass(frozen=True)
class BatchRunner:
    """Sends a batch to an endpoint, and its answers to their files."""

    answers: AnswerFile
    errors: AnswerFile
    progress: Progress
    options: SendOptions

    async def run(self, requests: Iterator[BatchRequest]) -> None:
        """Send the requests. When this is cancelled, those under way are dropped, and the files don't have them.

        Raises AccessDeniedError, LlamaConnectionError for a wrong address, and OSError where a file can't be written.
        """
        showing = asyncio.create_task(self.progress.show())
        try:
            async with _open_session(self.options) as http, asyncio.TaskGroup() as group:
                for _ in range(self.options["concurrency"]):
                    group.create_task(self._work(http, requests))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        finally:
            showing.cancel()

    async def _work(self, http: aiohttp.ClientSession, requests: Iterator[BatchRequest]) -> None:
        for request in requests:
            answer: dict[str, object] = {"id": f"{ID_PREFIX}{uuid.uuid4().hex}", "custom_id": request.custom_id}
            try:
                response = await self._send(http, request)
            except LlamaTimeoutError as error:
                self._fail(answer | {"response": None, "error": {"code": "batch_expired", "message": str(error)}})
                continue
            answer |= {"response": response, "error": None}
            if response["status_code"] == 200 and isinstance(response["body"], dict):
                self.answers.append(answer)
                self.progress.answered += 1
                self.progress.tokens += _count_tokens(response["body"])
            else:
                self._fail(answer)

    def _fail(self, answer: dict[str, object]) -> None:
        self.errors.append(answer)
        self.progress.failed += 1

    async def _send(self, http: aiohttp.ClientSession, request: BatchRequest) -> dict[str, Any]:
        """Return the first response that is not retried, as OpenAI's lines have it.

        Raises LlamaTimeoutError without one in time, AccessDeniedError, LlamaConnectionError for a wrong address.
        """
        url, content = f"{self.options['url']}{request.url}", json.dumps(self._body(request)).encode()
        failure = "the endpoint has not answered"
        with suppress(TimeoutError):
            async with asyncio.timeout(self.options["timeout"]):
                for delay in chain(_DELAYS_S, repeat(_DELAYS_S[-1])):
                    after = 0.0
                    try:
                        async with http.post(url, data=content, allow_redirects=False) as response:
                            text = (await response.read()).decode(errors="replace")
                    except aiohttp.ClientError as error:
                        failure = one_line(f"{type(error).__name__} {error}")
                        if not self.progress.reached and self.progress.elapsed > _FIRST_RESPONSE_S:
                            message = f"{self.options['url']} has not responded; --url names the endpoint: {failure}"
                            raise LlamaConnectionError(message) from error
                    else:
                        self.progress.reached = True
                        status, failure = response.status, one_line(f"{response.status} {text[:_SHOWN]}")
                        if status in _ACCESS_DENIED:
                            raise AccessDeniedError(f"{url} answers {failure}")
                        if status not in _RETRIED:
                            self.progress.retry_reason = ""
                            request_id = response.headers.get("x-request-id", "")
                            return {"status_code": status, "request_id": request_id, "body": _parse(text)}
                        after = _retry_after(response.headers.get("retry-after", ""))
                    self.progress.retry_reason = failure
                    await asyncio.sleep(max(delay, after))
        raise LlamaTimeoutError(f"no answer within {self.options['timeout']:g} s: {failure}")

    def _body(self, request: BatchRequest) -> dict[str, object]:
        defaults: dict[str, object] = {"priority": LOWEST_PRIORITY}
        if self.options["seed"] is not None and request.url != "/v1/embeddings":
            digest = sha256(json.dumps([self.options["seed"], request.custom_id]).encode()).digest()
            defaults["seed"] = int.from_bytes(digest[:4])
        # Null is no value.
        body = {name: value for name, value in request.body.items() if value is not None}
        model = self.options["model"]
        return defaults | body | ({} if model is None else {"model": model})


def _open_session(options: SendOptions) -> aiohttp.ClientSession:
    """Return a session with the key and as many connections as there are requests at a time."""
    headers = {"Content-Type": "application/json"}
    if options["api_key"]:
        headers["Authorization"] = f"Bearer {options['api_key']}"
    connector = aiohttp.TCPConnector(limit=options["concurrency"], socket_factory=_open_socket)
    # An answer may take long; `BatchRunner._send` ends the wait.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
    return aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout)


def _open_socket(address: AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    opened = socket.socket(family, kind, protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return opened


def _retry_after(header: str) -> float:
    """Return its seconds. Its other form, a date, is left to the growing delays."""
    return float(header) if header.isdecimal() else 0.0


def _parse(text: str) -> object:
    """Return JSON parsed, another text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _count_tokens(body: dict[str, Any]) -> int:
    """Return the generated tokens; of embeddings, which have none, the prompts'."""
    usage = body.get("usage") or {}
    names = ("completion_tokens", "output_tokens", "prompt_tokens")
    return next((usage[name] for name in names if name in usage), 0)
