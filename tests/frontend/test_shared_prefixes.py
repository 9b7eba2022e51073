"""Whose prompts share pages: the salts of the prefix cache, and the keys by which a proxy picks a replica."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from frontend.endpoints import QUESTION, Endpoint, endpoint
from frontend.fake_triton import FakeTriton

FIRST, SECOND = "sk-first", "sk-second"
HEADERS = ({"x-session-id": "one"}, {"x-session-id": "two"})


def _salt(served: Endpoint, triton: FakeTriton, key: str = "any", cache_salt: str | None = None) -> object:
    """Send a chat; return the salt that the model gets, None without one."""
    body = {"model": "pydoc-llama", "messages": QUESTION, "cache_salt": cache_salt}
    response = served.http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert response.status_code == 200, response.text
    return triton.last.value("cache_salt")


def test_keys_and_cache_salts_share_no_prefixes(triton: FakeTriton, keyed: Endpoint, keys: Path) -> None:
    requests = [(key, cache_salt) for key in (FIRST, SECOND) for cache_salt in (None, "a", "b")]
    salts = [_salt(keyed, triton, *request) for request in requests]
    with endpoint(triton.port, api_keys_file=keys) as other:
        assert salts == [_salt(other, triton, *request) for request in requests]
    assert len(set(salts)) == 6
    for salt in salts:
        assert isinstance(salt, str)
        assert len(salt) == 32
        assert salt not in hashlib.sha256(FIRST.encode()).hexdigest()


def test_keys_that_share_are_separated_by_a_cache_salt_alone(triton: FakeTriton, keys: Path) -> None:
    with endpoint(triton.port, api_keys_file=keys, prefix_cache_shared="on") as served:
        assert _salt(served, triton, FIRST) is _salt(served, triton, SECOND) is None
        assert _salt(served, triton, FIRST, "a") == _salt(served, triton, SECOND, "a") is not None


def test_without_keys_only_a_cache_salt_separates(served: Endpoint, triton: FakeTriton) -> None:
    assert _salt(served, triton) is _salt(served, triton, "other") is None
    salt = _salt(served, triton, cache_salt="ü" * 256)
    assert salt not in (None, _salt(served, triton, cache_salt="b"))
    # Every prompt of a request has it.
    assert served.complete(prompt=["a", "b"], cache_salt="ü" * 256).status_code == 200
    assert [request.value("cache_salt") for request in triton.requests[-2:]] == [salt, salt]


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


def test_a_session_and_a_prompt_cache_key_on_any_path_have_one_key(served: Endpoint, triton: FakeTriton) -> None:
    one, two = HEADERS
    keys = [_key(served, triton, one, prompt=prompt, prompt_cache_key=prompt) for prompt in ("a", "b")]
    assert keys[0] == keys[1] != _key(served, triton, two)
    key = _key(served, triton, prompt="a", prompt_cache_key="one")
    assert key != _key(served, triton, prompt="a", prompt_cache_key="two")
    for ask in (served.chat, served.respond):
        assert "x-ignored-parameters" not in ask(prompt_cache_key="one").headers
        assert triton.last.metadata["x-llama-key"] == key


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
