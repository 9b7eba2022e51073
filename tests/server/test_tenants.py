"""Two tenants send requests at once: nothing of one's is in the other's responses or where everyone can read.

Each request has canaries, words of its own, in all that its client writes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from server.clients import Inputs, at_once, generate, unary_grpc, unary_infer
from server.servers import EMBEDDED, HTTP, until
from server.streams import Streamed, grpc_stream, sse
from triton_local.server import LocalTriton

KEYS = ["qx900001keyzq", "qx900002keyzq"]
"""The tenants' API keys."""

# Shows what a request can give a template. `kept` would stay in it if a rendering left anything for the next one.
TEMPLATE = """{%- set kept = namespace(note=note | default('no note')) %}
{%- for message in messages %}{{ message.role }}: {{ message.content }} {% endfor %}[{{ kept.note }}]"""

CANARY = re.compile(r"qx\d{6}[a-z]+zq", re.IGNORECASE)
ROUNDS = 3
"""Requests of each kind that a tenant sends."""

PAGES = ("/v2", "/v2/models/stats", "/v2/models/llama", "/v2/models/llama/config", "/v2/models/llama_unary/config")
TOKENS = 6


class Case(NamedTuple):
    """A request of one tenant. number: of its canaries. output: what its response must contain."""

    send: Callable[[], object]
    number: int
    output: str = ""


class Endpoint(NamedTuple):
    """The OpenAI endpoint as a process."""

    url: str
    log: Path


