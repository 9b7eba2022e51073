"""Chat templates: what transformers renders, in a sandbox."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from frontend.descriptions import EMBEDDED, changed
from frontend.endpoints import endpoint
from frontend.fake_triton import FakeTriton
from transformers import AutoTokenizer
from triton_llama_openai.errors import ApiError
from triton_llama_openai.prompt.chat_template import ChatTemplate, Turn
from triton_llama_openai.prompt.tokenizer import PromptTokenizer
from triton_llama_openai.served.served_model import tool_form
from triton_llama_openai.triton.description import Description

MESSAGES = [{"role": "system", "content": "Be <b>."}, {"role": "user", "content": "Köln?"}]
FUNCTIONS = [{"type": "function", "function": {"name": "add", "description": "a < b"}}]
TURNS: list[Turn] = [dict(message) for message in MESSAGES]
TOOLS: list[Turn] = [dict(function) for function in FUNCTIONS]
TEMPLATES = {
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "tojson": "{{ tools | tojson }}{{ messages | tojson(indent=2) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}",
    "blocks are trimmed": "{% for m in messages %}\n  {{ m.role }}\n  {% endfor %}\n{{ eos_token }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "special tokens": "{{ bos_token }}{% if add_generation_prompt %}go{% endif %}",
}


def _tokenizer(**fields: object) -> PromptTokenizer:
    """Return the embedded checkpoint's, described with other fields."""
    return PromptTokenizer.of(Description.model_validate(changed(**fields)), None)


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_is_rendered_as_transformers_does(source: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    expected = tokenizer.apply_chat_template(
        MESSAGES, tools=[*FUNCTIONS], chat_template=source, tokenize=False, add_generation_prompt=True
    )
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    assert template.render(TURNS, TOOLS) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
)
def test_a_template_reaches_nothing_outside_its_sandbox(source: str) -> None:
    template = ChatTemplate(source, {})
    try:
        shown = template.render(TURNS)
    except ApiError as error:
        shown = error.param or "no parameter"
    assert shown == "messages" or not ("object at" in shown or "class" in shown)


def test_a_template_that_never_ends_its_calls_is_refused() -> None:
    with pytest.raises(ApiError, match="the chat template says") as refused:
        ChatTemplate("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", {}).render(TURNS)
    assert refused.value.param == "messages"


def test_a_template_reads_the_clock() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render(TURNS) == str(datetime.now().astimezone().year)


def test_the_form_of_calls_is_that_of_the_template_for_tools() -> None:
    templates = {"default": "{{ tools }}", "tool_use": "{{ tools }}<tool_call>"}
    assert tool_form(_tokenizer(chat_templates=templates)) == "hermes"


@pytest.mark.parametrize(("tools", "prompt"), [(None, "plain"), (FUNCTIONS, "with add")])
def test_a_chat_with_tools_takes_the_template_for_tools(
    triton: FakeTriton, tools: list[object] | None, prompt: str
) -> None:
    templates = {"default": "plain", "tool_use": "with {{ tools[0].function.name }}"}
    triton.models["named"] = changed(chat_templates=templates)
    with endpoint(triton.port, model="named") as served:
        served.chat(tools=tools)
        assert triton.last.value("text_input") == prompt
        tokens = served.http.post("/tokenize", json={"messages": MESSAGES, "tools": tools}).json()["tokens"]
        assert served.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == prompt


def test_the_operators_template_replaces_all_of_the_checkpoint(triton: FakeTriton, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("operator")
    triton.models["named"] = changed(chat_templates={"default": "plain", "tool_use": "with {{ tools }}"})
    with endpoint(triton.port, model="named", chat_template=tmp_path / "t.jinja") as served:
        served.chat(tools=FUNCTIONS, tool_choice="none")
    assert triton.last.value("text_input") == "operator"


def test_a_special_token_that_the_checkpoint_lacks_is_empty() -> None:
    tokenizer = _tokenizer(special_tokens={"eos_token": "</s>"}, chat_templates={"default": "{{ bos_token + 'a' }}"})
    template = tokenizer.template()
    assert template is not None
    assert template.render(TURNS) == "a"
