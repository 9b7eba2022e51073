"""A chat without a server: what is remembered, what the template makes of it, what is refused before the first turn."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from engine.small_tokenizers import llama2_like
from triton_llama import RejectedInputError
from triton_llama.chat_template import ChatTemplate, Message
from triton_llama.conversation import Conversation

EMBEDDED = Path(__file__).resolve().parents[2] / "models" / "pydoc-llama"
OFFLINE = {"HF_HUB_OFFLINE": "1"}
MAIN = "from triton_llama.cli import main; main()"


class Words:
    """A template whose tokens are words: `role:word word ...`."""

    def render(self, messages: Sequence[Message]) -> str:
        return " | ".join(f"{message['role']}: {message['content']}" for message in messages)

    def count(self, prompt: str) -> int:
        return len(prompt.split())


def chat(*arguments: str, code: str = MAIN, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, "chat", *arguments],
        input=stdin,
        capture_output=True,
        timeout=120,
        check=False,
        env={**os.environ, **OFFLINE},
    )


def test_a_conversation_remembers_what_was_said_in_order() -> None:
    conversation = Conversation(Words(), "S", context=100, max_tokens=10)
    assert conversation.prompt("q1") == "system: S | user: q1"
    conversation.add("q1", "a1")
    assert conversation.prompt("q2") == "system: S | user: q1 | assistant: a1 | user: q2"
    conversation.reset()
    assert conversation.prompt("q3") == "system: S | user: q3"


def test_a_message_that_was_never_answered_is_not_remembered() -> None:
    conversation = Conversation(Words(), None, context=100, max_tokens=10)
    conversation.prompt("q1")
    assert conversation.prompt("q2") == "user: q2"


def test_the_oldest_exchanges_go_first_and_the_system_message_stays() -> None:
    conversation = Conversation(Words(), "S", context=17, max_tokens=3)
    for number in (1, 2):
        conversation.prompt(f"q{number}")
        conversation.add(f"q{number}", f"a{number}")
    assert conversation.prompt("q3") == "system: S | user: q2 | assistant: a2 | user: q3"
    assert len(conversation) == 1
    assert conversation.prompt("q3 and much more than that") == "system: S | user: q3 and much more than that"
    assert len(conversation) == 0


def test_the_last_prompt_that_fits_and_the_first_that_does_not() -> None:
    conversation = Conversation(Words(), None, context=8, max_tokens=5)
    conversation.add("q", "a")
    with pytest.raises(
        RejectedInputError, match=r"a prompt of 4 tokens and max_tokens is 5, .* at most the context of 8"
    ):
        conversation.prompt("one two three")
    assert len(conversation) == 1
    assert conversation.prompt("one two") == "user: one two"


def test_the_embedded_checkpoint_has_a_template_and_a_context() -> None:
    template = ChatTemplate.load(str(EMBEDDED))
    prompt = template.render([{"role": "system", "content": "S"}, {"role": "user", "content": "q"}])
    assert prompt == "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nq [/INST]"
    assert template.default_context() == 512


def test_a_prompt_is_counted_with_the_bos_that_the_server_adds() -> None:
    template = ChatTemplate(llama2_like(), "nowhere", "{{ messages[0].content }}")
    prompt = template.render([{"role": "user", "content": "abc"}])
    assert prompt == "abc"
    assert template.count(prompt) == len(llama2_like()(prompt)["input_ids"]) + 1


def test_a_template_file_goes_over_the_tokenizers_own(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}é\n{% endfor %}", encoding="utf-8")
    template = ChatTemplate.load(str(EMBEDDED), file)
    assert template.render([{"role": "user", "content": "q"}]) == "user: qé\n"


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no system\nhere') }}", "{% if %}", "{{ messages[0].content.nope.nope }}"]
)
def test_a_template_that_refuses_or_is_broken_is_one_line(template: str) -> None:
    chat_template = ChatTemplate(llama2_like(), "nowhere", template)
    with pytest.raises(RejectedInputError, match="the chat template refuses the conversation: ") as error:
        chat_template.render([{"role": "user", "content": "q"}])
    assert "\n" not in str(error.value)


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    template = ChatTemplate(llama2_like(), "nowhere", "{{ messages.__class__.__mro__ }}")
    with pytest.raises(RejectedInputError, match="unsafe"):
        template.render([{"role": "user", "content": "q"}])


@pytest.fixture
def without_template(tmp_path: Path) -> Path:
    llama2_like().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("missing", ["transformers", "jinja2"])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(missing: str) -> None:
    result = chat("--tokenizer", str(EMBEDDED), code=f"import sys; sys.modules[{missing!r}] = None; {MAIN}")
    lines = result.stderr.decode().splitlines()
    assert (result.returncode, len(lines)) == (2, 1)
    assert f"chat needs the package {missing}: pip install 'triton-llama[chat]'" in lines[0]


def test_a_tokenizer_without_a_template_is_refused_and_a_template_helps(without_template: Path) -> None:
    result = chat("--tokenizer", str(without_template))
    lines = result.stderr.decode().splitlines()
    assert (result.returncode, len(lines)) == (2, 1)
    assert "has no chat template; --chat-template FILE gives it one" in lines[0]
    template = without_template / "template.jinja"
    template.write_text("{{ messages[-1].content }}")
    # As far as the server, which isn't there.
    given = ["--tokenizer", str(without_template), "--chat-template", str(template), "--url", "127.0.0.1:1"]
    assert chat(*given).returncode == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing option '--tokenizer'"),
        (("--tokenizer", str(Path(__file__).parent)), "/unit' can't be loaded"),
        (("--tokenizer", "no/such"), "tokenizer 'no/such' can't be loaded"),
        (("--tokenizer", str(EMBEDDED), "--max-tokens", "512"), "--max-tokens is 512, must be less than the context"),
        (
            ("--tokenizer", str(EMBEDDED), "--context", "100"),
            "--max-tokens is 128, must be less than the context of 100",
        ),
        (("--tokenizer", str(EMBEDDED), "--context", "1"), "--context"),
        (("--tokenizer", str(EMBEDDED), "--chat-template", "no-such-file"), "no-such-file"),
        (("--tokenizer", str(EMBEDDED), "--include-prompt"), "No such option"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = chat(*arguments)
    lines = result.stderr.decode().splitlines()
    assert (result.returncode, len(lines), result.stdout) == (2, 1, b"")
    assert message in lines[0]
