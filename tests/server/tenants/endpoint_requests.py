"""Requests to the OpenAI endpoint, each with canaries in everything that a client writes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from server.tenants.asked import Asked
from server.tenants.canaries import Phrases, canary, tokenizer

WAY = "endpoint"
CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
MODEL = "pydoc-llama"

TEMPLATE = """
{%- macro told(text, before='') %}{{ before }}{{ text }}{% endmacro %}
{%- set kept = namespace(note=note | default('no note')) %}
{%- for message in messages %}{{ message.role }} {{ message.name | default('') }}: {{ told(message.content) }}
{% endfor %}
{%- set kept.note = kept.note ~ '.' %}[{{ kept.note }}] {{ documents | default([]) | tojson }} {{ tools | tojson }}
"""
"""Shows all that a request can give a template, and leaves nothing of one rendering for the next, if jinja doesn't."""

Draw = random.Random
Change = Callable[[Asked, Draw], Asked]


def endpoint_request(number: int, phrases: Phrases, draw: Draw) -> Asked:
    """Draw a request."""
    prompt = f"{phrases.new(number)} {canary(number, 'prompt')}"
    target = draw.choice([CHAT, CHAT, CHAT, COMPLETIONS, COMPLETIONS, TOKENIZE])
    if target == TOKENIZE:
        return _tokenize(number, prompt, draw)
    tokens = draw.randint(1, 8)
    body: dict[str, object] = {
        "model": MODEL,
        "max_tokens": tokens,
        "min_tokens": tokens,
        "temperature": draw.choice([0, 0, 1]),
        "seed": draw.getrandbits(63),
        "user": canary(number, "user"),
        **draw.choice([{}, {"stream": True, "stream_options": {"include_usage": True}}]),
    }
    if target == CHAT:
        body["messages"] = [{"role": "user", "content": prompt, "name": canary(number, "name")}]
        body["metadata"] = {"of": canary(number, "user")}
    else:
        body["prompt"] = prompt
    known = None if target == CHAT else len(tokenizer().encode(prompt).ids)
    asked = Asked(number, WAY, "plain", target, body, _headers(number), prompt_tokens=known, tokens=tokens)
    return draw.choice([*_BOTH, *(_CHAT if target == CHAT else _COMPLETIONS)])(asked, draw)


def _headers(number: int) -> dict[str, str]:
    mark = canary(number, "header")
    return {"x-tenant": mark, "user-agent": mark, "cookie": f"session={mark}", "x-request-id": canary(number, "id")}


def _tokenize(number: int, prompt: str, draw: Draw) -> Asked:
    body: dict[str, object] = {"model": MODEL, "prompt": prompt, "return_token_strs": True}
    if draw.random() < 0.5:
        messages = [{"role": "user", "content": prompt}]
        more = draw.choice([{}, {"chat_template_kwargs": {"note": canary(number, "note")}}])
        body = {"model": MODEL, "messages": messages, "return_token_strs": True, **more}
    return Asked(number, WAY, "tokenize", TOKENIZE, body, _headers(number))


def _with(asked: Asked, what: str, **fields: object) -> Asked:
    return replace(asked, what=what, body={**asked.body, **fields}, prompt_tokens=None)


def _refused(asked: Asked, what: str, **fields: object) -> Asked:
    return replace(_with(asked, what, **fields), tokens=None)


def _plain(asked: Asked, draw: Draw) -> Asked:
    return asked


def _stop(asked: Asked, draw: Draw) -> Asked:
    stop, bad = canary(asked.number, "stop"), canary(asked.number, "bad")
    return _refused(asked, "stop and bad words", stop=[stop, "."], bad_words=[bad, "list"], min_tokens=0)


def _choices(asked: Asked, draw: Draw) -> Asked:
    return _refused(asked, "choices", n=draw.randint(2, 3), temperature=1)


def _prompt_logprobs(asked: Asked, draw: Draw) -> Asked:
    """Show the rendered prompt, token by token."""
    body = {name: value for name, value in asked.body.items() if not name.startswith("stream")}
    more: dict[str, object] = {"logprobs": True, "top_logprobs": 2} if asked.target == CHAT else {"logprobs": 2}
    return _with(replace(asked, body=body), "log probabilities", prompt_logprobs=1, **more)


def _one_token(asked: Asked, draw: Draw) -> Asked:
    words = [token for token in draw.sample(range(300, 3000), 20) if tokenizer().decode([token]).isalpha()]
    field: dict[str, object] = draw.choice(
        [{"allowed_token_ids": [words[0]]}, {"logit_bias": {str(words[0]): 100}, "temperature": 0}]
    )
    return replace(_with(asked, "one token", **field), says=tokenizer().decode([words[0]]))


