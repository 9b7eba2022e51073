"""Receipts in answers, and /v1/verify."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from frontend.endpoints import Endpoint, Json, endpoint, error_of, events_of
from frontend.fake_triton import FakeTriton

RECEIPT = {"seed": "7", "output_ids": [1, 2], "parameters": {"temperature": 1.0, "stop_words": ["é"]}}
DIFFERENT = {
    "equal": False, "tokens": 1, "finish_reason": "",
    "difference": {
        "claimed": {"token_id": 2, "text": " é", "logit": 1.5}, "drawn": {"token_id": 3, "text": "", "logit": 2.0},
    },
}  # fmt: skip


def _expected(seed: int) -> Json:
    return {"seed": str(seed), "output_ids": [0, 1, 2, 3]}


def _verify(served: Endpoint, **fields: object) -> httpx.Response:
    return served.http.post("/v1/verify", json={"model": "pydoc-llama", "receipt": RECEIPT, **fields})


def test_each_choice_has_its_receipt(served: Endpoint) -> None:
    for answer in (served.complete(n=2, seed=40, receipt=True), served.chat(n=2, seed=40, receipt=True)):
        assert [choice["receipt"] for choice in answer.json()["choices"]] == [_expected(40), _expected(41)]


def test_the_last_event_of_a_streamed_choice_has_its_receipt(served: Endpoint) -> None:
    for answer in (served.complete, served.chat):
        events = events_of(answer(n=2, seed=40, stream=True, receipt=True))
        choices = [choice for event in events for choice in event["choices"]]  # type: ignore[attr-defined]
        last = [choice for choice in choices if choice["finish_reason"]]
        assert {choice["index"]: choice["receipt"] for choice in last} == {0: _expected(40), 1: _expected(41)}
        assert all("receipt" not in choice for choice in choices if not choice["finish_reason"])


@pytest.mark.parametrize("stream", [False, True])
def test_without_the_field_there_is_no_receipt(served: Endpoint, stream: bool) -> None:
    assert "receipt" not in served.complete(stream=stream).text + served.chat(stream=stream).text


def test_a_server_without_receipts_refuses_the_field_by_name(served: Endpoint, triton: FakeTriton) -> None:
    triton.failing = "receipt is true; it must be false: this server's bits depend"
    error = error_of(served.complete(receipt=True))
    assert (error["param"], error["code"]) == ("receipt", "invalid_value")


@pytest.mark.parametrize("found", [{"equal": True, "tokens": 2, "finish_reason": "stop"}, DIFFERENT])
def test_a_receipt_is_verified_by_the_model(served: Endpoint, triton: FakeTriton, found: Json) -> None:
    triton.verification = found
    answer = _verify(served)
    assert answer.json() == {"object": "verification", "model": "pydoc-llama", **found}
    assert json.loads(str(triton.last.value("verify_receipt"))) == RECEIPT
    # JSON that the model hashes: 1.0 must not become 1.
    assert '"temperature": 1.0' in str(triton.last.value("verify_receipt"))
    assert triton.last.inputs.keys() == {"verify_receipt"}


def test_the_only_model_needs_no_name(served: Endpoint) -> None:
    assert served.http.post("/v1/verify", json={"receipt": RECEIPT}).json()["equal"]


def test_a_verification_has_the_salt_of_its_key_and_field(served: Endpoint, triton: FakeTriton) -> None:
    salts = []
    for fields in ({}, {}, {"cache_salt": "a"}):
        _verify(served, **fields)
        salts.append(triton.last.value("cache_salt"))
    served.complete(cache_salt="a")
    assert salts[0] == salts[1] != salts[2] == triton.last.value("cache_salt")


@contextmanager
def _dying(triton: FakeTriton, responses: int) -> Iterator[Endpoint]:
    """Serve in front of a Triton that dies after so many responses, and starts again."""
    triton.die_after = responses

    def restart() -> None:
        triton.wait_for(lambda fake: fake.die_after is None)
        triton.start()

    restarting = threading.Thread(target=restart)
    restarting.start()
    with endpoint(triton.port, resume_timeout=20.0) as served:
        yield served
    restarting.join()
    assert len(triton.requests) == 2


def test_a_verification_is_sent_again_when_its_triton_dies(triton: FakeTriton) -> None:
    with _dying(triton, 0) as served:
        assert _verify(served).json()["equal"]


def test_a_resumed_answer_has_the_receipt_of_the_whole(triton: FakeTriton) -> None:
    with _dying(triton, 2) as served:
        assert served.complete(seed=40, receipt=True).json()["choices"][0]["receipt"] == _expected(40)
        assert triton.last.inputs["resume_ids"]


@pytest.mark.parametrize(
    ("message", "param", "shown"),
    [
        ("verify_receipt is not JSON; it must be a JSON object", "receipt", "receipt is not JSON"),
        ("verify_receipt: input_ids is empty; it must be a prompt", "receipt", "receipt input_ids is empty"),
        ("guided_decoding_guide is too large", None, "guided_decoding_guide is too large"),
    ],
)
def test_the_models_refusal_names_the_field(
    served: Endpoint, triton: FakeTriton, message: str, param: str | None, shown: str
) -> None:
    triton.failing = message
    error = error_of(_verify(served))
    assert error["param"] == param
    assert str(error["message"]).startswith(shown)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{}", "receipt"),
        (b'{"receipt": "{}"}', "receipt"),
        (b'{"receipt": []}', "receipt"),
        (b'{"receipt": {}, "stream": true}', "stream"),
        (b'{"receipt": {}, "model": 5}', "model"),
        (b'{"receipt": {"contract": ' + b"9" * 5000 + b"}}", None),
        (b'{"receipt": {"a": ' * 5000, None),
    ],
)
def test_a_malformed_body_is_refused(served: Endpoint, body: bytes, param: str | None) -> None:
    assert error_of(served.http.post("/v1/verify", content=body))["param"] == param


def test_the_bound_of_a_body_applies(triton: FakeTriton) -> None:
    with endpoint(triton.port, max_body_bytes=100) as small:
        assert _verify(small, cache_salt="a" * 200).status_code == 413


def test_a_key_is_needed_where_there_are_keys(triton: FakeTriton, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    with endpoint(triton.port, api_keys_file=keys) as served:
        assert _verify(served).status_code == 401


def test_a_client_that_leaves_cancels_its_verification(served: Endpoint, triton: FakeTriton) -> None:
    triton.hold_after = 0
    with served.begin_request("/v1/verify", receipt=RECEIPT):
        triton.wait_for(lambda fake: fake.running == 1)
    triton.wait_for(lambda fake: len(fake.cancelled) == 1)
