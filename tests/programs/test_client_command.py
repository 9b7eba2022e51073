"""The command line as a process: no server, Ctrl-C, stdin, and the tokenizer of a chat."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine.small_tokenizers import llama2_like
from triton_llama import RejectedInputError
from triton_llama.tokenizer import ChatTemplate

EMBEDDED = Path(__file__).resolve().parents[2] / "models" / "pydoc-llama"
MAIN = "from triton_llama.cli import main; main()"


def command(*arguments: str, code: str = MAIN) -> list[str]:
    return [sys.executable, "-W", "error", "-c", code, *arguments]


def run(*arguments: str, code: str = MAIN, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        command(*arguments, code=code), input=stdin, capture_output=True, timeout=120, check=False, env=environment
    )


def assert_refused(result: subprocess.CompletedProcess[bytes], code: int, message: str) -> None:
    lines = result.stderr.decode().splitlines()
    assert (result.returncode, len(lines), result.stdout) == (code, 1, b"")
    assert message in lines[0]


@pytest.fixture
def dead_url() -> Iterator[str]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.parametrize(
    ("protocol", "arguments"),
    [
        ("http", ("generate", "a")),
        ("grpc", ("generate", "a", "--stream")),
        ("http", ("generate", "--prompts-file", "-")),
        ("grpc", ("status",)),
    ],
)
def test_without_a_server_a_command_is_one_line_and_exit_code_3(
    protocol: str, arguments: tuple[str, ...], dead_url: str
) -> None:
    result = run(*arguments, "--url", dead_url, "--protocol", protocol, stdin=b"a")
    lines = result.stderr.decode().splitlines()
    assert (result.returncode, len(lines)) == (3, 1)
    assert f"no connection to {protocol}://{dead_url}" in lines[0]


def test_debug_shows_the_traceback(dead_url: str) -> None:
    assert b"Traceback" in run("--debug", "status", "--url", dead_url).stderr


def test_stdin_that_is_not_utf_8_is_refused_with_its_byte() -> None:
    assert_refused(run("generate", stdin=b"ab\xff"), 2, "stdin is not UTF-8 at byte 2")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    "arguments", [("generate", "a"), ("generate", "a", "--stream"), ("generate", "--prompts-file", "FILE")]
)
def test_ctrl_c_ends_a_waiting_command_without_a_traceback(
    arguments: tuple[str, ...], protocol: str, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a\nb\n")
    given = [str(file) if word == "FILE" else word for word in arguments]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"127.0.0.1:{listener.getsockname()[1]}"
        process = subprocess.Popen(
            command(*given, "--url", url, "--protocol", protocol, "--connect-timeout", "50"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A shell's background job would hand down an ignored SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        connection, _ = listener.accept()
        with connection:
            connection.recv(1)
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout, stderr.strip()) == (130, b"", b"")


def test_importing_the_package_imports_no_client_library() -> None:
    program = "import sys, triton_llama; print({'tritonclient', 'httpx', 'grpc'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", program], encoding="utf-8").strip() == "set()"


@pytest.mark.parametrize("missing", ["transformers", "jinja2"])
def test_a_chat_without_a_package_names_the_extra_that_has_it(missing: str) -> None:
    result = run("chat", "--tokenizer", str(EMBEDDED), code=f"import sys; sys.modules[{missing!r}] = None; {MAIN}")
    assert_refused(result, 2, f"chat needs the package {missing}: pip install '.[chat]' in the checkout")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokenizer", "no/such"), "tokenizer 'no/such' can't be loaded"),
        (("--tokenizer", str(EMBEDDED), "--max-tokens", "512"), "--max-tokens is 512, must be less than the context"),
    ],
)
def test_a_chat_that_cannot_start_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    assert_refused(run("chat", *arguments), 2, message)


def test_a_tokenizer_without_a_template_is_refused_unless_one_is_given(tmp_path: Path) -> None:
    llama2_like().save_pretrained(tmp_path)
    chat = ("chat", "--tokenizer", str(tmp_path))
    assert_refused(run(*chat), 2, "has no chat template; --chat-template FILE gives it one")
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[-1].content }}")
    # With it, the chat gets as far as the missing server.
    assert run(*chat, "--chat-template", str(template), "--url", "127.0.0.1:1").returncode == 3


def test_the_embedded_checkpoint_has_a_template_and_a_context(tmp_path: Path) -> None:
    template = ChatTemplate.load(str(EMBEDDED))
    prompt = template.render([{"role": "system", "content": "S"}, {"role": "user", "content": "q"}])
    assert prompt == "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nq [/INST]"
    assert template.default_context() == 512
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}é\n{% endfor %}", encoding="utf-8")
    assert ChatTemplate.load(str(EMBEDDED), file).render([{"role": "user", "content": "q"}]) == "user: qé\n"


def test_a_prompts_tokens_include_the_bos_that_the_server_adds() -> None:
    template = ChatTemplate(llama2_like(), "nowhere", "{{ messages[0].content }}")
    assert template.count("abc") == len(llama2_like()("abc")["input_ids"]) + 1


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system\nhere') }}", "no system"),
        ("{% if %}", "the chat template refuses the conversation: "),
        ("{{ messages[0].content.nope.nope }}", "the chat template refuses the conversation: "),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_that_refuses_or_is_broken_or_unsafe_is_one_line(template: str, message: str) -> None:
    with pytest.raises(RejectedInputError, match=message) as error:
        ChatTemplate(llama2_like(), "nowhere", template).render([{"role": "user", "content": "q"}])
    assert "\n" not in str(error.value)