@pytest.fixture(scope="module")
def endpoint(streaming: LocalTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder = tmp_path_factory.mktemp("endpoint")
    options = ["--port", "0", "--triton", streaming.grpc_url, "--tokenizer", str(EMBEDDED)]
    for name, content in (("api-keys-file", "\n".join(KEYS)), ("chat-template", TEMPLATE)):
        (folder / name).write_text(content)
        options += [f"--{name}", str(folder / name)]
    log = folder / "endpoint.log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "triton_llama_openai", *options]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        until(lambda: process.poll() is not None or "listening on" in log.read_text(), log.read_text)
        (url,) = re.findall(r"listening on (http://\S+)/v1", log.read_text())
        yield Endpoint(url, log)
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def cases(streaming: LocalTriton, endpoint: Endpoint) -> list[Case]:
    return [
        case
        for number in range(2 * ROUNDS)
        for case in (*_engine_cases(streaming, number), *_endpoint_cases(endpoint.url, number))
    ]


@pytest.fixture(scope="module")
def responses(cases: list[Case]) -> list[object]:
    """The responses to all requests, sent at once."""
    return at_once([case.send for case in cases])


def test_a_response_has_nothing_of_another_request(cases: list[Case], responses: list[object]) -> None:
    for case, response in zip(cases, responses, strict=True):
        assert _others(response, case.number) == set()
        assert case.output in str(response)


def test_a_request_alone_has_the_response_it_has_beside_others(cases: list[Case], responses: list[object]) -> None:
    for case, response in zip(cases, responses, strict=True):
        assert case.send() == response


@pytest.mark.usefixtures("responses")
def test_what_everyone_can_read_has_no_request(streaming: LocalTriton, endpoint: Endpoint) -> None:
    pages = [f"http://{streaming.http_url}{path}" for path in PAGES]
    pages += [f"http://{streaming.metrics_url}/metrics", f"{endpoint.url}/metrics", f"{endpoint.url}/health"]
    texts = {page: HTTP.get(page).raise_for_status().text for page in pages}
    texts["/dev/shm"] = str([path.name for path in Path("/dev/shm").iterdir()])
    assert {where: _others(text) for where, text in texts.items() if _others(text)} == {}


@pytest.mark.usefixtures("responses")
def test_logs_have_nothing_of_a_request_but_its_id(streaming: LocalTriton, endpoint: Endpoint) -> None:
    def lines() -> list[str]:
        return [*streaming.log_text().splitlines(), *endpoint.log.read_text().splitlines()]

    # A line is written after the response is sent, and passes through Triton.
    last = _canary(2 * ROUNDS - 1, "id")
    until(lambda: any("llama: request " in line and last in line for line in lines()), lambda: "the last one is logged")
    canaries = {canary for line in lines() for canary in CANARY.findall(line)}
    assert canaries == {_canary(number, "id") for number in range(2 * ROUNDS)}


def _canary(number: int, kind: str) -> str:
    return f"qx{number:06}{kind}zq"


def _base(number: int) -> dict[str, object]:
    """Return fields that every route knows: sampled with a seed, of a fixed length."""
    return {"max_tokens": TOKENS, "min_tokens": TOKENS, "temperature": number % 2, "seed": number}


def _stream(wire: Callable[[LocalTriton, Inputs], Streamed], server: LocalTriton, inputs: Inputs) -> object:
    streamed = wire(server, inputs)
    return streamed.error or streamed.whole


def _engine_cases(server: LocalTriton, number: int) -> Iterator[Case]:
    """Yield requests over each wire of Triton."""
    prompt = f"The {_canary(number, 'prompt')} of"
    guide, bad = _canary(number, "guide"), _canary(number, "bad")
    base = {**_base(number), "text_input": prompt}
    guided = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": f"{guide}(yes|no)", "min_tokens": 0}
    wires: list[Callable[[LocalTriton, Inputs], object]] = [
        partial(_stream, sse),
        partial(_stream, grpc_stream),
        generate,
        unary_infer,
        unary_grpc,
    ]
    for wire in wires:
        changes: list[tuple[dict[str, object], str]] = [
            ({"stop_words": [_canary(number, "stop")], "bad_words": [bad, "e"]}, f"num_output_tokens={TOKENS}"),
            ({"exclude_input_in_output": False}, _canary(number, "prompt")),
            ({**guided, "max_tokens": 40}, guide),
            ({**guided, "guided_decoding_guide": f"{bad}("}, "guided_decoding_guide"),
            ({"logit_bias": json.dumps({bad: 1})}, "logit_bias"),
            ({"sampling_parameters": json.dumps({"temperature": bad})}, "temperature"),
        ]
        for changed, output in changes:
            yield Case(partial(wire, server, {**base, **changed}), number, output)


def _endpoint_cases(url: str, number: int) -> Iterator[Case]:
    """Yield requests to the OpenAI endpoint with the key of one of the tenants."""
    prompt, note, bad = (_canary(number, kind) for kind in ("prompt", "note", "bad"))
    guide = _canary(number, "guide")
    wrong = _canary(number, "key")
    messages = [{"role": "user", "content": f"What is {prompt}?", "name": _canary(number, "name")}]
    body = {**_base(number), "model": "pydoc-llama", "user": _canary(number, "user")}
    send = partial(_post, url, number)
    for stream in (False, True):
        chat = {**body, "messages": messages, "stream": stream}
        yield Case(partial(send, "/v1/chat/completions", chat), number)
        guided = {**chat, "guided_regex": f"{guide}(yes|no)", "max_tokens": 40, "min_tokens": 0}
        yield Case(partial(send, "/v1/chat/completions", guided), number, guide)
        echo = {**body, "prompt": prompt, "echo": True, "stream": stream}
        yield Case(partial(send, "/v1/completions", echo), number, prompt)
    tokens = {"model": "pydoc-llama", "messages": messages, "return_token_strs": True}
    yield Case(partial(send, "/tokenize", tokens), number, "[nonote]")
    noted = {**tokens, "chat_template_kwargs": {"note": note}}
    yield Case(partial(send, "/tokenize", noted), number, f"[{note}]")
    yield Case(partial(send, "/v1/completions", {**body, "prompt": prompt, "temperature": bad}), number, "temperature")
    yield Case(partial(send, f"/v1/{bad}", body), number, "404")
    yield Case(partial(send, "/v1/completions", body, key=wrong), number, "401")


def _post(url: str, number: int, path: str, body: object, key: str = "") -> object:
    """Return the response's status and texts, without what the endpoint makes up for each."""
    headers = {"authorization": f"Bearer {key or KEYS[number % 2]}", "x-request-id": _canary(number, "id")}
    response = HTTP.post(url + path, json=body, headers=headers)
    events = [
        line.removeprefix("data: ") for line in response.text.split("\n") if line.strip() not in ("", "data: [DONE]")
    ]
    documents = [json.loads(event) for event in events]
    texts, others = "", []
    for document in documents:
        for choice in document.get("choices", []):
            texts += choice.get("text") or choice.get("message", choice.get("delta", {})).get("content") or ""
            others += [choice["finish_reason"]] * bool(choice["finish_reason"])
        texts += "".join(document.get("token_strs", [])).replace("Ġ", "")
        others += [document[name] for name in ("usage", "error") if document.get(name)]
    return response.status_code, texts, others, response.headers.get("x-request-id")


def _others(text: object, number: int | None = None) -> set[str]:
    """Return the canaries that are not of this request, and API keys of any."""
    canaries = set(CANARY.findall(str(text)))
    return {canary for canary in canaries if "key" in canary or number is None or f"qx{number:06}" not in canary}
