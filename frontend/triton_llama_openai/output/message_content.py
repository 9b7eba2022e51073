"""The content of a message while it is generated: blocks of text, of thinking, and calls.

The answer that isn't streamed has the blocks at their end; a stream has the events by which they grow.
"""

from __future__ import annotations

from triton_llama.completion import Chunk

from triton_llama_openai.output.answers import dumps
from triton_llama_openai.output.output_parser import OutputParser, OutputPart, Reasoning
from triton_llama_openai.output.tool_calls import ToolCall
from triton_llama_openai.protocol.chat import parse_arguments
from triton_llama_openai.protocol.schema import JsonObject


class MessageContent:
    """The blocks of one answer, in order."""

    def __init__(self, parser: OutputParser) -> None:
        self.parser = parser
        self.blocks: list[JsonObject] = []
        self.finish_reason = ""
        self._stop_reason = ""
        self._texts: list[str] = []
        """The parts of the last block's text or thinking, while it grows."""

    def read(self, chunk: Chunk) -> list[JsonObject]:
        """Return the events of a chunk."""
        events = [event for part in self.parser.parse(chunk) for event in self._add(part)]
        if chunk.finish_reason:
            self.finish_reason, self._stop_reason = chunk.finish_reason, chunk.stop_reason
            events += self._end()
        return events

    def stop(self, stop_sequences: tuple[str, ...]) -> JsonObject:
        """Return Anthropic's reason of the answer's end."""
        sequence = None
        if self.finish_reason == "length":
            reason = "max_tokens"
        elif any(block["type"] == "tool_use" for block in self.blocks):
            reason = "tool_use"
        elif self._stop_reason in stop_sequences:
            reason, sequence = "stop_sequence", self._stop_reason
        else:
            reason = "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _add(self, part: OutputPart) -> list[JsonObject]:
        if isinstance(part, str):
            return self._add_text("text", part)
        if isinstance(part, Reasoning):
            return self._add_text("thinking", part.text)
        return self._add_call(part)

    def _add_text(self, kind: str, text: str) -> list[JsonObject]:
        events: list[JsonObject] = []
        if not self._texts or self.blocks[-1]["type"] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            events = self._begin({"type": kind, kind: "", **signature})
        self._texts.append(text)
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _add_call(self, call: ToolCall) -> list[JsonObject]:
        arguments = parse_arguments(call.arguments)
        if arguments is None:
            # A block has an object; other arguments stay text, as calls of unknown functions do.
            return self._add_text("text", dumps({"name": call.name, "arguments": call.arguments}).decode())
        events = self._begin({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        self.blocks[-1]["input"] = arguments
        delta: JsonObject = {"type": "input_json_delta", "partial_json": call.arguments or "{}"}
        return [*events, self._delta(delta), self._event("stop")]

    def _begin(self, block: JsonObject) -> list[JsonObject]:
        events = self._end()
        self.blocks.append(block)
        return [*events, self._event("start", content_block={**block})]

    def _end(self) -> list[JsonObject]:
        """End the last block, unless it has ended."""
        if not self._texts:
            return []
        block = self.blocks[-1]
        kind = str(block["type"])
        block[kind] = "".join(self._texts)
        self._texts.clear()
        signature = [self._delta({"type": "signature_delta", "signature": ""})] if kind == "thinking" else []
        return [*signature, self._event("stop")]

    def _delta(self, delta: JsonObject) -> JsonObject:
        return self._event("delta", delta=delta)

    def _event(self, kind: str, **fields: object) -> JsonObject:
        return {"type": f"content_block_{kind}", "index": len(self.blocks) - 1, **fields}
