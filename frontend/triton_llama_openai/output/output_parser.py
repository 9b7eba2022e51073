"""The parser of one choice's output: its chunks become reasoning, content and calls of tools.

Reasoning is what a model thinks before it answers, between markers that its chat template or its tokenizer knows:

    <think>\nThey ask for a sum.\n</think>\n\nIt is 4.

The start marker is the text's beginning, or the end of a prompt whose template has written it. Blanks beside markers
belong to no part. Text that doesn't begin with the marker is no reasoning. Parts are returned as soon as they are
certain, whatever chunks the text comes in: text that may belong to a marker or to a call is held back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from triton_llama.completion import Chunk, TokenLogprobs

from triton_llama_openai.output.tool_calls import CallReader, ForcedCalls, ToolCall, partial_end
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
    """Return whether a prompt ends with the start of reasoning, so that the text begins within it."""
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


@dataclass(frozen=True)
class Reasoning:
    """A part of an answer: text of the reasoning."""

    text: str


OutputPart = str | ToolCall | Reasoning
"""A part of an answer: text, a call, or reasoning."""


class OutputParser:
    """Parses one choice's output.

    markers: of the reasoning, none for a model without. calls: finds the calls in the text after the reasoning, None
    for a request without tools. begun: the text begins within the reasoning. blanks: characters left out after a
    marker, None for all whitespace.
    """

    def __init__(
        self, markers: Markers = (), calls: CallReader | None = None, *, begun: bool = False, blanks: str | None = None
    ) -> None:
        self.called = False
        """Whether the output has a call."""
        self.reasoning: list[str] = []
        """The parts of the reasoning."""
        self.tokens: list[TokenLogprobs] = []
        """Log probabilities of tokens whose text isn't sent yet."""
        self.ids: list[int] = []
        """Ids of tokens whose text isn't sent yet."""
        self._markers = markers
        self._calls = calls
        self._blanks = blanks
        self._position = int(begun)
        """Index of the next marker. Before an even one is nothing but blanks."""
        self._held = ""
        """Text that may belong to a marker, or blanks that may precede one."""
        self._trims = False
        """Whether blanks at the beginning of the held text are left out."""

    def parse(self, chunk: Chunk) -> list[OutputPart]:
        """Return the parts that a chunk adds to the output."""
        self.tokens += chunk.logprobs
        self.ids += chunk.output_ids
        parts = self._parse(chunk.text)
        if chunk.finish_reason:
            parts += self._end(cut=chunk.finish_reason == "length")
        self.reasoning += [part.text for part in parts if isinstance(part, Reasoning)]
        self.called = self.called or any(isinstance(part, ToolCall) for part in parts)
        forced = isinstance(self._calls, ForcedCalls)
        if chunk.finish_reason and forced and not self.called and not self._is_reasoning:
            # The answer has nothing of a call that was cut off.
            self.tokens = []
        return parts

    @property
    def ended(self) -> bool:
        """Whether a call that had to be made is complete: the answer ends here, whatever the model goes on to write."""
        return isinstance(self._calls, ForcedCalls) and self._calls.ended

    def take_tokens(self) -> list[TokenLogprobs]:
        """Return and remove the log probabilities."""
        tokens, self.tokens = self.tokens, []
        return tokens

    def take_ids(self) -> list[int]:
        """Return and remove the ids."""
        ids, self.ids = self.ids, []
        return ids

    def _parse(self, text: str) -> list[OutputPart]:
        self._held += text
        parts: list[OutputPart] = []
        while self._position < len(self._markers):
            marker = self._markers[self._position]
            before, found, after = self._held.partition(marker)
            if self._position % 2 == 0:
                begin = self._held.lstrip()
                if marker.startswith(begin) and not found:
                    return parts
                if not begin.startswith(marker):
                    self._position = len(self._markers)
                    break
            else:
                if not found:
                    before = before[: len(before) - partial_end(before, marker)]
                parts += self._part(before.rstrip())
                if not found:
                    return parts
            self._held, self._trims = after, True
            self._position += 1
        return parts + self._part(self._held)

    def _end(self, *, cut: bool) -> list[OutputPart]:
        """Return the rest. Reasoning without its end is reasoning."""
        parts = self._part(self._held)
        return parts if self._calls is None else [*parts, *self._calls.end(cut=cut)]

    @property
    def _is_reasoning(self) -> bool:
        return self._position == 1

    def _part(self, text: str) -> list[OutputPart]:
        """Return the beginning of the held text as a part, and remove it."""
        self._held = self._held[len(text) :]
        if self._trims:
            text = text.lstrip(self._blanks)
        if not text:
            return []
        self._trims = False
        if self._is_reasoning:
            return [Reasoning(text)]
        return [text] if self._calls is None else [*self._calls.read(text)]
