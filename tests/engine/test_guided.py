"""Structured output: what the masks allow, compared with other implementations of the same languages."""

import json
from collections.abc import Iterator

import pytest
from engine.guided_texts import END, FUNCTION_CALL, allowed_tokens, conforms, tag, tokens_of
from engine.test_tokenizer import llama2_like
from llama_engine.guides.compiler import Guides
from llama_engine.text.tokenizer import Tokenizer, Vocabulary

ADDRESS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "zip": {"type": "integer"}},
    "required": ["city", "zip"],
    "additionalProperties": False,
}
A = {"type": "regex", "pattern": "a"}
B = {"type": "const_string", "value": "b"}
ANY = {"type": "any_text"}


# A gap is at most one space.
GAPS = ['{"a": {"b": [1, null]}}', '{"a":{"b":[1,null]}}', '{ "a" :[ ] }']
NO_GAPS = ['{"a":  1}', '{"a"\n: 1}', '{"a": 1\n, "b": 2}', "{\n}", "{\t}", " {}", "\n{}", "{} "]


def gaps(options: object) -> str:
    return json.dumps({"type": "object", "x-guidance": options})


@pytest.fixture(scope="module")
def llama2() -> Tokenizer:
    pretrained = llama2_like()
    return Tokenizer(pretrained, Vocabulary.from_tokenizer(pretrained, len(pretrained)))


@pytest.fixture(scope="module")
def guides(llama2: Tokenizer) -> Iterator[Guides]:
    guides = Guides(llama2, [END])
    yield guides
    guides.close()


@pytest.mark.parametrize(
    ("kind", "guide", "conforming", "others"),
    [
        ("json", "", ["{}", '{ "é": "🙂" }', *GAPS], ["[1]", "1", "{", '{"a" 1}', *NO_GAPS]),
        ("json_schema", "true", GAPS, NO_GAPS),
        ("json_schema", gaps({"coerce_one_of": True}), GAPS, NO_GAPS),
        # A schema's own gaps between the tokens of JSON.
        ("json_schema", gaps({"whitespace_pattern": r"\n\n| {3}"}), ['{\n\n"a":   1}', "{}"], ['{"a": 1}', "{\n}"]),
        ("json_schema", gaps({"whitespace_flexible": False}), ['{"a":1}'], ['{"a": 1}', "{ }"]),
        ("json_schema", json.dumps(ADDRESS), ['{"city": "Rom", "zip": 12}', '{"city":"","zip":-1}'],
         ["{}", '{"zip": 1, "city": "a"}', '{"city": "a", "zip": 1.5}', '{"city": "too long a name", "zip": 1}']),
        ("regex", "^[a-c]{2,3}\\d$", ["ab1", "abc9"], ["a1", "ab", "abcc1", "ab١"]),
        ("regex", "a/b|\\$", ["a/b", "$"], ["a", "a/b$"]),
        ("regex", "a\\\\", ["a\\"], ["a", "a\\\\"]),
        ("ebnf_grammar", 'root ::= "(" root ")" | [a-c]+', ["abc", "((a))"], ["(a", "()", "(a))"]),
        ("ebnf_grammar", 'start: "(" start ")" | /[a-c]+/', ["abc", "((a))"], ["(a", "()", "(a))"]),
        # XGrammar's formats of structural tags.
        ("structural_tag", json.dumps(FUNCTION_CALL),
         ["", "a cab", 'a <function=f>{"city": "a", "zip": 1}</function> b', "<func"],
         ["<function=g>", "<function=", "<function=f>[]</function>"]),
        ("structural_tag", tag({"type": "sequence", "elements": [A, B]}), ["ab"], ["b", "a"]),
        ("structural_tag", tag({"type": "or", "elements": [{"type": "json_schema", "json_schema": {"const": 1}}, A]}),
         ["1", "a"], ["1a", "b"]),
        ("structural_tag", tag({"type": "sequence", "elements": [
            {"type": "grammar", "grammar": 'root ::= "(" root ")" | [a-c]+'},
            {"type": "grammar", "grammar": 'start: r1 "."\nr1: "x" r1 | "y"'}]}),
         ["((a))xxy.", "by."], ["(ay.", "axy", "y."]),
        ("structural_tag", tag({"type": "tag", "begin": "[", "content": ANY, "end": "]"}),
         ["[ab]", "[]"], ["[ab", "[a]]"]),
        # A longer lexeme beside a tag's begin.
        ("structural_tag", tag({"type": "or", "elements": [
            {"type": "tag", "begin": "[", "content": ANY, "end": "]"}, {"type": "regex", "pattern": "\\D+\\d"}]}),
         ["[a1b]", "[1", "b1"], ["1", "b1]"]),
        ("structural_tag", tag({"type": "const_string", "value": '\x7f\n"\\/é🙂\x80'}),
         ['\x7f\n"\\/é🙂\x80'], ["\\u007f"]),
        ("structural_tag", tag({"type": "tag", "begin": "", "content": ANY, "end": 'é\x7f"\\'}),
         ['é\x7f"\\', 'a\x7fé\x7f"\\'], ["é\x7f"]),
        ("structural_tag", tag({"type": "tags_with_separator", "separator": ",",
                                "tags": [{"begin": "[", "content": A, "end": "]"}]}),
         ["", "[a]", "[a],[a]"], ["[a],", "a"]),
        ("structural_tag", tag({"type": "triggered_tags", "triggers": ["<t"], "stop_after_first": True,
                                "tags": [{"begin": "<t>", "content": B, "end": "</t>"}]}),
         ["cab", "ca<t>b</t>"], ["<t>b</t>a", "<t>a"]),
    ],
)  # fmt: skip
def test_the_masks_allow_exactly_the_texts_that_conform(
    guides: Guides, llama2: Tokenizer, kind: str, guide: str, conforming: list[str], others: list[str]
) -> None:
    for text in (*conforming, *others):
        state = guides.start(kind, guide).result()
        assert conforms(state, text, llama2) == (text in conforming), text


def test_a_completion_is_finished_when_nothing_may_follow(guides: Guides, llama2: Tokenizer) -> None:
    state = guides.start("regex", "ab?").result()
    states = []
    for token in tokens_of("a", llama2) + tokens_of("b", llama2):
        states.append((state.may_end, state.finished))
        assert state.accept(token)
    assert [*states, (state.may_end, state.finished)] == [(False, False), (True, False), (True, True)]
    assert allowed_tokens(state, llama2) == {END}


def test_special_tokens_come_only_where_the_guide_names_them(own_guides: Guides, tokenizer: Tokenizer) -> None:
    special = set(tokenizer.pretrained.all_special_ids)
    start = tokenizer.pretrained.convert_tokens_to_ids("<s>")
    assert allowed_tokens(own_guides.start("regex", "(.|\n)*").result(), tokenizer) & special == {END}
    named = {"type": "tag", "begin": "<s>x", "content": {"type": "const_string", "value": "y"}, "end": ""}
    for form in (named, {"type": "triggered_tags", "triggers": ["<s>"], "tags": [named], "at_least_one": True}):
        state = own_guides.start("structural_tag", tag(form)).result()
        assert start in allowed_tokens(state, tokenizer)
        assert state.accept(start)
        assert conforms(state, "xy", tokenizer)
