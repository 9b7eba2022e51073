"""Structured output: what the masks allow, compared with other implementations of the same languages."""

import itertools
import json
import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import regex
import torch
from engine.guided_texts import END, allowed_tokens, conforms, tokens_of
from llama_engine.errors import InvalidRequest
from llama_engine.sampling import guided
from llama_engine.sampling.guided import Guides, forbidden
from llama_engine.text.tokenizer import Tokenizer

ADDRESS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "zip": {"type": "integer"}},
    "required": ["city", "zip"],
    "additionalProperties": False,
}
FUNCTION_CALL = {
    "type": "structural_tag",
    "structures": [{"begin": "<function=f>", "schema": ADDRESS, "end": "</function>"}],
    "triggers": ["<function="],
}


@pytest.mark.parametrize(
    ("kind", "guide", "conforming", "others"),
    [
        ("json", "", ["{}", '{"a": [1, null]}', '{ "é": "🙂" }'], ["[1]", "1", "{", '{"a" 1}', "{} "]),
        (
            "json_schema",
            json.dumps(ADDRESS),
            ['{"city": "Rom", "zip": 12}', '{"city":"","zip":-1}'],
            ["{}", '{"zip": 1, "city": "a"}', '{"city": "a", "zip": 1.5}', '{"city": "too long a name", "zip": 1}'],
        ),
        ("regex", "^[a-c]{2,3}\\d$", ["ab1", "abc9"], ["a1", "ab", "abcc1", "ab١"]),
        ("regex", "a/b|\\$", ["a/b", "$"], ["a", "a/b$"]),
        ("regex", "a\\\\", ["a\\"], ["a", "a\\\\"]),
        ("regex", "a\\\\$", ["a\\"], ["a", "a\\$"]),
        ("ebnf_grammar", 'root ::= "(" root ")" | [a-c]+', ["abc", "((a))"], ["(a", "()", "(a))"]),
        ("ebnf_grammar", 'start: "(" start ")" | /[a-c]+/', ["abc", "((a))"], ["(a", "()", "(a))"]),
        (
            "structural_tag",
            json.dumps(FUNCTION_CALL),
            ["", "a cab", 'a <function=f>{"city": "a", "zip": 1}</function> b', "<func"],
            ["<function=g>", "<function=", '<function=f>{"city": "a"}</function>'],
        ),
    ],
)
def test_the_masks_allow_exactly_the_texts_that_conform(
    guides: Guides, any_tokenizer: Tokenizer, kind: str, guide: str, conforming: list[str], others: list[str]
) -> None:
    for text in (*conforming, *others):
        state = guides.start(kind, guide)
        assert conforms(state, text, any_tokenizer) == (text in conforming), text


def test_a_mask_has_every_token_that_can_begin_a_conforming_text_and_no_other(
    guides: Guides, any_tokenizer: Tokenizer
) -> None:
    pattern, randomness = r"(def |class )?[a-fi-n]{1,12}(\([a-z]{0,3}\))*é?", random.Random(17)
    token_bytes = any_tokenizer.vocabulary.token_bytes
    for _ in range(4):
        state, text = guides.start("regex", pattern), b""
        for _ in range(12):
            allowed = allowed_tokens(state, any_tokenizer)
            expected = {index for index, token in enumerate(token_bytes) if token and can_begin(pattern, text + token)}
            assert allowed - {END} == expected, text
            assert (END in allowed) == state.may_end == bool(regex.fullmatch(pattern, text.decode(errors="replace")))
            if not expected:
                break
            token = randomness.choice(sorted(expected))
            assert state.accept(token)
            text += token_bytes[token]


def can_begin(pattern: str, text: bytes) -> bool:
    try:
        return bool(regex.fullmatch(pattern, text.decode(), partial=True))
    except UnicodeDecodeError:
        # The one character beyond ASCII.
        completed = (text + b"\xa9").decode(errors="replace")
        return text.endswith(b"\xc3") and bool(regex.fullmatch(pattern, completed))


