"""The output of a response while it is generated: items of text, of reasoning, and calls.

The answer that isn't streamed has them at their end; a stream's events are the steps by which they grow.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from triton_llama_openai.conversation import Conversation
from triton_llama_openai.engine_client import Chunk
from triton_llama_openai.logprobs import TokenLogprobs, logprobs_content
from triton_llama_openai.protocol.response_items import Status
from triton_llama_openai.reasoning import Reasoning
from triton_llama_openai.streaming import Json
from triton_llama_openai.tool_calls import Part, ToolCall


def new_id(prefix: str) -> str:
    """Return an id of a response or an item."""
    return f"{prefix}_{secrets.token_hex(24)}"


@dataclass
class TextItem:
    """A message, or reasoning: one text. logprobs: of a message's tokens."""

    kind: Literal["output_text", "reasoning_text"]
    id: str
    status: Status = "in_progress"
    text: str = ""
    logprobs: list[Json] = field(default_factory=list)

    def part(self) -> Json:
        """Return the item's only part."""
        part: Json = {"type": self.kind, "text": self.text}
        return part | {"annotations": [], "logprobs": self.logprobs} if self.kind == "output_text" else part

    def body(self) -> Json:
        """Return the item; while it has no text, it has no part either."""
        content = [] if self.status == "in_progress" else [self.part()]
        if self.kind == "output_text":
            return {"type": "message", "id": self.id, "status": self.status, "role": "assistant", "content": content}
        return {"type": "reasoning", "id": self.id, "status": self.status, "summary": [], "content": content}


@dataclass
class CallItem:
    """A call, which comes whole."""

    call: ToolCall
    id: str
    status: Status = "in_progress"

    def body(self) -> Json:
        """Return the item; in progress it has no arguments yet."""
        return {
            "type": "function_call",
            "id": self.id,
            "status": self.status,
            "call_id": self.call.id,
            "name": self.call.name,
            "arguments": "" if self.status == "in_progress" else self.call.arguments,
        }


OutputItem = TextItem | CallItem


@dataclass(frozen=True)
class Added:
    """An item begins. index: in the output."""

    index: int
    item: OutputItem


@dataclass(frozen=True)
class Delta:
    """A text grows. logprobs: of the tokens whose text it is."""

    index: int
    item: TextItem
    text: str
    logprobs: list[Json]


@dataclass(frozen=True)
class Done:
    """An item is complete, or cut off."""

    index: int
    item: OutputItem


Step = Added | Delta | Done


class Output:
    """The items of one answer, in order. top_logprobs: alternatives of each token, None for no log probabilities."""

    def __init__(self, conversation: Conversation, top_logprobs: int | None) -> None:
        self._reader = conversation.reader()
        self._top = top_logprobs
        self._tokens: list[TokenLogprobs] = []
        self.items: list[OutputItem] = []
        self.finish_reason = ""

    def read(self, chunk: Chunk) -> Iterator[Step]:
        """Yield the steps of a chunk; each is to be read before the next, which changes its item."""
        self._tokens += chunk.logprobs
        for part in self._reader.read(chunk.text):
            yield from self._add(part)
        if chunk.finish_reason:
            self.finish_reason = chunk.finish_reason
            for part in self._reader.end(cut=self.finish_reason == "length"):
                yield from self._add(part)
            if not self.items:
                yield from self._begin(TextItem("output_text", new_id("msg")))
            yield from self._end(self.status)

    @property
    def status(self) -> Status:
        """OpenAI's status of the response, once it has ended."""
        return "incomplete" if self.finish_reason == "length" else "completed"

    def reasoning(self) -> str:
        """Return the text of the reasoning so far."""
        return "".join(item.text for item in self.items if isinstance(item, TextItem) and item.kind == "reasoning_text")

    def cut_off(self) -> None:
        """Note that an error has ended the output: an item in progress is incomplete."""
        for _ in self._end("incomplete"):
            pass

    def _add(self, part: Part | Reasoning) -> Iterator[Step]:
        if isinstance(part, ToolCall):
            yield from self._begin(CallItem(part, new_id("fc")))
            yield from self._end("completed")
            return
        kind: Literal["output_text", "reasoning_text"] = "output_text" if isinstance(part, str) else "reasoning_text"
        text = part if isinstance(part, str) else part.text
        last = self.items[-1] if self.items else None
        if not isinstance(last, TextItem) or last.kind != kind:
            last = TextItem(kind, new_id("msg" if kind == "output_text" else "rs"))
            yield from self._begin(last)
        last.text += text
        logprobs = self._logprobs() if kind == "output_text" else []
        last.logprobs += logprobs
        yield Delta(len(self.items) - 1, last, text, logprobs)

    def _begin(self, item: OutputItem) -> Iterator[Step]:
        yield from self._end("completed")
        self.items.append(item)
        yield Added(len(self.items) - 1, item)

    def _end(self, status: Status) -> Iterator[Step]:
        """End the last item, unless it has ended."""
        if not self.items or self.items[-1].status != "in_progress":
            return
        item = self.items[-1]
        item.status = status
        if isinstance(item, TextItem) and item.kind == "output_text":
            item.logprobs += self._logprobs()
        yield Done(len(self.items) - 1, item)

    def _logprobs(self) -> list[Json]:
        """Return and remove the tokens whose text is new."""
        tokens, self._tokens = self._tokens, []
        return [] if self._top is None else logprobs_content(tokens, self._top, unknown_bytes=[])
