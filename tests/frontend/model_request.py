"""A request as the fake model reads it."""

from __future__ import annotations

from dataclasses import dataclass

from triton_llama.tensors import Value, decode
from tritonclient.grpc import service_pb2 as messages


@dataclass(frozen=True)
class ModelRequest:
    """One request. inputs: the values of each tensor by name. outputs: the requested ones; all, if there are none."""

    id: str
    inputs: dict[str, list[Value]]
    outputs: frozenset[str]
    metadata: dict[str, str | bytes]
    traceparent: str = ""

    def value(self, name: str, default: Value | None = None) -> Value | None:
        """Return an input's only value."""
        return self.inputs[name][0] if name in self.inputs else default

    def integer(self, name: str, default: int) -> int:
        """Return an input's only value, an integer."""
        value = self.value(name, default)
        assert isinstance(value, int)
        return value

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt: its words, or the ids."""
        if "input_ids" in self.inputs:
            return len(self.inputs["input_ids"])
        return len(str(self.value("text_input")).split())


def read_request(message: messages.ModelInferRequest, metadata: dict[str, str | bytes]) -> ModelRequest:
    """Return a request, checked against the shapes of its tensors."""
    inputs: dict[str, list[Value]] = {}
    for tensor, content in zip(message.inputs, message.raw_input_contents, strict=True):
        assert tensor.shape[0] == 1, f"{tensor.name} has shape {tensor.shape}"
        values = _values(tensor.datatype, content)
        assert len(values) == tensor.shape[1], f"{tensor.name} has {len(values)} values, shape {tensor.shape}"
        inputs[tensor.name] = values
    traceparent = message.parameters["traceparent"].string_param
    outputs = frozenset(output.name for output in message.outputs)
    return ModelRequest(message.id, inputs, outputs, metadata, traceparent)


def _values(datatype: str, content: bytes) -> list[Value]:
    return [byte == 1 for byte in content] if datatype == "BOOL" else [*decode("input", datatype, content)]
