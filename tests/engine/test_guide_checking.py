"""Guides are checked before they are followed: what is refused, and with which bounds; the process that does it."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from engine.guided_texts import END, ENDLESS, FUNCTION_CALL, tag
from llama_engine.errors import GenerationError, InvalidRequest
from llama_engine.guides import checker as guide_checker
from llama_engine.guides import compiler as guide_compiler
from llama_engine.guides.checker import GuideChecker
from llama_engine.guides.compiler import Guides
from llama_engine.text.tokenizer import Tokenizer

_numbers = count(1)


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer) -> Iterator[Guides]:
    """The embedded checkpoint's, for tests that may find it used, and its process ended."""
    guides = Guides(tokenizer, [END])
    yield guides
    guides.close()


def process_of(guides: Guides) -> int:
    """Check a guide that no test has used; return the id of the process that did."""
    guides.start("regex", f"a{{{next(_numbers)}}}").result()
    assert guides._checker is not None
    assert guides._checker._pool is not None
    return guides._checker._pool.submit(os.getpid).result()


def nested_tags(levels: int) -> object:
    form: object = {"type": "any_text"}
    for _ in range(levels):
        form = {"type": "tag", "begin": "[", "content": form, "end": "]"}
    return form


def chain(rules: int) -> str:
    return "\n".join(f"r{i} ::= r{i + 1}" for i in range(rules)) + f'\nr{rules} ::= "a"\nroot ::= r0'


REFUSED = {
    "no character": ("regex", r"[^\s\S]", r"allows no text|is refused: .*[Uu]nsatisfiable"),
    "look-around": ("regex", "(?=a)b", "look-around"),
    "no JSON": ("json_schema", '{"type": "strin', "is not JSON"),
    "no tag": ("structural_tag", "{}", "no structural tag"),
    "no format": ("structural_tag", tag({"type": "qwen"}), "'qwen', which is not supported"),
    "other trigger": ("structural_tag", json.dumps({**FUNCTION_CALL, "triggers": ["<tool"]}), "none of the triggers"),
    "a backslash": ("regex", "a\\", "has a regular expression that ends in a backslash"),
    "a grammar that closes its braces": (
        "structural_tag", tag({"type": "grammar", "grammar": 'start: "a"\n} "b"\nr: %lark {\nstart: "c"'}),
        "has a malformed grammar",
    ),
    "a trigger that is a number": (
        "structural_tag", json.dumps({**FUNCTION_CALL, "triggers": ["<", 1]}),
        r"has triggers \['<', 1\]; they must be strings",
    ),
    "nested tags": ("structural_tag", tag(nested_tags(400)), "is nested too deeply$"),
    "surrogate": ("structural_tag", tag({"type": "const_string", "value": "\ud800"}), "has a lone surrogate"),
    "nested groups": ("regex", "(" * 30_000 + "a" + ")" * 30_000, "nested parentheses"),
}  # fmt: skip

TOO_MUCH = "(takes more than .* to compile; simplify it|is nested too deeply)"
HOSTILE = {
    "an exponential automaton": ("json_schema", ENDLESS, TOO_MUCH),
    "nested schemas": ("json_schema", '{"items":' * 10_000 + "true" + "}" * 10_000, "nested too deeply"),
    "a chain of rules that overflows the stack": ("ebnf_grammar", chain(4000), TOO_MUCH),
}


@pytest.mark.parametrize(("kind", "guide", "message"), REFUSED.values(), ids=REFUSED)
def test_a_malformed_guide_is_refused_with_its_reason(shared: Guides, kind: str, guide: str, message: str) -> None:
    process = process_of(shared)
    # A refused guide stays refused.
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"^guided_decoding_guide ") as refusal:
            shared.start(kind, guide).result()
        assert re.search(message, str(refusal.value))
        assert "\n" not in str(refusal.value)
    assert process_of(shared) == process


@pytest.mark.parametrize(("kind", "guide", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_guide_is_refused_alone(
    shared: Guides, monkeypatch: pytest.MonkeyPatch, kind: str, guide: str, message: str
) -> None:
    monkeypatch.setattr(guide_checker, "COMPILE_SECONDS", 1.0)
    with pytest.raises(InvalidRequest, match=rf"^guided_decoding_guide .*{message}"):
        shared.start(kind, guide).result()
    assert process_of(shared)


def test_without_llguidance_the_message_says_what_to_install(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("matcher", "translation"):
        monkeypatch.delitem(sys.modules, f"llama_engine.guides.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidRequest, match=r"guided_decoding_guide needs the package llguidance.*: pip install"):
        Guides(tokenizer, [END]).start("regex", "a").result()


def test_a_process_that_cannot_start_is_the_servers_fault(own_guides: Guides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guide_checker, "_initialize", os.abort)
    with pytest.raises(GenerationError, match="unavailable"):
        own_guides.start("regex", "a").result()
    monkeypatch.undo()
    assert process_of(own_guides)


def test_a_killed_process_is_replaced(own_guides: Guides) -> None:
    process = process_of(own_guides)
    os.kill(process, signal.SIGKILL)
    assert process_of(own_guides) != process


STARTER = """
import sys
from llama_engine.guides.checker import GuideChecker
checker = GuideChecker([b"a", b"b", b"</s>"], [2], [2])
checker.check("regex", "a")
print("started", flush=True)
sys.stdin.read()
"""


def test_the_checking_process_ends_with_a_killed_model() -> None:
    folder = str(Path(guide_compiler.__file__).parents[2])
    command = [sys.executable, "-c", STARTER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": folder}
    ) as model:
        assert model.stdout is not None
        assert model.stdout.readline() == b"started\n"
        model.kill()
        # Its output ends when the other process, which has inherited it, ends.
        model.communicate(timeout=60)


def test_a_guide_is_checked_once(own_guides: Guides, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    check = GuideChecker.check

    def recorded(checker: GuideChecker, kind: str, text: str) -> str:
        checked.append(text)
        return check(checker, kind, text)

    monkeypatch.setattr(GuideChecker, "check", recorded)
    monkeypatch.setattr(guide_compiler, "MAX_CACHED_GUIDES", 2)
    # The second is refused.
    for text in ("a", "a", "(", "a", "(", "c", "c", "a"):
        own_guides.start("regex", text).exception()
    # The oldest leaves first.
    assert checked == ["a", "(", "c", "a"]
