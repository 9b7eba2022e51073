"""Guides are checked before they are followed: what is refused, and with which bounds; the process that does it."""

import json
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from engine.guided_texts import END, ENDLESS, allowed_tokens, conforms
from llama_engine.errors import GenerationError, InvalidRequest, Unavailable
from llama_engine.sampling import guide_matcher, guide_worker, guided
from llama_engine.sampling.guide_worker import CheckedGuide, GuideWorker
from llama_engine.sampling.guided import Guides
from llama_engine.text.tokenizer import Tokenizer

FUNCTION_CALL = {
    "type": "structural_tag",
    "structures": [{"begin": "<function=f>", "schema": {"type": "object"}, "end": "</function>"}],
    "triggers": ["<function="],
}
NUMBER_AS_TAG = {"triggers": [1], "structures": [{"begin": "1", "schema": {}, "end": ""}]}
NO_TEXT = r"allows no text|is refused: .*[Uu]nsatisfiable"
BACKSLASH = "has a regular expression that ends in a backslash"
TOO_DEEP = "is nested too deeply$"

_numbers = count(1)


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer) -> Iterator[Guides]:
    """The embedded checkpoint's, for tests that may find it used, and its process ended."""
    guides = Guides(tokenizer, [END])
    yield guides
    guides.close()


def new_guide() -> str:
    """A regular expression that no test has used."""
    return f"a{{{next(_numbers)}}}"


def process_of(guides: Guides) -> subprocess.Popen[bytes]:
    """Check a guide; return the process that did."""
    guides.start("regex", new_guide())
    assert guides._worker is not None
    assert guides._worker._process is not None
    return guides._worker._process


def tag_of(form: object) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


def nested_tags(levels: int) -> object:
    form: object = {"type": "any_text"}
    for _ in range(levels):
        form = {"type": "tag", "begin": "[", "content": form, "end": "]"}
    return form


def rules(number: int, body: str) -> str:
    return "\n".join(f"r{i} ::= {body.format(i + 1)}" for i in range(number)) + f'\nr{number} ::= "a"\nroot ::= r0'


REFUSED = {
    "no character": ("regex", r"[^\s\S]", NO_TEXT),
    "no value": ("json_schema", "false", NO_TEXT),
    "no length": ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 3}', NO_TEXT),
    "itself": ("json_schema", '{"$ref": "#"}', NO_TEXT),
    "endless rule": ("ebnf_grammar", "root ::= root", NO_TEXT),
    "group": ("regex", "(((", "unclosed group"),
    "look-around": ("regex", "(?=a)b", "look-around"),
    "no JSON": ("json_schema", '{"type": "strin', "is not JSON"),
    "no type": ("json_schema", '{"type": "nosuch"}', "nosuch"),
    "not": ("json_schema", '{"not": {"type": "string"}}', '"not"'),
    "reference": ("json_schema", '{"$ref": "http://example.com/schema.json"}', "example.com"),
    "no rule": ("ebnf_grammar", "root ::= foo", "'foo' not found"),
    "no tag": ("structural_tag", "{}", "no structural tag"),
    "no format": ("structural_tag", tag_of({"type": "qwen"}), "'qwen', which is not supported"),
    "other trigger": ("structural_tag", json.dumps({**FUNCTION_CALL, "triggers": ["<tool"]}), "none of the triggers"),
    "a backslash": ("regex", "a\\", BACKSLASH),
    "three backslashes": ("regex", "a\\\\\\", BACKSLASH),
    "a tag's backslash": ("structural_tag", tag_of({"type": "regex", "pattern": "\\"}), "ends in a backslash"),
    "a trigger that is a number": (
        "structural_tag", json.dumps({**FUNCTION_CALL, "triggers": ["<", 1]}),
        r"has triggers \['<', 1\]; they must be strings",
    ),
    "a number that begins a tag": (
        "structural_tag", json.dumps({**FUNCTION_CALL, **NUMBER_AS_TAG}), r"has triggers \[1\]; they must be strings"
    ),
    "nested tags": ("structural_tag", tag_of(nested_tags(400)), TOO_DEEP),
    "special tokens": ("structural_tag", tag_of({"type": "const_string", "value": "<s>" * 2000}), TOO_DEEP),
    "surrogate": ("structural_tag", tag_of({"type": "const_string", "value": "\ud800"}), "has a lone surrogate"),
    "of a pattern": ("structural_tag", tag_of({"type": "regex", "pattern": "\ud800"}), "has a lone surrogate"),
    "nested groups": ("regex", "(" * 30_000 + "a" + ")" * 30_000, "nested parentheses"),
}  # fmt: skip

HOSTILE = {
    "nested schemas": ("json_schema", '{"items":' * 10_000 + "true" + "}" * 10_000, "nested too deeply"),
    "a chain of rules that overflows the stack": ("ebnf_grammar", rules(4000, "r{0}"), "nested too deeply"),
    "rules that double 60 times": ("ebnf_grammar", rules(60, "r{0} r{0}"), "too big"),
}


