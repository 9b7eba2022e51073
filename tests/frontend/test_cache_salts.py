"""Which requests get the same salt for the prefix cache: by API key, by cache_salt, and by the setting."""

from __future__ import annotations

import hashlib
from pathlib import Path

from frontend.endpoints import Endpoint, endpoint
from frontend.fake_triton import FakeTriton

FIRST, SECOND = "sk-first", "sk-second"


def _salt(served: Endpoint, triton: FakeTriton, key: str = "", cache_salt: str | None = None) -> object:
    """Send a chat; return the salt that the model gets, None without one."""
    body = {"model": "pydoc-llama", "messages": [{"role": "user", "content": "a"}], "cache_salt": cache_salt}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    response = served.http.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return triton.last.value("cache_salt")


def test_keys_do_not_share_prefixes(triton: FakeTriton, keys: Path) -> None:
    with endpoint(triton.port, api_keys_file=keys) as served:
        assert _salt(served, triton, FIRST) == _salt(served, triton, FIRST)
        assert _salt(served, triton, FIRST) != _salt(served, triton, SECOND)
        assert _salt(served, triton, FIRST, "a") != _salt(served, triton, SECOND, "a")


def test_a_cache_salt_separates_requests_of_one_key(triton: FakeTriton, keys: Path) -> None:
    with endpoint(triton.port, api_keys_file=keys) as served:
        salts = [_salt(served, triton, FIRST, cache_salt) for cache_salt in (None, "a", "b", "a")]
    assert salts[1] == salts[3]
    assert len(set(salts)) == 3


def test_keys_that_share_are_separated_by_a_cache_salt_alone(triton: FakeTriton, keys: Path) -> None:
    with endpoint(triton.port, api_keys_file=keys, prefix_cache_shared="on") as served:
        assert _salt(served, triton, FIRST) is _salt(served, triton, SECOND) is None
        assert _salt(served, triton, FIRST, "a") == _salt(served, triton, SECOND, "a") is not None


def test_without_keys_only_a_cache_salt_separates(served: Endpoint, triton: FakeTriton) -> None:
    assert _salt(served, triton) is _salt(served, triton, "any") is None
    assert _salt(served, triton, cache_salt="ü" * 256) not in (None, _salt(served, triton, cache_salt="b"))


def test_every_prompt_of_a_completion_request_has_the_salt(served: Endpoint, triton: FakeTriton) -> None:
    assert served.complete(prompt=["a", "b"], cache_salt="a").status_code == 200
    first, second = (request.value("cache_salt") for request in triton.requests)
    assert first == second is not None


def test_every_endpoint_derives_the_same_salt_from_a_key(triton: FakeTriton, keys: Path) -> None:
    with endpoint(triton.port, api_keys_file=keys) as served, endpoint(triton.port, api_keys_file=keys) as other:
        salt = _salt(served, triton, FIRST)
        assert salt == _salt(other, triton, FIRST)
    assert isinstance(salt, str)
    assert len(salt) == 32
    assert salt not in hashlib.sha256(FIRST.encode()).hexdigest()
