"""The OpenAI endpoint with the real model: what it says is what the model says, and slots are freed.

The protocol's forms and refusals are tested with a small Triton in tests/frontend.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from pathlib import Path

import httpx
import pytest
from end_to_end.metrics import Metrics
from end_to_end.openai_endpoint import in_front_of
from end_to_end.wires import ask, generate
from frontend.endpoints import HOST, Endpoint, Json, events_of
from frontend.openai_types import read_events, read_response
from openai.types.responses import ResponseCompletedEvent, ResponseIncompleteEvent
from triton_local.server import LocalTriton

MODEL = "pydoc-llama"
PROMPT = "Return a list of"


def test_a_completion_is_the_models_own_streamed_or_not(served: Endpoint, streaming: LocalTriton) -> None:
    greedy = {"max_tokens": 20, "temperature": 0, "repetition_penalty": 1}
    expected = ask(streaming, generate, text_input=PROMPT, **greedy)
    answer = served.complete(prompt=PROMPT, **greedy).json()
    assert answer["choices"][0]["text"] == expected.text
    assert answer["usage"]["completion_tokens"] == expected.num_output_tokens
    assert answer["usage"]["prompt_tokens"] == expected.num_input_tokens
    events = events_of(served.complete(prompt=PROMPT, stream=True, **greedy))
    assert "".join(event["choices"][0]["text"] for event in events) == expected.text  # type: ignore[index]


def test_a_response_is_a_chats_answer_streamed_or_not(served: Endpoint) -> None:
    greedy: Json = {"temperature": 0, "repetition_penalty": 1}
    (choice,) = served.chat(messages=[{"role": "user", "content": PROMPT}], max_tokens=20, **greedy).json()["choices"]
    whole = read_response(served.respond(input=PROMPT, max_output_tokens=20, **greedy).json())
    assert whole.output_text == choice["message"]["content"]
    events = read_events(served.respond(input=PROMPT, max_output_tokens=20, stream=True, **greedy))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert last.type == f"response.{whole.status}"
    assert isinstance(last, ResponseCompletedEvent | ResponseIncompleteEvent)
    # The prompt may be cached by now.
    assert last.response.usage is not None
    assert whole.usage is not None
    assert last.response.usage.output_tokens == whole.usage.output_tokens


def test_a_streamed_echo_has_the_logprobs_of_the_whole_answer(served: Endpoint) -> None:
    fields: Json = {"prompt": [PROMPT, "word " * 600], "truncate_prompt_tokens": 20, "echo": True, "logprobs": 1}
    fields |= {"n": 2, "temperature": 0, "repetition_penalty": 1, "max_tokens": 6}
    expected = served.complete(**fields).json()
    assert expected["usage"]["prompt_tokens"] == 20 + len(expected["choices"][0]["logprobs"]["tokens"]) - 6
    events = events_of(served.complete(stream=True, **fields))
    choices = [choice for event in events for choice in event["choices"]]  # type: ignore[attr-defined]  # JSON
    for whole in expected["choices"]:
        own = [choice for choice in choices if choice["index"] == whole["index"]]
        assert "".join(choice["text"] for choice in own) == whole["text"]
        for name, values in whole["logprobs"].items():
            assert [value for choice in own for value in choice["logprobs"][name]] == values


def test_the_tokens_of_an_echo_and_its_answer_are_the_text(served: Endpoint) -> None:
    tokens = served.http.post("/tokenize", json={"prompt": PROMPT, "add_special_tokens": False}).json()["tokens"]
    for prompt in (PROMPT, tokens):
        answer = served.complete(
            prompt=prompt, echo=True, logprobs=2, guided_choice=[" é你😀 end"], max_tokens=40
        ).json()
        (choice,) = answer["choices"]
        assert choice["text"] == f"{PROMPT} é你😀 end"
        before = b""
        for name, offset in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True):
            assert offset == len(before.decode(errors="ignore"))
            escaped = name.removeprefix("bytes:").replace("\\x", "")
            before += name.encode() if escaped == name else bytes.fromhex(escaped)
        assert before.decode() == choice["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_refused_requests_leave_no_error_in_tritons_log(served: Endpoint, streaming: LocalTriton, stream: bool) -> None:
    before = _error_lines(streaming)
    for _ in range(10):
        assert served.complete(max_tokens=3000, stream=stream).status_code == 400
    # What Triton has logged about them is there once a later request is answered.
    assert served.complete(max_tokens=2).status_code == 200
    assert _error_lines(streaming) == before


def _error_lines(server: LocalTriton) -> list[str]:
    """Return Triton's own lines of the level error."""
    return re.findall(r"^E\d{4} .*", server.log_text(), re.MULTILINE)


def test_a_repeated_prompt_is_cached_for_its_key_alone(streaming: LocalTriton, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-first\nsk-second\n")
    # A few pages that no other test has sent.
    prompt = f"{secrets.token_hex(8)}: " + "return a list of the words in the string, " * 10
    with in_front_of(streaming, api_keys_file=tmp_path / "keys") as endpoint:

        def cached(key: str) -> int:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
            headers = {"authorization": f"Bearer {key}"}
            usage = endpoint.http.post("/v1/completions", json=body, headers=headers).json()["usage"]
            tokens = int(usage["prompt_tokens_details"]["cached_tokens"])
            assert tokens < usage["prompt_tokens"]
            return tokens

        assert cached("sk-first") == 0
        assert cached("sk-first") > 0
        assert cached("sk-second") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(narrow_streaming: LocalTriton, stream: bool) -> None:
    metrics = Metrics(narrow_streaming)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 500, "min_tokens": 500, "temperature": 2, "stream": stream}
    with (
        in_front_of(narrow_streaming) as served,
        httpx.Client(base_url=f"http://{HOST}:{served.port}", timeout=1) as leaving,
        # An answer that isn't streamed takes longer than the client waits.
        contextlib.suppress(httpx.ReadTimeout),
        leaving.stream("POST", "/v1/completions", json=body) as response,
    ):
        assert stream
        next(response.iter_raw())
    metrics.wait_for(1, "llama_requests_total", finish_reason="cancelled")
    assert "HandleCancellation called even when" not in narrow_streaming.log_text()
