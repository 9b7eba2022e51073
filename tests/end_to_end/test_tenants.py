"""Two tenants of an endpoint send requests at once: nothing of one's is in the other's responses or public.

Each request has canaries, words of its own, in all that its client writes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from end_to_end.servers import HTTP, in_front_of
from end_to_end.wires import at_once
from frontend.endpoints import Endpoint
from triton_local.server import LocalTriton

KEYS = ["qx900001keyzq", "qx900002keyzq"]
"""The tenants' API keys."""

WRONG_KEY = "qx900003keyzq"

# Shows what a request can give a template; `state` would outlive a rendering that leaves anything for the next one.
TEMPLATE = """{%- set state = namespace(note=note | default('no note')) %}
{%- for message in messages %}{{ message.role }}: {{ message.content }} {% endfor %}[{{ state.note }}]"""

PAGES = ("/v2", "/v2/models/stats", "/v2/models/llama", "/v2/models/llama/config", "/v2/models/llama_unary/config")


Case = tuple[int, Callable[[], object], str]
"""A tenant's number, its request, and what the response must contain."""


def test_tenants_see_nothing_of_each_other(
    streaming: LocalTriton, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "triton_llama_openai")
    keys, template = tmp_path / "keys", tmp_path / "template"
    keys.write_text("\n".join(KEYS))
    template.write_text(TEMPLATE)
    with in_front_of(streaming, api_keys_file=keys, chat_template=template) as endpoint:
        cases = [case for number in (0, 1) for case in _to_endpoint(endpoint, number)]
        responses = at_once([send for _, send, _ in cases])
        pages = [f"http://{streaming.http_address}{page}" for page in PAGES]
        pages += [f"http://{streaming.metrics_address}/metrics", f"http://127.0.0.1:{endpoint.port}/metrics"]
        public = [HTTP.get(page).raise_for_status().text for page in pages]
    for (number, _, output), response in zip(cases, responses, strict=True):
        assert output in str(response)
        assert _requests_in(response) <= {number}
    assert _requests_in(public) == set()
    logs = re.sub(r"qx\d{6}xidzq", "", streaming.log_text() + caplog.text)
    assert _requests_in(logs) == set()


def _canary(number: int, kind: str) -> str:
    return f"qx{number:06}{kind}zq"


def _requests_in(text: object) -> set[int]:
    """Return the numbers of the requests, and of the API keys, whose canaries are in a text."""
    return {int(number) for number in re.findall(r"qx(\d{6})[a-z]+zq", str(text), re.IGNORECASE)}


def _to_endpoint(endpoint: Endpoint, number: int) -> Iterator[Case]:
    prompt, note, guide, bad = (_canary(number, kind) for kind in ("prompt", "note", "guide", "bad"))
    messages = [{"role": "user", "content": f"What is {prompt}?", "name": _canary(number, "name")}]
    base: dict[str, object] = {"max_tokens": 6, "min_tokens": 6, "temperature": number, "seed": number}
    base |= {"model": "pydoc-llama", "user": _canary(number, "user")}
    tokens = {"model": "pydoc-llama", "messages": messages, "return_token_strs": True}
    guided = {"messages": messages, "guided_regex": f"{guide}(yes|no)", "max_tokens": 40, "min_tokens": 0}
    for path, body, output in (
        ("/v1/chat/completions", {**base, "messages": messages, "stream": True}, '"finish_reason":"length"'),
        ("/v1/chat/completions", {**base, **guided}, guide),
        ("/v1/completions", {**base, "prompt": prompt, "echo": True}, prompt),
        ("/v1/completions", {**base, "prompt": prompt, "temperature": bad}, "temperature"),
        ("/tokenize", tokens, "[nonote]"),
        ("/tokenize", {**tokens, "chat_template_kwargs": {"note": note}}, f"[{note}]"),
        (f"/v1/{bad}", base, "404"),
    ):
        yield number, partial(_post, endpoint, number, path, body, KEYS[number]), output
    yield number, partial(_post, endpoint, number, "/v1/completions", base, WRONG_KEY), "the API key is wrong"


def _post(endpoint: Endpoint, number: int, path: str, body: object, key: str) -> object:
    """Return the status, the body, and what may be cut in it: the joined texts of events or tokens."""
    headers = {"authorization": f"Bearer {key}", "x-request-id": _canary(number, "xid")}
    response = endpoint.http.post(path, json=body, headers=headers)
    texts = re.findall(r'"(?:content|text)":"([^"]*)"', response.text)
    tokens = response.json()["token_strs"] if path == "/tokenize" else []
    return response.status_code, response.text, "".join(texts), "".join(tokens).replace("Ġ", "")
