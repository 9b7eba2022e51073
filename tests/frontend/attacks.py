"""Bad values for every field of the endpoint's requests, and for every place within them; and broken bodies."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator

from frontend.endpoints import Endpoint, Json, error_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from triton_llama_openai.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

REQUESTS: dict[str, tuple[type[BaseModel], Json]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
    "/v1/completions": (CompletionRequest, {"prompt": "a", "max_tokens": 4}),
    "/tokenize": (TokenizeRequest, {"messages": [{"role": "user", "content": "a"}]}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
# Fields with places within them, each with other fields that it needs.
NESTED: dict[str, tuple[object, Json]] = {
    "messages": (
        [
            {"role": "system", "content": "a", "name": "n"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "b", "tool_calls": [CALL]},
            {"role": "tool", "content": "c", "tool_call_id": "1"},
        ],
        {},
    ),
    "prompt": ([[5, 6], [7]], {}),
    "tokens": ([5, 6], {}),
    "tools": (TOOLS, {}),
    "tool_choice": ({"type": "function", "function": {"name": "f"}}, {"tools": TOOLS}),
    "stream_options": ({"include_usage": True, "continuous_usage_stats": True}, {"stream": True}),
    "response_format": ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}, {}),
    "structured_outputs": ({"regex": "a"}, {}),
    "guided_json": ({"type": "object", "properties": {"a": {"type": "string"}}}, {}),
    "guided_choice": (["a", "b"], {}),
    "logit_bias": ({"5": 1}, {}),
    "stop": (["a", "b"], {}),
    "bad_words": (["a"], {}),
    "stop_token_ids": ([5], {}),
    "allowed_token_ids": ([5, 6], {}),
    "top_logprobs": (1, {"logprobs": True}),
    "metadata": ({"a": "b"}, {}),
    "documents": ([{"a": "b"}], {}),
    "chat_template_kwargs": ({"a": 1}, {}),
}
# The one that a value makes another field contradict may be named instead.
RELATED = {
    "max_completion_tokens": {"max_tokens"},
    "messages": {"prompt"},
    "min_tokens": {"max_tokens"},
    "tools": {"tool_choice"},
    "tool_choice": {"tools"},
    "add_generation_prompt": {"continue_final_message"},
    "stream": {"stream_options"},
    "top_logprobs": {"logprobs"},
    "logprobs": {"echo"},
}
Place = tuple[str | int, ...]


def _places(value: object, place: Place) -> Iterator[Place]:
    yield place
    if isinstance(value, dict):
        yield (*place, "unknown")
        for key, inner in value.items():
            yield from _places(inner, (*place, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _places(inner, (*place, index))


def _targets() -> list[tuple[str, Json, Place]]:
    """Return every place of every request: its path, a good body that has it, and where it is."""
    targets = []
    for path, (schema, required) in REQUESTS.items():
        for name, field in schema.model_fields.items():
            key = field.alias or name
            value, needed = NESTED.get(key, (None, {}))
            body = {"model": "pydoc-llama", **required, **needed, key: value}
            targets += [(path, body, place) for place in _places(value, (key,))]
        targets.append((path, {"model": "pydoc-llama", **required}, ("unknown",)))
    return targets


_nested: object = "x"
for _ in range(150):
    _nested = [_nested]

# Extremes and near misses of every JSON type, then whatever hypothesis makes up.
VALUES = st.one_of(
    st.sampled_from(
        [
            True, False, 0, -1, 1, 2**31 - 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.5, 1e308, 1e-320,
            "", "0", "1", "true", "auto", "ä" * 600, "a" * 5000, "\x00", "\u2028", "🙂" * 300, "(", "[", '"',
            [], [[]], [0], [-1], ["a"] * 20, [""], [None], [1.5], ["\x00"], [0] * 70000, [{}],
            {}, {"": 0}, {"a": 1}, {"type": "text"}, {"type": "json_schema"}, {"0": 101}, {"0": "1"}, {"type": []},
            {"type": "function", "function": {}}, {"include_usage": 1}, {"role": "user"}, {"$ref": "#"}, _nested,
        ]
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=8,
    ),
)  # fmt: skip
GOOD = '{"model": "pydoc-llama", "max_tokens": 4, "messages": [{"role": "user", "content": "Grüße 🙂"}]}'
BROKEN = st.one_of(
    st.integers(0, len(GOOD) - 1).map(lambda end: GOOD[:end].encode()),
    st.tuples(st.integers(0, len(GOOD) - 1), st.binary(min_size=1, max_size=3)).map(
        lambda cut: GOOD[: cut[0]].encode() + cut[1] + GOOD[cut[0] :].encode()
    ),
    st.sampled_from(
        [
            GOOD.encode("utf-16"), GOOD.encode("latin-1", "replace"), b"\xef\xbb\xbf" + GOOD.encode(),
            b"NaN", b"Infinity", b"\x00" * 9, b'{"model": "\\ud800"}',
            b"[" * 100_000, b'{"a":' * 100_000, b'{"n": 1' + b"0" * 100_000 + b"}",
        ]
    ),
    st.binary(max_size=40),
)  # fmt: skip


def attack(endpoint: Endpoint, count: int, is_good: Callable[[], bool]) -> Counter[int]:
    """Send `count` bad values and a tenth as many broken bodies; return how many answers had each status.

    Asserts that each is answered or refused with the name of its field, and that good requests in between are unharmed.
    """
    statuses: Counter[int] = Counter()

    def send(path: str, body: bytes) -> Json | None:
        """Return the error, None for an answer."""
        headers = {"content-type": "application/json"}
        response = endpoint.http.post(path, content=body, headers=headers, timeout=20)
        statuses[response.status_code] += 1
        assert response.status_code in (200, 400, 404), (body[:500], response.text)
        if sum(statuses.values()) % 100 == 0:
            assert is_good()
        return None if response.status_code == 200 else error_of(response)

    unbounded = settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))

    @unbounded
    @given(target=st.sampled_from(_targets()), value=VALUES)
    def values(target: tuple[str, Json, Place], value: object) -> None:
        path, good, place = target
        body = copy.deepcopy(good)
        inner: object = body
        for key in place[:-1]:
            inner = inner[key]  # type: ignore[index]  # the place is in the body
        inner[place[-1]] = value  # type: ignore[index]
        error = send(path, json.dumps(body).encode())
        # A long text anywhere in a chat, a tool's description too, may make its prompt too long.
        if error is not None and error["code"] not in ("invalid_json", "context_length_exceeded"):
            field = str(place[0])
            named = str(error["param"]).split("[")[0].split(".")[0]
            assert named in {field, *RELATED.get(field, set())}, (place, repr(value)[:200], error)

    @settings(unbounded, max_examples=count // 10)
    @given(path=st.sampled_from(sorted(REQUESTS)), body=BROKEN)
    def bodies(path: str, body: bytes) -> None:
        send(path, body)

    values()
    bodies()
    assert is_good()
    return statuses
