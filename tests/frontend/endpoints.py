"""Endpoints on real sockets, each in a thread with an event loop of its own, and what they answer."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from triton_llama_openai.__main__ import create_server
from triton_llama_openai.app import create_app
from triton_llama_openai.served.models import Models
from triton_llama_openai.settings import Settings

HOST = "127.0.0.1"
Json = dict[str, object]
QUESTION = [{"role": "user", "content": "What is a list?"}]
WITHOUT_ITS_BODY = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"

_GAUGES = re.compile(r'^vllm:(num_requests_\w+|kv_cache_usage_perc)\{model_name="pydoc-llama"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Endpoint:
    """A running endpoint and a client of it. model: the one that requests name."""

    port: int
    http: httpx.Client
    model: str = "pydoc-llama"

    @property
    def base_url(self) -> str:
        """The base URL for clients of OpenAI's protocol."""
        return f"http://{HOST}:{self.port}/v1"

    def post(self, path: str, /, **fields: object) -> httpx.Response:
        """Send a request with these fields to the model."""
        return self.http.post(path, json={"model": self.model, **fields})

    def chat(self, **fields: object) -> httpx.Response:
        """Send a chat of one message, unless the fields have others."""
        return self.post("/v1/chat/completions", **{"messages": QUESTION, **fields})

    def complete(self, **fields: object) -> httpx.Response:
        """Send a completion request with a prompt of three words, unless the fields have another."""
        return self.post("/v1/completions", **{"prompt": "Return a list", **fields})

    def respond(self, **fields: object) -> httpx.Response:
        """Ask for a response to a text, unless the fields have another input."""
        return self.post("/v1/responses", **{"input": "What is a list?", **fields})

    def message(self, **fields: object) -> httpx.Response:
        """Ask for a message after one of a user, unless the fields have others."""
        return self.post("/v1/messages", **{"max_tokens": 64, "messages": QUESTION, **fields})

    def tokenize(self, **fields: object) -> list[int]:
        """Return the tokens of a prompt or of messages."""
        return list(self.post("/tokenize", **fields).json()["tokens"])

    def tokens(self, prompt: str) -> list[int]:
        """Return a text's tokens, with the BOS."""
        return self.tokenize(prompt=prompt)

    def detokenize(self, tokens: list[int]) -> str:
        """Return the text of tokens."""
        return str(self.post("/detokenize", tokens=tokens).json()["prompt"])

    def begin(self, sent: bytes) -> socket.socket:
        """Open a connection and send the beginning of a request."""
        connection = socket.create_connection((HOST, self.port), timeout=20)
        connection.sendall(sent)
        return connection

    def begin_request(self, path: str, **fields: object) -> socket.socket:
        """Open a connection and send a whole request."""
        body = json.dumps({"model": self.model, **fields}).encode()
        return self.begin(f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


Serve = Callable[[str], Endpoint]
"""Starts the endpoint for the checkpoint of a family."""


@contextmanager
def endpoint(triton_port: int, **changes: object) -> Iterator[Endpoint]:
    """Serve in front of a Triton; `changes`: settings other than the defaults."""
    values: dict[str, object] = {"grace": 5, "triton": f"{HOST}:{triton_port}", **changes}
    settings = Settings.model_construct(**values)  # type: ignore[arg-type]  # fractions of seconds
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        app = create_app(settings, Models.of_settings(settings))
        server = create_server(app, settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="endpoint")
        thread.start()
        try:
            deadline = time.monotonic() + 60
            while not server.started:
                assert thread.is_alive(), "the endpoint has ended"
                assert time.monotonic() < deadline, "the endpoint did not start"
                time.sleep(0.01)
            with httpx.Client(base_url=f"http://{HOST}:{port}", timeout=240) as client:
                yield Endpoint(port, client)
        finally:
            server.should_exit = True
            thread.join()


def error_of(response: httpx.Response) -> Json:
    """Return the error of a refused request."""
    error = response.json()["error"]
    assert isinstance(error, dict)
    assert set(error) == {"message", "type", "param", "code"}
    return error


def check_refusal(response: httpx.Response, param: str | None, message: str) -> None:
    """Assert that a request was refused for a field, in a message with these words."""
    error = error_of(response)
    assert response.status_code == 400, error
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert message in str(error["message"])


def gauges(served: Endpoint) -> tuple[float, ...]:
    """Return vLLM's gauges on /metrics: the usage of the KV cache, those that run, those that wait; () without them."""
    values = dict(_GAUGES.findall(served.http.get("/metrics").text))
    return tuple(float(values[name]) for name in sorted(values))


def text_of(response: httpx.Response) -> str:
    """Return the text of a completion."""
    return str(response.json()["choices"][0]["text"])


def resumptions_of(served: Endpoint) -> dict[str, float]:
    """Return the resumptions by outcome."""
    lines = [line for line in served.http.get("/metrics").text.splitlines() if "_resumptions_total{" in line]
    return {line.split('"')[1]: float(line.split()[1]) for line in lines}


def _blocks(response: httpx.Response) -> list[str]:
    """Return the blocks of a stream of events."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, end = response.text.split("\n\n")
    assert end == ""
    return blocks


def named_events(response: httpx.Response) -> list[Json]:
    """Return the events of a stream, whose names are their types."""
    events = []
    for block in _blocks(response):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def events_of(response: httpx.Response) -> list[Json]:
    """Return the events of a stream, checked: each a JSON object, the last one [DONE]."""
    *events, done = _blocks(response)
    assert done == "data: [DONE]"
    assert all(event.startswith("data: {") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]
