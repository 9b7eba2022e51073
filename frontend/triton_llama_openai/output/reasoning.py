"""Reasoning: what a model thinks before it answers, between markers that its chat template or its tokenizer knows.

    <think>\nThey ask for a sum.\n</think>\n\nIt is 4.

The start marker is the text's beginning, or the end of a prompt whose template has written it. Blanks beside markers
belong to no part. Text that doesn't begin with the marker is no reasoning.
"""

from __future__ import annotations

from collections.abc import Callable

from triton_llama_openai.protocol.schema import JsonObject

Markers = tuple[str, ...]
"""Start and end of the reasoning; in Granite's form of both parts, start and end of the answer too."""

_FORMS: tuple[Markers, ...] = (
    ("<think>", "</think>", "<response>", "</response>"),  # Granite 3.3
    ("<think>", "</think>"),  # DeepSeek-R1, Qwen3, SmolLM3
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("Here is my thought process:", "Here is my response:"),  # Granite 3.2
)
_SEED_BUDGET = "<seed:cot_budget_reflect>"
"""Follows Seed-OSS' start marker in a prompt without a budget: the model begins with a sentence about it."""


def find_markers(source: str, is_token: Callable[[str], bool]) -> Markers | None:
    """Return the markers of a template or of a tokenizer's tokens; None for a model that has none.

    source: of the template. A template that only removes old reasoning has the end marker alone, one that only begins
    it (OLMo 3's) the start marker.
    """

    def knows(text: str) -> bool:
        return text in source or is_token(text)

    for markers in _FORMS:
        if all(map(knows, markers[1:])) or (len(markers) == 2 and markers[0] in source):
            return markers
    return None


def is_open(markers: Markers, prompt: str) -> bool:
    """Return whether a prompt ends within reasoning, so that the text begins there."""
    return prompt.rstrip().removesuffix(_SEED_BUDGET).endswith(markers[0])


def is_open_in(markers: Markers, content: str) -> bool:
    """Return whether a message that is continued ends within reasoning."""
    return content.rfind(markers[0]) > content.rfind(markers[1])


def is_closed(markers: Markers, prompt: str) -> bool:
    """Return whether a prompt ends with reasoning, perhaps an empty one, so that the answer begins there."""
    return prompt.rstrip().endswith(markers[1])


def precedes_guided_text(markers: Markers, source: str) -> bool:
    """Return whether a guide may hold after the reasoning. source: of the template.

    Not where the answer has markers, too, and not where the template doesn't write the start marker: the model may have
    been trained without it, and would not find the end.
    """
    return len(markers) == 2 and markers[0] in source


def tag_format(markers: Markers, *, begun: bool) -> JsonObject:
    """Return a structural tag's format of the reasoning at the start of a text; optional, unless the text is within it.

    begun: it is.
    """
    begin = "" if begun else markers[0]
    tag = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": markers[1]}
    reasoning: JsonObject = {"type": "sequence", "elements": [tag, {"type": "regex", "pattern": r"\n{0,2}"}]}
    return reasoning if begun else {"type": "or", "elements": [reasoning, {"type": "const_string", "value": ""}]}
