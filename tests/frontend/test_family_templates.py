"""Chats with each family's template: the prompt, what the template refuses, tools and their calls."""

from __future__ import annotations

from pathlib import Path

import pytest
from frontend.endpoints import Endpoint, Json, Serve, check_refusal
from frontend.fake_triton import FakeTriton
from model_families import FAMILIES
from transformers import PreTrainedTokenizerFast

SYSTEM, USER = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}
CHAT = [SYSTEM, USER, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Add."}]
PARAMETERS: Json = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD: Json = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


@pytest.mark.parametrize("name", [family.name for family in FAMILIES if family.name != "gemma-2"])
def test_a_prompt_is_as_transformers_renders_it(serve: Serve, triton: FakeTriton, checkpoints: Path, name: str) -> None:
    response = serve(name).chat(messages=CHAT)
    assert response.status_code == 200, response.text
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoints / name)
    expected = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert triton.prompt == expected


def test_a_system_message_that_the_template_refuses_is_a_bad_request(serve: Serve, triton: FakeTriton) -> None:
    gemma = serve("gemma-2")
    check_refusal(gemma.chat(messages=CHAT), "messages", "System role not supported")
    check_refusal(
        gemma.respond(instructions="a"), "input", "input can't be rendered: the chat template says: System role"
    )
    assert gemma.chat(messages=CHAT[1:]).status_code == 200
    assert triton.prompt.startswith("<bos><start_of_turn>user\nHi<end_of_turn>\n")


def test_the_templates_default_system_message_stands_before_tools_as_text(serve: Serve, triton: FakeTriton) -> None:
    smollm3, default = serve("smollm3"), "You are a helpful AI assistant named SmolLM, trained by Hugging Face."
    assert smollm3.chat(messages=[USER], tools=[ADD]).status_code == 200
    assert f"{default}\n\nYou may call functions." in triton.prompt
    assert smollm3.chat(messages=[SYSTEM, USER], tools=[ADD]).status_code == 200
    assert "Be kind.\n\nYou may call functions." in triton.prompt
    assert "helpful AI assistant" not in triton.prompt


def test_the_templates_own_variables_are_refused_by_name(served: Endpoint) -> None:
    for name in ("messages", "pad_token", "raise_exception"):
        check_refusal(served.chat(chat_template_kwargs={name: None}), "chat_template_kwargs", f"kwargs has {name};")


@pytest.mark.parametrize(
    ("name", "shown", "text"),
    [
        ("llama-3.1", "Environment: ipython", '{"name": "add", "parameters": {"a": 1}}'),
        ("mistral", "[AVAILABLE_TOOLS] [", ' [{"name": "add", "arguments": {"a": 1}}]'),
        ("ministral", "[AVAILABLE_TOOLS][", '[{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]'),
        ("qwen2.5", "\n<tools>\n{", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
        ("granite-3.3", "<|start_of_role|>available_tools", '[{"name": "add", "arguments": {"a": 1}}]'),
        ("phi-4-mini", "<|system|>You may call functions.", '<tool_call>{"name": "add", "arguments": {"a": 1}}'),
    ],
)
def test_tools_are_in_the_prompt_and_calls_are_found(
    serve: Serve, triton: FakeTriton, name: str, shown: str, text: str
) -> None:
    # Special tokens in front of the JSON, such as [TOOL_CALLS], have no text.
    triton.tokens = [text[:9], text[9:]]
    (choice,) = serve(name).chat(messages=[USER], tools=[ADD]).json()["choices"]
    assert shown in triton.prompt
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert choice["finish_reason"] == "tool_calls"


def test_a_mistral_template_gets_ids_of_nine_characters(serve: Serve, triton: FakeTriton) -> None:
    mistral = serve("mistral")
    triton.tokens = ['[{"name": "add", "arguments": {"a": 1}}]']
    answer = mistral.chat(messages=[USER], tools=[ADD]).json()["choices"][0]["message"]
    call_id = answer["tool_calls"][0]["id"]
    result = {"role": "tool", "tool_call_id": call_id, "content": "2"}
    response = mistral.chat(messages=[USER, answer, result], tools=[ADD])
    assert response.status_code == 200, response.text
    assert f'"call_id": "{call_id[-9:]}"' in triton.prompt
