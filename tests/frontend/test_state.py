"""Models, tokens, health and metrics."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path

import pytest
from frontend.endpoints import EMBEDDED, HOST, Endpoint, endpoint, error_of
from frontend.fake_triton import FakeTriton, fake_triton
from transformers import AutoTokenizer
from triton_llama_openai.checkpoint import load_checkpoint


def test_the_models_are_listed_with_their_context(served: Endpoint) -> None:
    (model,) = served.http.get("/v1/models").json()["data"]
    assert model["id"] == "pydoc-llama"
    assert model["max_model_len"] == 512
    assert served.http.get("/v1/models/pydoc-llama").json() == model
    assert error_of(served.http.get("/v1/models/other"))["code"] == "model_not_found"


def test_several_checkpoints_are_served_by_name(triton: FakeTriton, tmp_path: Path) -> None:
    with fake_triton() as other:
        other.tokens = [" Other"]
        file = tmp_path / "models.json"
        entries = [
            {"served_name": "org/first", "triton": f"{HOST}:{triton.port}", "tokenizer": str(EMBEDDED)},
            {"served_name": "second", "triton": f"{HOST}:{other.port}", "tokenizer": str(EMBEDDED)}
            | {"max_model_len": 64},
        ]
        file.write_text(json.dumps(entries))
        with endpoint(0, models_file=file) as served:
            listed = served.http.get("/v1/models").json()["data"]
            assert [(model["id"], model["max_model_len"]) for model in listed] == [("org/first", 512), ("second", 64)]
            assert served.http.get("/v1/models/org/first").status_code == 200
            assert served.complete(model="org/first").json()["choices"][0]["text"] == " Hello, world."
            assert served.complete(model="second").json()["choices"][0]["text"] == " Other"
            assert error_of(served.http.post("/tokenize", json={"prompt": "a"}))["param"] == "model"


@pytest.mark.parametrize("text", ["Return a list of", "Grüße 👋", "", "<s>a</s>"])
@pytest.mark.parametrize("special", [True, False])
def test_tokens_are_those_of_the_tokenizer(served: Endpoint, text: str, special: bool) -> None:
    answer = served.http.post("/tokenize", json={"prompt": text, "add_special_tokens": special}).json()
    expected = AutoTokenizer.from_pretrained(EMBEDDED)(text, add_special_tokens=special)["input_ids"]
    assert answer["tokens"] == expected
    assert answer["count"] == len(expected)
    assert answer["max_model_len"] == 512
    back = served.http.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"]
    assert back == ("<s>" if special else "") + text


def test_python_goes_on_while_a_large_text_is_tokenized_in_a_thread() -> None:
    checkpoint = load_checkpoint(str(EMBEDDED), None, None)
    tokens = checkpoint.encode("a" * 100_000, add_special_tokens=False) * 20
    for work in (lambda: checkpoint.encode("a" * 400_000, add_special_tokens=False), lambda: checkpoint.decode(tokens)):
        thread = threading.Thread(target=work)
        thread.start()
        turns = 0
        while thread.is_alive():
            time.sleep(0.001)
            turns += 1
        assert turns > 10


def test_the_tokenizer_is_described_as_vllm_does(served: Endpoint) -> None:
    info = served.http.get("/tokenizer_info").json()
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    assert (info["bos_token"], info["eos_token"]) == (tokenizer.bos_token, tokenizer.eos_token)
    assert info["chat_template"] == tokenizer.chat_template
    assert info["max_model_len"] == 512
    assert error_of(served.http.get("/tokenizer_info?model=other"))["param"] == "model"


def test_a_conversation_is_tokenized_as_its_prompt(served: Endpoint) -> None:
    messages = [{"role": "user", "content": "a"}]
    answer = served.http.post("/tokenize", json={"messages": messages, "return_token_strs": True}).json()
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert answer["tokens"] == tokenizer(str(prompt), add_special_tokens=False)["input_ids"]
    assert answer["token_strs"][0] == "<s>"


_TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "tools": [_TOOL] * 129}, "tools"),
        ("/detokenize", {"tokens": [99999]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {}, "tokens"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
    ],
)
def test_bad_token_requests_are_refused_by_name(
    served: Endpoint, path: str, fields: dict[str, object], param: str
) -> None:
    response = served.http.post(path, json=fields)
    assert response.status_code in (400, 404)
    assert error_of(response)["param"] == param


def test_the_endpoint_lives_without_a_triton() -> None:
    with fake_triton() as gone:
        port = gone.port
    with endpoint(port) as served:
        assert served.http.get("/health/live").status_code == 200
        response = served.chat()
        assert response.status_code == 503
        assert error_of(response)["code"] == "engine_unavailable"
        assert served.http.get("/health").status_code == 503


def test_metrics_count_requests_by_route_with_their_tokens(triton: FakeTriton) -> None:
    with endpoint(triton.port) as served:
        served.chat()
        served.chat(stream=True)
        served.chat(temperature=9)
        served.http.get("/v1/made/up")
        # A stream is counted once its last chunk is sent, and its client may be quicker.
        counted = 'llama_openai_request_seconds_count{route="/v1/chat/completions"} 3.0'
        triton.wait_for(lambda _: counted in served.http.get("/metrics").text)
        page = served.http.get("/metrics").text
    prompt = 2 * triton.last.prompt_tokens
    for line in (
        'llama_openai_requests_total{code="200",route="/v1/chat/completions"} 2.0',
        'llama_openai_requests_total{code="400",route="/v1/chat/completions"} 1.0',
        'llama_openai_requests_total{code="404",route="unmatched"} 1.0',
        'llama_openai_time_to_first_token_seconds_count{route="/v1/chat/completions"} 1.0',
        counted,
        f'llama_openai_tokens_total{{kind="prompt"}} {prompt}.0',
        'llama_openai_tokens_total{kind="completion"} 8.0',
    ):
        assert line in page.splitlines()


@pytest.mark.parametrize(("log_requests", "lines"), [("none", 0), ("summary", 1), ("prompts", 1)])
def test_a_prompt_is_logged_only_under_the_setting_prompts(
    triton: FakeTriton, caplog: pytest.LogCaptureFixture, log_requests: str, lines: int
) -> None:
    caplog.set_level(logging.INFO, "triton_llama_openai")
    with endpoint(triton.port, log_requests=log_requests) as served:
        caplog.clear()
        served.complete(prompt="my secret")
    logged = [record.getMessage() for record in caplog.records if "/v1/completions" in record.getMessage()]
    assert len(logged) == lines
    assert ("my secret" in caplog.text) == (log_requests == "prompts")
    assert all("completion 4 tokens" in line for line in logged)
