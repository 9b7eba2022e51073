"""The output of a response while it is generated: items of text, of reasoning, and calls.

The answer that isn't streamed has them at their end; a stream's events are the steps by which they grow.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from triton_llama.completion import Chunk

from triton_llama_openai.output.logprobs import logprobs_content
from triton_llama_openai.output.output_parser import ContentPart, Reasoning
from triton_llama_openai.output.streaming import Json, dumps, dumps_with, join_array
from triton_llama_openai.output.tool_calls import ToolCall
from triton_llama_openai.prompt.conversation import PreparedChat
from triton_llama_openai.protocol.response_items import Status

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
        part: Json = {"type": self.kind, "text": self.text}
        if self.kind == "reasoning_text":
            return dumps(part)
        return dumps_with(part | {"annotations": []}, {"logprobs": join_array(token.part for token in self.logprobs)})

    def body(self) -> bytes:
        """Return the item as JSON; in progress it has no part yet."""
        content = join_array([] if self.status == "in_progress" else [self.part()])
        if self.kind == "output_text":
            message: Json = {"type": "message", "id": self.id, "status": self.status, "role": "assistant"}
            return dumps_with(message, {"content": content})
        reasoning: Json = {"type": "reasoning", "id": self.id, "status": self.status, "summary": []}
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
        call: Json = {"type": "function_call", "id": self.id, "status": self.status, "call_id": self.call.id}
        return dumps(call | {"name": self.call.name, "arguments": arguments})


OutputItem = TextItem | CallItem


@dataclass(frozen=True)
class Added:
    """An item begins. index: in the output. body, part: as they are then; a call has no part."""

    index: int
    item_id: str
    body: bytes
    part: bytes | None


@dataclass(frozen=True)
class Delta:
    """A text grows. logprobs: of the tokens whose text it is."""

    index: int
    item_id: str
    kind: TextKind
    text: str
    logprobs: list[EncodedLogprobs]


@dataclass(frozen=True)
class Done:
    """An item is complete, or cut off; it doesn't change any more."""

    index: int
    item: OutputItem


Step = Added | Delta | Done


class Output:
    """The items of one answer, in order. top_logprobs: alternatives of each token, None for no log probabilities."""

    def __init__(self, prepared: PreparedChat, top_logprobs: int | None) -> None:
        self.parser = prepared.new_parser()
        self._top = top_logprobs
        self.items: list[OutputItem] = []
        self.finish_reason = ""

    def read(self, chunk: Chunk) -> list[Step]:
        """Return the steps of a chunk."""
        steps = self._add(self.parser.parse(chunk))
        if chunk.finish_reason:
            self.finish_reason = chunk.finish_reason
            if not self.items:
                steps += self._begin(TextItem("output_text", new_id("msg")))
            steps += self._end(self.status)
        return steps

    @property
    def status(self) -> Status:
        """OpenAI's status of the response, once it has ended."""
        return "incomplete" if self.finish_reason == "length" else "completed"

    def cut_off(self) -> None:
        """Note that an error has ended the output: an item in progress is incomplete."""
        self._end("incomplete")

    def _add(self, parts: Iterable[ContentPart]) -> list[Step]:
        steps: list[Step] = []
        for part in parts:
            if isinstance(part, ToolCall):
                steps += [*self._begin(CallItem(part, new_id("fc"))), *self._end("completed")]
            elif isinstance(part, Reasoning):
                steps += self._add_text("reasoning_text", part.text)
            else:
                steps += self._add_text("output_text", part)
        return steps

    def _add_text(self, kind: TextKind, text: str) -> list[Step]:
        steps: list[Step] = []
        last = self.items[-1] if self.items else None
        if not isinstance(last, TextItem) or last.kind != kind:
            last = TextItem(kind, new_id("msg" if kind == "output_text" else "rs"))
            steps += self._begin(last)
        last.text += text
        logprobs = self._logprobs() if kind == "output_text" else []
        last.logprobs += logprobs
        return [*steps, Delta(len(self.items) - 1, last.id, kind, text, logprobs)]

    def _begin(self, item: OutputItem) -> list[Step]:
        steps = self._end("completed")
        self.items.append(item)
        part = item.part() if isinstance(item, TextItem) else None
        return [*steps, Added(len(self.items) - 1, item.id, item.body(), part)]

    def _end(self, status: Status) -> list[Step]:
        """End the last item, unless it has ended."""
        if not self.items or self.items[-1].status != "in_progress":
            return []
        item = self.items[-1]
        item.status = status
        if isinstance(item, TextItem) and item.kind == "output_text":
            item.logprobs += self._logprobs()
        return [Done(len(self.items) - 1, item)]

    def _logprobs(self) -> list[EncodedLogprobs]:
        """Return and remove the tokens whose text is new."""
        tokens = self.parser.take_tokens()
        content = [] if self._top is None else logprobs_content(tokens, self._top, unknown_bytes=[])
        return [EncodedLogprobs(dumps(token), dumps(_without_bytes(token))) for token in content]


def _without_bytes(logprobs: object) -> object:
    """Return log probabilities as the events of a text have them."""
    if isinstance(logprobs, list):
        return [_without_bytes(token) for token in logprobs]
    if isinstance(logprobs, dict):
        return {name: _without_bytes(value) for name, value in logprobs.items() if name != "bytes"}
    return logprobs
