"""What a response says: texts, counts and errors, in one form for every protocol, streamed or not."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from server.tenants.sending import Heard
from tritonclient.grpc import InferResult, service_pb2

_RANDOM = {"id", "created"}
"""What the endpoint makes up for every answer."""

_COUNTED = "num_output_tokens"
_JSON = {"logprobs", "prompt_logprobs"}
_LASTING = {"finish_reason", "stop_reason", "num_input_tokens", "num_cached_tokens", "cum_log_probs"}


@dataclass
class Said:
    """A response. error: its message. texts, and values of outputs by name, of each choice."""

    error: str = ""
    texts: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    values: defaultdict[int, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))

    def comparable(self) -> object:
        """Return what two responses to the same request have in common; after an error no text is certain."""
        return self.error or (dict(self.texts), dict(self.values))

    def everything(self) -> bytes:
        """Return the error, and texts and prompts without the borders between their chunks or tokens."""
        return "\n".join([self.error, *self.texts.values(), *self._prompts()]).encode()

    def _prompts(self) -> Iterator[str]:
        for values in self.values.values():
            # Each token is the first of its object.
            found = [next(iter(one.values())) for one in values.get("prompt_logprobs", []) if one]
            yield "".join(str(one["decoded_token"]) for one in found)
            yield "".join(values.get("token_strs", [])).replace("Ġ", " ")


def said(heard: Heard) -> Said:
    """Read a response, as far as it has come."""
    read = Said()
    for part in heard.parts:
        if isinstance(part, service_pb2.ModelInferResponse):
            _add_outputs(read, _columns(part))
        elif "error" in part:
            error = part["error"]
            read.error = json.dumps(error) if isinstance(error, dict) else str(error)
        elif "outputs" in part:
            _add_outputs(read, {output["name"]: output["data"] for output in part["outputs"]})
        elif "text_output" in part:
            _add_outputs(read, {name: value if isinstance(value, list) else [value] for name, value in part.items()})
        else:
            _add_openai(read, part)
    return read


def _columns(part: service_pb2.ModelInferResponse) -> dict[str, list[Any]]:
    result = InferResult(part)
    columns = {output.name: result.as_numpy(output.name).ravel().tolist() for output in part.outputs}
    return {
        name: [value.decode() if isinstance(value, bytes) else value for value in column]
        for name, column in columns.items()
    }


def _add_outputs(read: Said, outputs: Mapping[str, list[Any]]) -> None:
    for row, text in enumerate(outputs.get("text_output", [])):
        choice = outputs["sequence_index"][row] if "sequence_index" in outputs else row
        read.texts[choice] += text
        values = read.values[choice]
        for name, column in outputs.items():
            if name == _COUNTED:
                values[name] = values.get(name, 0) + column[row]
            elif name in _JSON:
                values[name] = values.get(name, []) + (json.loads(column[row]) or [])
            elif name == "output_log_probs":
                # float32 over JSON has fewer digits; a request with them has one choice.
                values[name] = values.get(name, []) + [struct.unpack("f", struct.pack("f", one))[0] for one in column]
            elif name in _LASTING:
                values[name] = column[row] or values.get(name, column[row])


def _add_openai(read: Said, part: Mapping[str, Any]) -> None:
    """Add an answer, or an event of a streamed one."""
    for choice in part.get("choices", []):
        index, message = choice["index"], choice.get("message") or choice.get("delta") or {}
        calls = message.get("tool_calls") or []
        arguments = "".join(call["function"].get("name", "") + call["function"].get("arguments", "") for call in calls)
        read.texts[index] += (choice.get("text") or message.get("content") or "") + arguments
        values = read.values[index]
        for name in ("finish_reason", "stop_reason"):
            values[name] = choice.get(name) or values.get(name)
        values["logprobs"] = [*values.get("logprobs", []), *_listed(choice.get("logprobs"))]
        if choice.get("prompt_logprobs"):
            values["prompt_logprobs"] = choice["prompt_logprobs"]
    rest = {name: value for name, value in part.items() if name not in {*_RANDOM, "choices", "object"}}
    if rest.get("usage") is None:
        rest.pop("usage", None)
    read.values[-1] |= rest


def _listed(logprobs: Mapping[str, Any] | None) -> list[Any]:
    """Return a choice's log probabilities; a chat's are a list of objects, a completion's an object of lists."""
    if not logprobs:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"] or [], strict=False))
