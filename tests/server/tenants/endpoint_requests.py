"""Requests to the OpenAI endpoint, each with canaries in everything that a client writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from server.tenants.asked import Asked, Draw, Fields, choices, headers, leave, one_word, plain
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


def endpoint_request(number: int, phrases: Phrases, draw: Draw) -> Asked:
    """Draw a request."""
    prompt = f"{phrases.new(number)} {canary(number, 'prompt')}"
    messages = [{"role": "user", "content": prompt, "name": canary(number, "name")}]
    given = {**headers(number), "x-request-id": canary(number, "id")}
    target = draw.choice([CHAT, CHAT, CHAT, COMPLETIONS, COMPLETIONS, TOKENIZE])
    if target == TOKENIZE:
        asks: list[Fields] = [{"prompt": prompt}, {"messages": messages}, {"messages": messages, **_note(number)}]
        body: Fields = {"model": MODEL, "return_token_strs": True, **draw.choice(asks)}
        return Asked(number, WAY, "tokenize", target, body, given)
    tokens = draw.randint(1, 8)
    body = {
        "model": MODEL,
        "max_tokens": tokens,
        "min_tokens": tokens,
        "temperature": draw.choice([0, 0, 1]),
        "seed": draw.getrandbits(63),
        "user": canary(number, "user"),
        **draw.choice([{}, {"stream": True, "stream_options": {"include_usage": True}}]),
    }
    if target == CHAT:
        asked = Asked(number, WAY, "plain", target, {**body, "messages": messages}, given, tokens=tokens)
        asked = asked.having("plain", {"metadata": {"of": canary(number, "user")}})
        return draw.choice([*_BOTH, *_CHAT])(asked, draw)
    known = len(tokenizer().encode(prompt).ids)
    asked = Asked(number, WAY, "plain", target, {**body, "prompt": prompt}, given, prompt_tokens=known, tokens=tokens)
    return draw.choice([*_BOTH, *_COMPLETIONS])(asked, draw)


def _note(number: int) -> Fields:
    return {"chat_template_kwargs": {"note": canary(number, "note")}}


def _stop(asked: Asked, draw: Draw) -> Asked:
    stop, bad = canary(asked.number, "stop"), canary(asked.number, "bad")
    fields = {"stop": [stop, "."], "bad_words": [bad, "list"], "min_tokens": 0}
    return asked.uncounted("stop and bad words", fields)


def _prompt_logprobs(asked: Asked, draw: Draw) -> Asked:
    """Show the rendered prompt, token by token."""
    body = {name: value for name, value in asked.body.items() if not name.startswith("stream")}
    more: Fields = {"logprobs": True, "top_logprobs": 2} if asked.target == CHAT else {"logprobs": 2}
    return replace(asked, body=body).having("log probabilities", {"prompt_logprobs": 1, **more})


def _one_token(asked: Asked, draw: Draw) -> Asked:
    token, word = one_word(draw)
    fields: list[Fields] = [
        {"allowed_token_ids": [token]},
        {"logit_bias": {str(token): 100}, "temperature": 0},
    ]
    return asked.having("one token", draw.choice(fields), word)


def _guide(asked: Asked, draw: Draw) -> Asked:
    mark = canary(asked.number, "guide")
    schema = {"type": "object", "properties": {mark: {"const": 1}}, "required": [mark]}
    guides: list[Fields] = [
        {"guided_regex": f"{mark}(yes|no)"},
        {"guided_choice": [f"{mark}a", f"{mark}b"]},
        {"guided_json": {"const": mark}},
        {"structured_outputs": {"json": {"const": mark}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": mark, "schema": schema}}},
    ]
    return asked.uncounted("guide", {**draw.choice(guides), "max_tokens": 48, "min_tokens": 0}, mark)


def _bad_value(asked: Asked, draw: Draw) -> Asked:
    mark = canary(asked.number, "value")
    fields: list[Fields] = [
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
    return asked.uncounted("refused value", draw.choice(fields))


def _wrong_key(asked: Asked, draw: Draw) -> Asked:
    key = canary(asked.number, "key")
    wrong = draw.choice([f"Bearer {key}", f"Basic {key}", key, f"Bearer {key} {key}"])
    return replace(asked.uncounted("wrong key", {}), headers={**asked.headers, "authorization": wrong})


def _wrong_path(asked: Asked, draw: Draw) -> Asked:
    return replace(asked.uncounted("wrong path", {}), target=f"/v1/{canary(asked.number, 'value')}")


def _template(asked: Asked, draw: Draw) -> Asked:
    """Give the template more variables, some of them the names of its own."""
    note = canary(asked.number, "note")
    fields: list[Fields] = [
        _note(asked.number),
        {"chat_template_kwargs": {"kept": note, "told": note, "namespace": note, "raise_exception": note}},
        {"chat_template_kwargs": {"messages": note}},
        {"documents": [{"text": note}]},
    ]
    return _prompt_logprobs(asked.uncounted("template", draw.choice(fields)), draw)


def _tools(asked: Asked, draw: Draw) -> Asked:
    mark = canary(asked.number, "tool")
    schema = {"type": "object", "properties": {mark: {"const": 1}}, "required": [mark]}
    tool = {"type": "function", "function": {"name": mark, "description": mark, "parameters": schema}}
    choice = draw.choice(["auto", "required", {"type": "function", "function": {"name": mark}}])
    fields = {"tools": [tool], "tool_choice": choice, "max_tokens": 96, "min_tokens": 0}
    return asked.uncounted("tools", fields, "" if choice == "auto" else mark)


def _refused_tool(asked: Asked, draw: Draw) -> Asked:
    mark = canary(asked.number, "tool")
    tool = {"type": "function", "function": {"name": f"{mark}!", "parameters": {}}}
    call = {"id": "1", "type": "function", "function": {"name": "a", "arguments": f"{{{mark}"}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    fields: list[Fields] = [
        {"tools": [tool]},
        {"messages": [{"role": mark, "content": "a"}]},
        {"messages": [turn]},
        {"tool_choice": mark},
    ]
    return asked.uncounted("refused tool", draw.choice(fields))


def _echo(asked: Asked, draw: Draw) -> Asked:
    return asked.having("prompt in the text", {"echo": True}, canary(asked.number, "prompt"))


def _several(asked: Asked, draw: Draw) -> Asked:
    prompts = [f"{asked.body['prompt']} {number}" for number in range(draw.randint(2, 3))]
    return replace(asked.uncounted("several prompts", {"prompt": prompts}), prompt_tokens=None)


Change = Callable[[Asked, Draw], Asked]
_BOTH: list[Change] = [
    *(plain, _stop, choices, _prompt_logprobs, _one_token, _guide),
    *(_bad_value, _bad_value, _wrong_key, _wrong_path, leave),
]
_CHAT: list[Change] = [_template, _template, _tools, _refused_tool]
_COMPLETIONS: list[Change] = [_echo, _several]