def test_two_rows_follow_two_guides(guides: Guides, any_tokenizer: Tokenizer) -> None:
    both = [("json_schema", json.dumps(ADDRESS)), ("regex", "[0-9]{4}-[0-9]{2}-[0-9]{2}")]
    states = [guides.start(kind, guide) for kind, guide in both]
    size = len(any_tokenizer.vocabulary.token_bytes)
    allowed = torch.zeros(2, -(-size // 32), dtype=torch.int32)
    texts, generator = [b"", b""], torch.Generator().manual_seed(17)
    # Space and line break are unlikely, so that the JSON ends soon.
    blank = torch.tensor([token.isspace() for token in any_tokenizer.vocabulary.token_bytes])
    for _ in range(200):
        for state, row in zip(states, allowed, strict=True):
            state.fill(row.numpy())
        logits = torch.randn(2, size, generator=generator).masked_fill(blank, -20.0)
        chosen = logits.masked_fill(forbidden(allowed, size), -torch.inf).argmax(-1).tolist()
        for index, token in enumerate(chosen):
            if not states[index].finished:
                assert states[index].accept(token)
                texts[index] += any_tokenizer.vocabulary.token_bytes[token]
    address = json.loads(texts[0])
    assert len(address["city"]) <= 8
    assert isinstance(address["zip"], int)
    assert regex.fullmatch(r"\d{4}-\d\d-\d\d", texts[1].decode())


def test_a_completion_is_finished_when_nothing_may_follow(guides: Guides, any_tokenizer: Tokenizer) -> None:
    state = guides.start("regex", "ab?")
    found = []
    for token in tokens_of("a", any_tokenizer) + tokens_of("b", any_tokenizer):
        found.append((state.may_end, state.finished))
        assert state.accept(token)
    assert [*found, (state.may_end, state.finished)] == [(False, False), (True, False), (True, True)]
    assert allowed_tokens(state, any_tokenizer) == {END}


def test_a_token_that_the_guide_forbids_ends_the_completion_with_an_error(
    guides: Guides, any_tokenizer: Tokenizer
) -> None:
    state = guides.start("regex", "a+")
    assert not state.accept(tokens_of("b", any_tokenizer)[0])
    assert not state.finished
    with pytest.raises(InvalidRequest, match=r"^guided_decoding_guide can't be followed"):
        allowed_tokens(state, any_tokenizer)


def test_special_tokens_come_only_where_the_guide_names_them(own_guides: Guides, tokenizer: Tokenizer) -> None:
    special = set(tokenizer.pretrained.all_special_ids)
    start = tokenizer.pretrained.convert_tokens_to_ids("<s>")
    assert allowed_tokens(own_guides.start("regex", "(.|\n)*"), tokenizer) & special == {END}
    tag = {"type": "tag", "begin": "<s>x", "content": {"type": "const_string", "value": "y"}, "end": ""}
    for form in (tag, {"type": "triggered_tags", "triggers": ["<s>"], "tags": [tag], "at_least_one": True}):
        guide = json.dumps({"type": "structural_tag", "format": form})
        state = own_guides.start("structural_tag", guide)
        assert start in allowed_tokens(state, tokenizer)
        assert state.accept(start)
        assert conforms(state, "xy", tokenizer)


A = {"type": "regex", "pattern": "a"}
B = {"type": "const_string", "value": "b"}


@pytest.mark.parametrize(
    ("form", "conforming", "others"),
    [
        ({"type": "sequence", "elements": [A, B]}, ["ab"], ["b", "a"]),
        (
            {"type": "or", "elements": [{"type": "json_schema", "json_schema": {"const": 1}}, A]},
            ["1", "a"],
            ["1a", "b"],
        ),
        ({"type": "tag", "begin": "[", "content": {"type": "any_text"}, "end": "]"}, ["[ab]", "[]"], ["[ab", "[a]]"]),
        ({"type": "const_string", "value": '\x7f\n"\\/é🙂\x80'}, ['\x7f\n"\\/é🙂\x80'], ["\\u007f"]),
        (
            {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": 'é\x7f"\\'},
            ['é\x7f"\\', 'a\x7fé\x7f"\\'],
            ["é\x7f"],
        ),
        (
            {"type": "tags_with_separator", "separator": ",", "tags": [{"begin": "[", "content": A, "end": "]"}]},
            ["", "[a]", "[a],[a]"],
            ["[a],", "a"],
        ),
        (
            {
                "type": "triggered_tags",
                "triggers": ["<t"],
                "stop_after_first": True,
                "tags": [{"begin": "<t>", "content": B, "end": "</t>"}],
            },
            ["cab", "ca<t>b</t>"],
            ["<t>b</t>a", "<t>a"],
        ),
    ],
)
def test_a_structural_tag_has_xgrammars_formats(
    guides: Guides, any_tokenizer: Tokenizer, form: dict[str, object], conforming: list[str], others: list[str]
) -> None:
    guide = json.dumps({"type": "structural_tag", "format": form})
    for text in (*conforming, *others):
        state = guides.start("structural_tag", guide)
        assert conforms(state, text, any_tokenizer) == (text in conforming), text


def test_whitespace_in_json_is_bounded(own_guides: Guides, tokenizer: Tokenizer) -> None:
    assert conforms(own_guides.start("json", ""), "{" + "\n" + " " * 31 + "}", tokenizer)
    assert not conforms(own_guides.start("json", ""), "{" + " " * 80 + "}", tokenizer)


@pytest.mark.parametrize(("milliseconds", "goes_on"), [(2, True), (8, False)])
def test_a_guide_may_take_two_milliseconds_a_token_and_not_eight(
    own_guides: Guides, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, milliseconds: int, goes_on: bool
) -> None:
    # Read before and after a mask, and before and after a token.
    times = (count * milliseconds / 2000 for count in itertools.count())
    monkeypatch.setattr(guided, "time", SimpleNamespace(thread_time=lambda: next(times)))
    state = own_guides.start("regex", "a+")

    def follow() -> None:
        for token in tokens_of("a", tokenizer) * 500:
            allowed_tokens(state, tokenizer)
            state.accept(token)

    refused = pytest.raises(InvalidRequest, match=r"can't be followed to its end: it took .* s for \d+ tokens")
    with nullcontext() if goes_on else refused:
        follow()


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 3072])
def test_a_mask_has_a_token_in_each_bit(vocabulary: int) -> None:
    words = -(-vocabulary // 32)
    allowed = torch.randint(
        -(1 << 31), 1 << 31, (3, words), generator=torch.Generator().manual_seed(17), dtype=torch.int32
    )
    bits = [[not int(row[token // 32]) >> token % 32 & 1 for token in range(vocabulary)] for row in allowed]
    assert forbidden(allowed, vocabulary).tolist() == bits
