"""The output of a response while it is generated: items of text, of reasoning, and calls.

The answer that isn't streamed has the items at their end; a stream has the events by which they grow, which
routes/responses.py numbers and sends.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from triton_llama.completion import Chunk

from triton_llama_openai.output.answers import dumps, dumps_with, join_array
from triton_llama_openai.output.logprobs import logprobs_content
from triton_llama_openai.output.output_parser import OutputParser, OutputPart, Reasoning
from triton_llama_openai.output.tool_calls import ToolCall
from triton_llama_openai.protocol.response_items import Status
from triton_llama_openai.protocol.schema import JsonObject

TextKind = Literal["output_text", "reasoning_text"]


def new_id(prefix: str) -> str:
    """Return an id of a response or an item."""
    return f"{prefix}_{secrets.token_hex(24)}"


@dataclass(frozen=True)
class EncodedLogprobs:
    """JSON of a token's log probabilities, which several events repeat. event: as those of a text have it."""

    part: bytes
    event: bytes


@dataclass
class TextItem:
    """A message, or reasoning: one text. logprobs: of a message's tokens."""

    kind: TextKind
    id: str
    status: Status = "in_progress"
    text: str = ""
    logprobs: list[EncodedLogprobs] = field(default_factory=list)

    def part(self) -> bytes:
        """Return the item's only part as JSON."""
        part: JsonObject = {"type": self.kind, "text": self.text}
        if self.kind == "reasoning_text":
            return dumps(part)
        return dumps_with(part | {"annotations": []}, {"logprobs": join_array(token.part for token in self.logprobs)})

    def body(self) -> bytes:
        """Return the item as JSON; in progress it has no part yet."""
        content = join_array([] if self.status == "in_progress" else [self.part()])
        if self.kind == "output_text":
            message: JsonObject = {"type": "message", "id": self.id, "status": self.status, "role": "assistant"}
            return dumps_with(message, {"content": content})
        reasoning: JsonObject = {"type": "reasoning", "id": self.id, "status": self.status, "summary": []}
        return dumps_with(reasoning, {"content": content})


@dataclass
class CallItem:
    """A call, which comes whole."""

    call: ToolCall
    id: str
    status: Status = "in_progress"

    def body(self) -> bytes:
        """Return the item as JSON; in progress it has no arguments yet."""
        arguments = "" if self.status == "in_progress" else self.call.arguments
        call: JsonObject = {"type": "function_call", "id": self.id, "status": self.status, "call_id": self.call.id}
        return dumps(call | {"name": self.call.name, "arguments": arguments})


OutputItem = TextItem | CallItem


@dataclass(frozen=True)
class OutputEvent:
    """A step of the output, as a stream has it. kind: without `response.`. encoded: more of its fields, as JSON."""

    kind: str
    fields: JsonObject
    encoded: dict[str, bytes] = field(default_factory=dict)


class Output:
    """The items of one answer, in order. top_logprobs: alternatives of each token, None for no log probabilities."""

    def __init__(self, parser: OutputParser, top_logprobs: int | None) -> None:
        self.parser = parser
        self._top = top_logprobs
        self.items: list[OutputItem] = []
        self.finish_reason = ""

    def read(self, chunk: Chunk) -> list[OutputEvent]:
        """Return the events of a chunk."""
        events = self._add(self.parser.parse(chunk))
        if chunk.finish_reason:
            self.finish_reason = chunk.finish_reason
            if not self.items:
                events += self._begin(TextItem("output_text", new_id("msg")))
            events += self._end(self.status)
        return events

    @property
    def status(self) -> Status:
        """OpenAI's status of the response, once it has ended."""
        return "incomplete" if self.finish_reason == "length" else "completed"

    def cut_off(self) -> None:
        """Note that an error has ended the output: an item in progress is incomplete."""
        self._end("incomplete")

    def _add(self, parts: Iterable[OutputPart]) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        for part in parts:
            if isinstance(part, ToolCall):
                events += [*self._begin(CallItem(part, new_id("fc"))), *self._end("completed")]
            elif isinstance(part, Reasoning):
                events += self._add_text("reasoning_text", part.text)
            else:
                events += self._add_text("output_text", part)
        return events

    def _add_text(self, kind: TextKind, text: str) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        last = self.items[-1] if self.items else None
        if not isinstance(last, TextItem) or last.kind != kind:
            last = TextItem(kind, new_id("msg" if kind == "output_text" else "rs"))
            events += self._begin(last)
        last.text += text
        logprobs = self._logprobs() if kind == "output_text" else []
        last.logprobs += logprobs
        return [*events, OutputEvent(f"{kind}.delta", {**self._place(last), "delta": text}, _logprobs(kind, logprobs))]

    def _begin(self, item: OutputItem) -> list[OutputEvent]:
        events = self._end("completed")
        self.items.append(item)
        index: JsonObject = {"output_index": len(self.items) - 1}
        events.append(OutputEvent("output_item.added", index, {"item": item.body()}))
        if isinstance(item, TextItem):
            events.append(OutputEvent("content_part.added", self._place(item), {"part": item.part()}))
        return events

    def _end(self, status: Status) -> list[OutputEvent]:
        """End the last item, unless it has ended."""
        if not self.items or self.items[-1].status != "in_progress":
            return []
        item = self.items[-1]
        item.status = status
        place = self._place(item)
        if isinstance(item, TextItem):
            if item.kind == "output_text":
                item.logprobs += self._logprobs()
            events = [
                OutputEvent(f"{item.kind}.done", place | {"text": item.text}, _logprobs(item.kind, item.logprobs)),
                OutputEvent("content_part.done", place, {"part": item.part()}),
            ]
        else:
            arguments = item.call.arguments
            events = [
                OutputEvent("function_call_arguments.delta", place | {"delta": arguments}),
                OutputEvent("function_call_arguments.done", place | {"arguments": arguments}),
            ]
        index: JsonObject = {"output_index": len(self.items) - 1}
        return [*events, OutputEvent("output_item.done", index, {"item": item.body()})]

    def _place(self, item: OutputItem) -> JsonObject:
        """Return the place of the last item's text or arguments."""
        place: JsonObject = {"item_id": item.id, "output_index": len(self.items) - 1}
        return place | {"content_index": 0} if isinstance(item, TextItem) else place

    def _logprobs(self) -> list[EncodedLogprobs]:
        """Return and remove the tokens whose text is new."""
        tokens = self.parser.take_tokens()
        content = [] if self._top is None else logprobs_content(tokens, self._top)
        return [EncodedLogprobs(dumps(token), dumps(_without_bytes(token))) for token in content]


def _logprobs(kind: TextKind, logprobs: list[EncodedLogprobs]) -> dict[str, bytes]:
    """Return the field of log probabilities, which a message's events have."""
    return {"logprobs": join_array(token.event for token in logprobs)} if kind == "output_text" else {}


def _without_bytes(logprobs: object) -> object:
    """Return log probabilities as the events of a text have them."""
    if isinstance(logprobs, list):
        return [_without_bytes(token) for token in logprobs]
    if isinstance(logprobs, dict):
        return {name: _without_bytes(value) for name, value in logprobs.items() if name != "bytes"}
    return logprobs
