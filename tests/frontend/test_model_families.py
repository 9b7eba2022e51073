"""Chats with each family's template: the prompt, what the template refuses, tools and their calls."""

from __future__ import annotations

from pathlib import Path

import pytest
from frontend.endpoints import Endpoint, Json, Serve, check_refusal
from frontend.fake_triton import FakeTriton
from transformers import AutoTokenizer

SYSTEM, USER = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}
CHAT = [SYSTEM, USER, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Add."}]
PARAMETERS: Json = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD: Json = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}

FAMILIES = [
    *("llama-2", "llama-3.1", "mistral", "ministral", "qwen2.5", "qwen3", "smollm3", "phi-3", "phi-4-mini"),
    *("granite-3.3", "olmo-2", "seed-oss", "gemma-3", "deepseek-r1-distill-llama"),
]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_prompt_is_the_one_that_transformers_renders(
    serve: Serve, triton: FakeTriton, tmp_path: Path, name: str
) -> None:
    response = serve(name).chat(messages=CHAT)
    assert response.status_code == 200, response.text
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
    expected = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert triton.last.value("text_input") == expected


def test_a_system_message_that_the_template_refuses_is_a_bad_request(serve: Serve, triton: FakeTriton) -> None:
    gemma = serve("gemma-2")
    check_refusal(gemma.chat(messages=CHAT), "messages", "System role not supported")
    assert gemma.chat(messages=CHAT[1:]).status_code == 200
    assert str(triton.last.value("text_input")).startswith("<bos><start_of_turn>user\nHi<end_of_turn>\n")


@pytest.mark.parametrize("name", ["gemma-3", "gemma-2"])
def test_turns_that_do_not_alternate_are_a_bad_request(serve: Serve, name: str) -> None:
    check_refusal(serve(name).chat(messages=[USER, USER]), "messages", "roles must alternate")


@pytest.mark.parametrize(
    ("name", "field", "value", "end"),
    [
        ("qwen3", "enable_thinking", False, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("qwen3", "enable_thinking", True, "<|im_start|>assistant\n"),
        ("smollm3", "enable_thinking", False, "<|im_start|>assistant\n<think>\n\n</think>\n"),
        ("seed-oss", "thinking_budget", 0, "<seed:bos>assistant\n<seed:think><seed:cot_budget_reflect>"),
    ],
)
def test_chat_template_kwargs_switch_thinking(
    serve: Serve, triton: FakeTriton, name: str, field: str, value: object, end: str
) -> None:
    assert serve(name).chat(chat_template_kwargs={field: value}).status_code == 200
    assert str(triton.last.value("text_input")).endswith(end)


def test_granite_thinks_if_its_variable_says_so(serve: Serve, triton: FakeTriton) -> None:
    triton.tokens = ["<think>A sum.</think>\n", "<response>4</res", "ponse>"]
    message = serve("granite-3.3").chat(chat_template_kwargs={"thinking": True}).json()["choices"][0]["message"]
    assert "Write your thoughts between <think></think>" in str(triton.last.value("text_input"))
    assert (message["reasoning_content"], message["content"]) == ("A sum.", "4")


@pytest.mark.parametrize(
    ("name", "beginning"),
    [
        ("smollm3", "You are a helpful AI assistant named SmolLM, trained by Hugging Face.\n\nYou may call functions."),
        ("phi-4-mini", "<|system|>You may call functions."),
        ("gemma-3", "<bos><start_of_turn>user\nYou may call functions."),
        ("deepseek-r1-distill-llama", "<｜begin▁of▁sentence｜>You may call functions."),
    ],
)
def test_the_templates_default_system_message_stands_before_tools_as_text(
    serve: Serve, triton: FakeTriton, name: str, beginning: str
) -> None:
    endpoint = serve(name)
    assert endpoint.chat(messages=[USER], tools=[ADD]).status_code == 200
    assert beginning in str(triton.last.value("text_input"))
    assert endpoint.chat(messages=[SYSTEM, USER], tools=[ADD]).status_code == 200
    assert "Be kind.\n\nYou may call functions." in str(triton.last.value("text_input"))
    assert "helpful AI assistant" not in str(triton.last.value("text_input"))


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "pad_token", "raise_exception"])
def test_the_templates_own_variables_are_refused_by_name(served: Endpoint, name: str) -> None:
    check_refusal(served.chat(chat_template_kwargs={name: None}), "chat_template_kwargs", f"kwargs has {name};")


@pytest.mark.parametrize(
    ("name", "shown", "text"),
    [
        ("llama-3.1", "Environment: ipython", '{"name": "add", "parameters": {"a": 1}}'),
        ("mistral", "[AVAILABLE_TOOLS] [", ' [{"name": "add", "arguments": {"a": 1}}]'),
        ("ministral", "[AVAILABLE_TOOLS][", '[{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]'),
        ("qwen2.5", "\n<tools>\n{", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
        (
            "qwen3",
            "\n<tools>\n{",
            '<think>\nx\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        ),
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
    assert shown in str(triton.last.value("text_input"))
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
    assert f'"call_id": "{call_id[-9:]}"' in str(triton.last.value("text_input"))