@pytest.mark.parametrize(("kind", "guide", "message"), REFUSED.values(), ids=REFUSED)
def test_a_malformed_guide_is_refused_with_its_reason_by_the_process_that_goes_on(
    shared: Guides, kind: str, guide: str, message: str
) -> None:
    process = process_of(shared)
    with pytest.raises(InvalidRequest, match=r"^guided_decoding_guide ") as refusal:
        shared.start(kind, guide)
    assert re.search(message, str(refusal.value))
    assert "\n" not in str(refusal.value)
    assert process.poll() is None
    assert process_of(shared) is process


@pytest.mark.parametrize(("kind", "guide", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_guide_is_refused_and_the_next_guide_compiles(
    shared: Guides, kind: str, guide: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=rf"^guided_decoding_guide .*{message}"):
        shared.start(kind, guide)
    assert process_of(shared).poll() is None


def test_a_guide_that_takes_too_long_to_compile_is_refused_and_the_next_guide_compiles(
    shared: Guides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guide_worker, "COMPILE_SECONDS", 0.05)
    with pytest.raises(InvalidRequest, match=r"^guided_decoding_guide takes longer than 0.05 s to compile"):
        shared.start("json_schema", ENDLESS)
    monkeypatch.undo()
    assert process_of(shared).poll() is None


def test_a_guide_whose_automaton_grows_without_bound_fails_its_own_completion_alone(
    own_guides: Guides, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guide_matcher, "MAX_LEXER_STATES", 2000)
    kind, guide, randomness = "regex", r"[\p{L}\p{N}]{1,2000}", random.Random(17)
    state = own_guides.start(kind, guide)

    def generate() -> None:
        for _ in range(2000):
            assert state.accept(randomness.choice(sorted(allowed_tokens(state, tokenizer) - {END})))

    with pytest.raises(InvalidRequest, match=r"^guided_decoding_guide can't be followed to its end: .*too many states"):
        generate()
    assert conforms(own_guides.start(kind, guide), "abc", tokenizer)


def test_a_guide_is_checked_once_and_a_refused_one_is_refused_again_at_once(
    own_guides: Guides, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    check = GuideWorker.check

    def recorded(worker: GuideWorker, kind: str, text: str) -> CheckedGuide:
        checked.append(text)
        return check(worker, kind, text)

    monkeypatch.setattr(GuideWorker, "check", recorded)
    assert own_guides.start_soon("regex", "a{7}") is None
    for _ in range(3):
        assert conforms(own_guides.start("regex", "a{7}"), "aaaaaaa", tokenizer)
        with pytest.raises(InvalidRequest, match="unclosed group"):
            own_guides.start("regex", "(")
    assert checked == ["a{7}", "("]
    soon = own_guides.start_soon("regex", "a{7}")
    assert soon is not None
    assert conforms(soon, "aaaaaaa", tokenizer)
    with pytest.raises(InvalidRequest, match="unclosed group"):
        own_guides.start_soon("regex", "(")
    # A guide that took long to check never starts soon.
    monkeypatch.setattr(guided, "SOON_SECONDS", -1.0)
    assert own_guides.start_soon("regex", "a{7}") is None


def test_closing_ends_the_checking_process_and_a_check_in_progress(own_guides: Guides) -> None:
    process = process_of(own_guides)
    problems: list[Exception] = []

    def check() -> None:
        try:
            own_guides.start("json_schema", ENDLESS)
        except Unavailable as problem:
            problems.append(problem)

    thread = threading.Thread(target=check)
    thread.start()
    while own_guides._checking.acquire(blocking=False):
        own_guides._checking.release()
    own_guides.close()
    thread.join(60)
    assert len(problems) == 1
    assert process.poll() is not None
    with pytest.raises(Unavailable, match="stopping"):
        own_guides.start("regex", "b")


def test_without_llguidance_or_an_end_token_the_message_says_what_is_missing(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequest, match="needs an end token"):
        Guides(tokenizer, []).start("regex", "a")
    for module in ("guide_matcher", "guide_grammar"):
        monkeypatch.delitem(sys.modules, f"llama_engine.sampling.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidRequest, match=r"guided_decoding_guide needs the package llguidance.*: pip install"):
        Guides(tokenizer, [END]).start("regex", "a")


def test_a_checking_process_that_cannot_start_is_the_servers_fault_and_one_that_was_killed_is_replaced(
    own_guides: Guides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(GenerationError, match="unavailable"):
        own_guides.start("regex", "a")
    monkeypatch.undo()
    process = process_of(own_guides)
    process.kill()
    process.wait()
    assert process_of(own_guides) is not process


STARTER = """
import sys
from llama_engine.sampling.guide_worker import GuideWorker
worker = GuideWorker([b"a", b"b", b"</s>"], [2], [2])
worker.check("regex", "a")
print("started", flush=True)
worker.check("json_schema", sys.argv[1])
sys.stdin.read()
"""


@pytest.mark.parametrize("guide", ["true", ENDLESS], ids=["idle", "checking"])
def test_the_checking_process_ends_with_a_killed_model(guide: str) -> None:
    folder = str(Path(guided.__file__).parents[2])
    command = [sys.executable, "-c", STARTER, guide]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": folder}
    ) as model:
        assert model.stdout is not None
        model.stdout.readline()
        model.kill()
        # Its output ends when the other process, which has inherited it, ends.
        model.communicate(timeout=60)
