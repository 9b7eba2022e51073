"""The key that Triton, or a proxy in front of several, gets with a request: prompts that share pages have one."""

from __future__ import annotations

import re

from frontend.endpoints import Endpoint, endpoint
from frontend.fake_triton import FakeTriton

HEADERS = ({"x-session-id": "one"}, {"x-session-id": "two"})


def _key(served: Endpoint, triton: FakeTriton, headers: dict[str, str] | None = None, **fields: object) -> str:
    """Send a completion; return the key that comes with it."""
    body = {"prompt": "a", **fields}
    assert served.http.post("/v1/completions", json=body, headers=headers).status_code == 200
    return str(triton.last.metadata["x-llama-key"])


def test_prompts_with_the_same_beginning_have_one_key(served: Endpoint, triton: FakeTriton) -> None:
    text = "a" * 256
    assert _key(served, triton, prompt=f"{text} one") == _key(served, triton, prompt=f"{text} two")
    assert _key(served, triton, prompt=[7] * 64 + [1]) == _key(served, triton, prompt=[7] * 64 + [2])
    assert _key(served, triton, prompt="a") != _key(served, triton, prompt="b")


def test_a_session_has_one_key(served: Endpoint, triton: FakeTriton) -> None:
    one, two = HEADERS
    keys = [_key(served, triton, one, prompt=prompt, prompt_cache_key=prompt) for prompt in ("a", "b")]
    assert keys[0] == keys[1] != _key(served, triton, two)


def test_a_prompt_cache_key_has_one_key_on_every_path(served: Endpoint, triton: FakeTriton) -> None:
    key = _key(served, triton, prompt="a", prompt_cache_key="one")
    for ask in (served.chat, served.respond):
        answer = ask(prompt_cache_key="one")
        assert "x-ignored-parameters" not in answer.headers
        assert triton.last.metadata["x-llama-key"] == key
    assert key != _key(served, triton, prompt="a", prompt_cache_key="two")


def test_clients_with_different_salts_share_no_key(served: Endpoint, triton: FakeTriton) -> None:
    for name in (None, "one"):
        keys = {_key(served, triton, prompt_cache_key=name, cache_salt=salt) for salt in (None, "one", "two")}
        assert len(keys) == 3
    assert len({_key(served, triton, HEADERS[0], cache_salt=salt) for salt in ("one", "two")}) == 2


def test_a_key_shows_nothing_of_the_client(served: Endpoint, triton: FakeTriton) -> None:
    with endpoint(triton.port) as other:
        keys = {_key(each, triton, HEADERS[0]) for each in (served, other)}
    (key,) = keys
    assert re.fullmatch("[0-9a-f]{32}", key)
