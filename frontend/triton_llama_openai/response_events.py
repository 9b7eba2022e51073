"""The events of a streamed response: each step of its output, between its beginning and its end."""

from __future__ import annotations

from triton_llama_openai.engine_client import Chunk
from triton_llama_openai.errors import ApiError
from triton_llama_openai.response_object import ResponseObject
from triton_llama_openai.response_output import Added, CallItem, Delta, Done, OutputItem, Step, TextItem
from triton_llama_openai.streaming import Events, Json, dumps


class ResponseEvents(Events):
    """Makes the events of one response, numbered from 0."""

    def __init__(self, response: ResponseObject) -> None:
        self._response = response
        self._number = 0

    def begin(self) -> bytes:
        """Return the events before the first text."""
        response: Json = {"response": self._response.body("in_progress")}
        return self._event("response.created", response) + self._event("response.in_progress", response)

    def add(self, chunk: Chunk) -> bytes:
        """Return the events of a chunk, none if all its text is held back."""
        return b"".join(map(self._step, self._response.output.read(chunk)))

    def end(self) -> bytes:
        """Return the last event, which has the whole response."""
        status = self._response.output.status
        return self._event(f"response.{status}", {"response": self._response.body(status)})

    def fail(self, error: ApiError) -> bytes:
        """Return the last event of a response that an error cut off."""
        self._response.output.cut_off()
        return self._event("response.failed", {"response": self._response.body("failed", error)})

    def _step(self, step: Step) -> bytes:
        match step:
            case Added(index, item):
                added = self._item("added", index, item)
                if isinstance(item, TextItem):
                    added += self._content("response.content_part.added", index, item, {"part": item.part()})
                return added
            case Delta(index, item, text, logprobs):
                return self._content(f"response.{item.kind}.delta", index, item, {"delta": text}, logprobs)
            case Done(index, TextItem() as item):
                text_done = self._content(f"response.{item.kind}.done", index, item, {"text": item.text}, item.logprobs)
                part_done = self._content("response.content_part.done", index, item, {"part": item.part()})
                return text_done + part_done + self._item("done", index, item)
            case Done(index, CallItem() as item):
                place: Json = {"item_id": item.id, "output_index": index}
                arguments = item.call.arguments
                delta = self._event("response.function_call_arguments.delta", {**place, "delta": arguments})
                done = self._event("response.function_call_arguments.done", {**place, "arguments": arguments})
                return delta + done + self._item("done", index, item)
        raise AssertionError(step)

    def _item(self, kind: str, index: int, item: OutputItem) -> bytes:
        return self._event(f"response.output_item.{kind}", {"output_index": index, "item": item.body()})

    def _content(
        self, kind: str, index: int, item: TextItem, fields: Json, logprobs: list[Json] | None = None
    ) -> bytes:
        """Return an event of an item's only part. logprobs: of those that have them, for a message."""
        place: Json = {"item_id": item.id, "output_index": index, "content_index": 0}
        if logprobs is not None and item.kind == "output_text":
            place["logprobs"] = _without_bytes(logprobs)
        return self._event(kind, place | fields)

    def _event(self, kind: str, fields: Json) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + dumps(event) + b"\n\n"


def _without_bytes(logprobs: object) -> object:
    """Return log probabilities as deltas have them."""
    if isinstance(logprobs, list):
        return [_without_bytes(token) for token in logprobs]
    if isinstance(logprobs, dict):
        return {name: _without_bytes(value) for name, value in logprobs.items() if name != "bytes"}
    return logprobs