def _guide(asked: Asked, draw: Draw) -> Asked:
    mark = canary(asked.number, "guide")
    schema = {"type": "object", "properties": {mark: {"const": 1}}, "required": [mark]}
    formatted = {"type": "json_schema", "json_schema": {"name": mark, "schema": schema}}
    field: dict[str, object] = draw.choice(
        [
            {"guided_regex": f"{mark}(yes|no)"},
            {"guided_choice": [f"{mark}a", f"{mark}b"]},
            {"guided_json": {"const": mark}},
            {"structured_outputs": {"json": {"const": mark}}},
            {"response_format": formatted},
        ]
    )
    return replace(_refused(asked, "guide", **field, max_tokens=48, min_tokens=0), says=mark)


def _bad_value(asked: Asked, draw: Draw) -> Asked:
    mark = canary(asked.number, "value")
    field: dict[str, object] = draw.choice(
        [
            {mark: 1},
            {"model": mark},
            {"temperature": mark},
            {"stop": [[mark]]},
            {"logit_bias": {mark: 1}},
            {"response_format": {"type": mark}},
            {"guided_regex": f"{mark}("},
            {"guided_grammar": f"{mark} {mark}"},
            {"guided_json": f"{{{mark}"},
            {"stop": [mark * 100]},
            {"max_tokens": 100_000 + asked.number},
        ]
    )
    return _refused(asked, "refused value", **field)


def _wrong_key(asked: Asked, draw: Draw) -> Asked:
    key = canary(asked.number, "key")
    wrong = draw.choice([f"Bearer {key}", f"Basic {key}", key, f"Bearer {key} {key}"])
    return replace(_refused(asked, "wrong key"), headers={**asked.headers, "authorization": wrong})


def _wrong_path(asked: Asked, draw: Draw) -> Asked:
    return replace(_refused(asked, "wrong path"), target=f"/v1/{canary(asked.number, 'value')}")


def _leave(asked: Asked, draw: Draw) -> Asked:
    return replace(_refused(asked, "cancelled", max_tokens=300, min_tokens=300), leaves=True, repeatable=False)


def _template(asked: Asked, draw: Draw) -> Asked:
    """Give the template more variables, some of them the names of its own."""
    note = canary(asked.number, "note")
    field: dict[str, object] = draw.choice(
        [
            {"chat_template_kwargs": {"note": note}},
            {"chat_template_kwargs": {"kept": note, "told": note, "namespace": note, "raise_exception": note}},
            {"chat_template_kwargs": {"messages": note}},
            {"documents": [{"text": note}]},
        ]
    )
    return _prompt_logprobs(_refused(asked, "template", **field), draw)


def _tools(asked: Asked, draw: Draw) -> Asked:
    mark = canary(asked.number, "tool")
    schema = {"type": "object", "properties": {mark: {"const": 1}}, "required": [mark]}
    tool = {"type": "function", "function": {"name": mark, "description": mark, "parameters": schema}}
    choice = draw.choice(["auto", "required", {"type": "function", "function": {"name": mark}}])
    changed = _refused(asked, "tools", tools=[tool], tool_choice=choice, max_tokens=96, min_tokens=0)
    return changed if choice == "auto" else replace(changed, says=mark)


def _refused_tool(asked: Asked, draw: Draw) -> Asked:
    mark = canary(asked.number, "tool")
    tool = {"type": "function", "function": {"name": f"{mark}!", "parameters": {}}}
    message = {"role": mark, "content": "a"}
    call = {"id": "1", "type": "function", "function": {"name": "a", "arguments": f"{{{mark}"}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    field: dict[str, object] = draw.choice(
        [{"tools": [tool]}, {"messages": [message]}, {"messages": [turn]}, {"tool_choice": mark}]
    )
    return _refused(asked, "refused tool", **field)


def _echo(asked: Asked, draw: Draw) -> Asked:
    return replace(_with(asked, "prompt in the text", echo=True), says=canary(asked.number, "prompt"))


def _several(asked: Asked, draw: Draw) -> Asked:
    prompts = [f"{asked.body['prompt']} {number}" for number in range(draw.randint(2, 3))]
    return _refused(asked, "several prompts", prompt=prompts)


_BOTH: list[Change] = [
    *(_plain, _stop, _choices, _prompt_logprobs, _one_token, _guide),
    *(_bad_value, _bad_value, _wrong_key, _wrong_path, _leave),
]
_CHAT: list[Change] = [_template, _template, _tools, _refused_tool]
_COMPLETIONS: list[Change] = [_echo, _several]
