"""Chat templates: what transformers renders, in a sandbox."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from frontend.descriptions import changed
from frontend.endpoints import endpoint
from frontend.fake_triton import FakeTriton
from triton_llama_openai.errors import ApiError
from triton_llama_openai.output.tool_calls import tool_form
from triton_llama_openai.prompt.chat_template import ChatTemplate
from triton_llama_openai.prompt.tokenizer import PromptTokenizer
from triton_llama_openai.protocol.schema import JsonObject
from triton_llama_openai.triton.description import Description

MESSAGES = [{"role": "system", "content": "Be <b>."}, {"role": "user", "content": "Köln?"}]
FUNCTIONS = [{"type": "function", "function": {"name": "add", "description": "a < b"}}]
TURNS: list[JsonObject] = [dict(message) for message in MESSAGES]


def _tokenizer(**fields: object) -> PromptTokenizer:
    """Return the embedded checkpoint's, described with other fields."""
    return PromptTokenizer.of(Description.model_validate(changed(**fields)), None)


@pytest.mark.parametrize(
    "source", ["{{ messages.append(1) }}", "{{ cycler.__init__.__globals__.os.popen('id').read() }}"]
)
def test_a_template_reaches_nothing_outside_its_sandbox(source: str) -> None:
    template = ChatTemplate(source, {})
    try:
        shown = template.render(TURNS)
    except ApiError as error:
        shown = error.param or "no parameter"
    assert shown == "messages" or not ("object at" in shown or "class" in shown)


def test_a_template_reads_the_clock() -> None:
    source = "{% generation %}{{ strftime_now('%Y') }}{% endgeneration %}"
    assert ChatTemplate(source, {}).render(TURNS) == str(datetime.now().astimezone().year)


def test_a_template_whose_calls_never_end_is_refused() -> None:
    with pytest.raises(ApiError, match="the chat template says") as refused:
        ChatTemplate("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", {}).render(TURNS)
    assert refused.value.param == "messages"


def test_the_form_of_calls_is_that_of_the_template_for_tools() -> None:
    templates = {"default": "{{ tools }}", "tool_use": "{{ tools }}<tool_call>"}
    assert tool_form(_tokenizer(chat_templates=templates).template(with_tools=True)) == "hermes"


def test_a_chat_with_tools_takes_the_template_for_tools(triton: FakeTriton) -> None:
    templates = {"default": "plain", "tool_use": "with {{ tools[0].function.name }}"}
    triton.models["named"] = changed(chat_templates=templates)
    with endpoint(triton.port, triton_model="named") as served:
        for tools, prompt in ((None, "plain"), (FUNCTIONS, "with add")):
            served.chat(tools=tools)
            assert triton.prompt == prompt
            assert served.detokenize(served.tokenize(messages=MESSAGES, tools=tools)) == prompt


def test_the_operators_template_replaces_all_of_the_checkpoint(triton: FakeTriton, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("operator")
    triton.models["named"] = changed(chat_templates={"default": "plain", "tool_use": "with {{ tools }}"})
    with endpoint(triton.port, triton_model="named", chat_template=tmp_path / "t.jinja") as served:
        served.chat(tools=FUNCTIONS, tool_choice="none")
    assert triton.prompt == "operator"


def test_a_special_token_that_the_checkpoint_lacks_is_empty() -> None:
    tokenizer = _tokenizer(special_tokens={"eos_token": "</s>"}, chat_templates={"default": "{{ bos_token + 'a' }}"})
    template = tokenizer.template()
    assert template is not None
    assert template.render(TURNS) == "a"
