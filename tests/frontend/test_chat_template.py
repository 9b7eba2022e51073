"""Chat templates: what transformers renders, in a sandbox."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from frontend.endpoints import EMBEDDED
from transformers import AutoTokenizer
from triton_llama_openai.errors import ApiError
from triton_llama_openai.prompt.chat_template import ChatTemplate, Turn
from triton_llama_openai.prompt.tokenizer import load_checkpoint
from triton_llama_openai.routes.models import tool_form
from triton_llama_openai.settings import InvalidSettingsError

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
# Conversations (a letter a message: its role, and its content) and the embedded checkpoint's prompts.
CONVERSATIONS = {
    "u": "<s>[INST] u [/INST]",
    "su": "<s>[INST] <<SYS>>\ns\n<</SYS>>\n\nu [/INST]",
    "suau": "<s>[INST] <<SYS>>\ns\n<</SYS>>\n\nu [/INST] a </s><s>[INST] u [/INST]",
    "uu": "<s>[INST] u\n\nu [/INST]",
    "uauu": "<s>[INST] u [/INST] a </s><s>[INST] u\n\nu [/INST]",
    "s": "<s>[INST] <<SYS>>\ns\n<</SYS>> [/INST]",
    "ssu": "<s>[INST] <<SYS>>\ns\n<</SYS>>\n\n<<SYS>>\ns\n<</SYS>>\n\nu [/INST]",
    "uasu": "<s>[INST] u [/INST] a </s><s>[INST] <<SYS>>\ns\n<</SYS>>\n\nu [/INST]",
    "usua": "<s>[INST] u\n\n<<SYS>>\ns\n<</SYS>>\n\nu [/INST] a </s>",
    "usa": "<s>[INST] u\n\n<<SYS>>\ns\n<</SYS>> [/INST] a </s>",
    "au": "<s> a </s><s>[INST] u [/INST]",
    "uaau": "<s>[INST] u [/INST] a </s><s> a </s><s>[INST] u [/INST]",
}
ROLES = {"s": "system", "u": "user", "a": "assistant"}


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_is_rendered_as_transformers_does(source: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    expected = tokenizer.apply_chat_template(
        MESSAGES, tools=[*FUNCTIONS], chat_template=source, tokenize=False, add_generation_prompt=True
    )
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    assert template.render(TURNS, TOOLS) == expected


@pytest.mark.parametrize(("letters", "prompt"), CONVERSATIONS.items(), ids=CONVERSATIONS)
def test_the_embedded_template_renders_any_order_of_roles(letters: str, prompt: str) -> None:
    messages = [{"role": ROLES[letter], "content": letter} for letter in letters]
    template = load_checkpoint(str(EMBEDDED), None, None).template
    assert template is not None
    assert template.render([dict(message) for message in messages]) == prompt
    assert AutoTokenizer.from_pretrained(EMBEDDED).apply_chat_template(messages, tokenize=False) == prompt


def test_the_embedded_template_trims_a_block_as_a_whole() -> None:
    template = load_checkpoint(str(EMBEDDED), None, None).template
    assert template is not None
    turns: list[Turn] = [{"role": "system", "content": ""}, {"role": "user", "content": "\n u "}]
    assert template.render(turns) == "<s>[INST] u [/INST]"
    turns[0]["content"] = " s "
    assert template.render(turns) == "<s>[INST] <<SYS>>\n s \n<</SYS>>\n\n\n u [/INST]"


@pytest.mark.parametrize("turns", [["tool"], ["user", "tool"], ["robot", "assistant"]])
def test_the_embedded_template_refuses_other_roles(turns: list[str]) -> None:
    template = load_checkpoint(str(EMBEDDED), None, None).template
    assert template is not None
    with pytest.raises(ApiError, match=r"Only system, user and assistant roles are supported, not (tool|robot)"):
        template.render([{"role": role, "content": "x"} for role in turns])


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


def test_the_form_of_calls_is_read_off_the_template(tmp_path: Path) -> None:
    def form(source: str) -> tuple[bool, str]:
        file = tmp_path / "t.jinja"
        file.write_text(source)
        checkpoint = load_checkpoint(str(EMBEDDED), file, None)
        assert checkpoint.template is not None
        return checkpoint.template.takes_tools, tool_form(checkpoint)

    assert form("{{ messages }}") == (False, "hermes")
    assert form("{{ tools }}<tool_call>") == (True, "hermes")
    assert form('{{ tools }}{"name": function name, "parameters": ...}') == (True, "llama3_json")


def test_the_template_is_found_where_checkpoints_have_it(tmp_path: Path) -> None:
    def rendered(config: dict[str, object]) -> str | None:
        (tmp_path / "tokenizer.json").write_bytes((EMBEDDED / "tokenizer.json").read_bytes())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 99, **config}))
        checkpoint = load_checkpoint(str(tmp_path), None, None)
        assert checkpoint.context == 99
        return None if checkpoint.template is None else checkpoint.template.render(TURNS)

    assert rendered({}) is None
    assert rendered({"chat_template": "a{{ bos_token }}", "bos_token": {"content": "<x>"}}) == "a<x>"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert rendered({"chat_template": named}) == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert rendered({"chat_template": "config"}) == "file"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A hub id of which the cache has two commits, main and the tag v1, without a template of their own; no network."""
    repository = tmp_path / "models--org--name"
    for name, length in (("main", 99), ("v1", 77)):
        commit = f"{length:040}"
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / name).write_text(commit)
        folder = repository / "snapshots" / commit
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").write_bytes((EMBEDDED / "tokenizer.json").read_bytes())
        (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": length, "chat_template": name}))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    # As a process takes it from HF_HUB_OFFLINE=1.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return "org/name"


@pytest.mark.parametrize(("revision", "template", "context"), [(None, "main", 99), ("v1", "v1", 77)])
def test_a_hub_id_is_loaded_from_the_cache_at_its_revision_without_the_hub(
    cached: str, revision: str | None, template: str, context: int
) -> None:
    checkpoint = load_checkpoint(cached, None, None, revision)
    assert checkpoint.template is not None
    assert (checkpoint.name, checkpoint.template.source, checkpoint.context) == (cached, template, context)


def test_a_hub_id_that_the_cache_lacks_is_refused_without_the_hub(cached: str) -> None:
    with pytest.raises(InvalidSettingsError, match="tokenizer 'org/other': no folder, and not on the hub"):
        load_checkpoint("org/other", None, None)
    with pytest.raises(InvalidSettingsError, match="tokenizer 'org/name at v2': no folder, and not on the hub"):
        load_checkpoint(cached, None, None, "v2")


def test_the_context_is_the_checkpoints_unless_it_is_set(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((EMBEDDED / "tokenizer.json").read_bytes())
    with pytest.raises(InvalidSettingsError, match="set max_model_len"):
        load_checkpoint(str(tmp_path), None, None)
    assert load_checkpoint(str(tmp_path), None, 77).context == 77
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 131072}')
    assert load_checkpoint(str(tmp_path), None, None).context == 131072


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json can't be loaded"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        ("config.json", "[]", "config.json has no JSON object"),
    ],
)
def test_a_damaged_file_of_a_checkpoint_is_refused_by_name(
    name: str, content: str, message: str, tmp_path: Path
) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((EMBEDDED / file).read_bytes())
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidSettingsError, match=message):
        load_checkpoint(str(tmp_path), None, None)


def test_a_gguf_files_tokenizer_is_read_beside_it(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((EMBEDDED / name).read_bytes())
    (tmp_path / "it.Q8_0.gguf").touch()
    assert load_checkpoint(str(tmp_path / "it.Q8_0.gguf"), None, None).name == "it.Q8_0"


def test_a_gguf_file_without_a_tokenizer_beside_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "it.gguf").touch()
    with pytest.raises(InvalidSettingsError, match=r"is a GGUF file without tokenizer\.json beside it; put "):
        load_checkpoint(str(tmp_path / "it.gguf"), None, None)
