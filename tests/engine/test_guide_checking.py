"""Guides are checked before they are followed: what is refused, and with which bounds; the process that does it."""

import json
import os
import random
import subprocess
import sys
import threading
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


def tag_of(form: object) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


def nested_tags(levels: int) -> object:
    form: object = {"type": "any_text"}
    for _ in range(levels):
        form = {"type": "tag", "begin": "[", "content": form, "end": "]"}
    return form


@pytest.mark.parametrize(
    ("kind", "guide"),
    [
        ("regex", r"[^\s\S]"),
        ("json_schema", "false"),
        ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 3}'),
        ("json_schema", '{"$ref": "#"}'),
        ("ebnf_grammar", "root ::= root"),
    ],
)
def test_a_guide_that_no_text_satisfies_is_refused(guides: Guides, kind: str, guide: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^guided_decoding_guide (allows no text|is refused: .*[Uu]nsatisfiable)"):
        guides.start(kind, guide)


@pytest.mark.parametrize(
    ("kind", "guide", "message"),
    [
        ("regex", "(((", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("json_schema", '{"type": "strin', "is not JSON"),
        ("json_schema", '{"type": "nosuch"}', "nosuch"),
        ("json_schema", '{"not": {"type": "string"}}', '"not"'),
        ("json_schema", '{"$ref": "http://example.com/schema.json"}', "example.com"),
        ("ebnf_grammar", "root ::= foo", "'foo' not found"),
        ("structural_tag", "{}", "no structural tag"),
        ("structural_tag", '{"type": "structural_tag", "format": {"type": "qwen"}}', "'qwen', which is not supported"),
        ("structural_tag", json.dumps({**FUNCTION_CALL, "triggers": ["<tool"]}), "none of the triggers"),
    ],
)
def test_a_malformed_guide_is_refused_with_its_reason(guides: Guides, kind: str, guide: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^guided_decoding_guide") as refusal:
        guides.start(kind, guide)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "guide", "message"),
    [
        pytest.param("regex", "(" * 30_000 + "a" + ")" * 30_000, "nested parentheses", id="nested groups"),
        pytest.param(
            "json_schema", '{"items":' * 10_000 + "true" + "}" * 10_000, "nested too deeply", id="nested schemas"
        ),
        pytest.param(
            "ebnf_grammar",
            "\n".join(f"r{i} ::= r{i + 1}" for i in range(4000)) + '\nr4000 ::= "a"\nroot ::= r0',
            "nested too deeply",
            id="a chain of rules that overflows the stack",
        ),
        pytest.param(
            "ebnf_grammar",
            "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)) + '\nr60 ::= "a"\nroot ::= r0',
            "too big",
            id="rules that double 60 times",
        ),
    ],
)
def test_a_hostile_guide_is_refused_and_the_next_guide_compiles(
    own_guides: Guides, tokenizer: Tokenizer, kind: str, guide: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=r"^guided_decoding_guide") as refusal:
        own_guides.start(kind, guide)
    assert message in str(refusal.value)
    assert conforms(own_guides.start("regex", "a+"), "aa", tokenizer)


@pytest.mark.parametrize(
    ("kind", "guide", "message"),
    [
        pytest.param("regex", "a\\", "has a regular expression that ends in a backslash", id="a backslash"),
        pytest.param("regex", "a\\\\\\", "has a regular expression that ends in a backslash", id="three backslashes"),
        pytest.param(
            "structural_tag", tag_of({"type": "regex", "pattern": "\\"}), "ends in a backslash", id="a tag's backslash"
        ),
        pytest.param(
            "structural_tag",
            json.dumps({**FUNCTION_CALL, "triggers": ["<", 1]}),
            r"has triggers \['<', 1\]; they must be strings",
            id="a trigger that is a number",
        ),
        pytest.param(
            "structural_tag",
            json.dumps({**FUNCTION_CALL, "triggers": [1], "structures": [{"begin": "1", "schema": {}, "end": ""}]}),
            r"has triggers \[1\]; they must be strings",
            id="a number that begins a tag",
        ),
        pytest.param("structural_tag", tag_of(nested_tags(400)), "is nested too deeply$", id="nested tags"),
        pytest.param(
            "structural_tag",
            tag_of({"type": "const_string", "value": "<s>" * 2000}),
            "is nested too deeply$",
            id="special tokens",
        ),
        pytest.param(
            "structural_tag",
            tag_of({"type": "const_string", "value": "\ud800"}),
            "has a lone surrogate",
            id="surrogate",
        ),
        pytest.param(
            "structural_tag", tag_of({"type": "regex", "pattern": "\ud800"}), "has a lone surrogate", id="of a pattern"
        ),
    ],
)
def test_a_guide_that_is_no_grammar_is_refused_by_the_process_that_goes_on(
    own_guides: Guides, kind: str, guide: str, message: str
) -> None:
    own_guides.start("regex", "a")
    process = own_guides._worker._process if own_guides._worker else None
    with pytest.raises(InvalidRequest, match=f"^guided_decoding_guide .*{message}"):
        own_guides.start(kind, guide)
    assert process is not None
    assert process.poll() is None
    own_guides.start("regex", "b")
    assert own_guides._worker is not None
    assert own_guides._worker._process is process


def test_a_guide_that_takes_too_long_to_compile_is_refused_and_the_next_guide_compiles(
    own_guides: Guides, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guide_worker, "COMPILE_SECONDS", 0.05)
    with pytest.raises(InvalidRequest, match=r"^guided_decoding_guide takes longer than 0.05 s to compile"):
        own_guides.start("json_schema", ENDLESS)
    monkeypatch.undo()
    assert conforms(own_guides.start("regex", "a+"), "aa", tokenizer)


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


def test_a_guide_that_took_long_to_check_never_starts_soon(
    own_guides: Guides, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guided, "SOON_SECONDS", -1.0)
    for _ in range(2):
        assert own_guides.start_soon("regex", "a+") is None
        assert conforms(own_guides.start("regex", "a+"), "aa", tokenizer)


def test_closing_ends_the_checking_process_and_a_check_in_progress(own_guides: Guides) -> None:
    own_guides.start("regex", "a")
    process = own_guides._worker._process if own_guides._worker else None
    assert process is not None
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


def test_without_llguidance_the_message_says_what_to_install(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("guide_matcher", "guide_grammar"):
        monkeypatch.delitem(sys.modules, f"llama_engine.sampling.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidRequest, match=r"guided_decoding_guide needs the package llguidance.*: pip install"):
        Guides(tokenizer, [END]).start("regex", "a")


def test_a_checkpoint_without_an_end_token_takes_no_guide(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="needs an end token"):
        Guides(tokenizer, []).start("regex", "a")


def test_a_checking_process_that_cannot_start_is_the_servers_fault(
    own_guides: Guides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(GenerationError, match="unavailable"):
        own_guides.start("regex", "a")
    monkeypatch.undo()
    assert own_guides.start("regex", "a").may_end is False


def test_a_checking_process_that_was_killed_is_replaced(own_guides: Guides) -> None:
    own_guides.start("regex", "a")
    process = own_guides._worker._process if own_guides._worker else None
    assert process is not None
    process.kill()
    process.wait()
    assert own_guides.start("regex", "b").may_end is False


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
