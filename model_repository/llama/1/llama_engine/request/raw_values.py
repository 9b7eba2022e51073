"""Merges the inputs, request parameters and `sampling_parameters` into the unvalidated values of each batch element.

A client may send a parameter twice, possibly under an alias, as the client of Triton's vLLM backend does. Both values
must be equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from numpy.typing import NDArray

from llama_engine.bounds import Bound, BoundError, show
from llama_engine.errors import InvalidRequest
from llama_engine.request.collection_bounds import read_object
from llama_engine.request.parameters import DESCRIPTION, LORA_PATH, NAMES, PARAMETERS, PROMPTS, SAMPLING_PARAMETERS

RawInputs = Mapping[str, NDArray[Any]]
"""The inputs of one request by name: [batch, 1], or [batch, n] for lists; strings as bytes."""

RequestValues = Mapping[str, object]
"""Triton's request parameters by name: strings, numbers or booleans. Each applies to every batch element."""


@dataclass(frozen=True)
class RawValue:
    """A parameter's value before validation. name: the name that the client used, possibly an alias."""

    name: str
    value: object


@dataclass(frozen=True)
class RawElement:
    """The unvalidated values of one batch element.

    raw: values by parameter name. prefix: beginning of error messages; names the batch element if the request has
    several.
    """

    raw: Mapping[str, RawValue]
    prefix: str

    def __contains__(self, name: str) -> bool:
        return name in self.raw

    def refusal(
        self, name: str, value: object, bound: str, error: type[InvalidRequest] = InvalidRequest
    ) -> InvalidRequest:
        """Return the error for a parameter that violates a bound. value: shown in the message."""
        shown = self.raw[name].name if name in self.raw else name
        return error(f"{self.prefix}{shown} is ", str(value), f"; it must be {bound}")

    def read(self, name: str) -> object:
        """Return a parameter's value converted to its Python type. Raises InvalidRequest if it violates its bound."""
        try:
            return PARAMETERS[name].bound.parse(self.raw[name].value)
        except BoundError as error:
            raise self.refusal(name, error.value, error.bound) from None

    def values(self) -> dict[str, object]:
        """Return all values except the prompt, converted to their Python types. Raises as `read` does."""
        return {name: self.read(name) for name in self.raw if name not in PROMPTS}


def raw_elements(inputs: RawInputs, values: RequestValues) -> list[RawElement]:
    """Return a request's batch elements. Raises InvalidRequest for a wrong shape, an unknown or repeated parameter."""
    batch_size = _batch_size(inputs)
    for name, value in inputs.items():
        if name not in NAMES:
            raise InvalidRequest("", name, f" is no input of this model{_suggestion(name, NAMES)}")
        parameter = PARAMETERS[NAMES[name]]
        if value.ndim != 2 or value.shape[0] != batch_size or (value.shape[1] != 1 and not parameter.is_list):
            columns = "number of words" if parameter.type == "STRING" else "number of values"
            expected = f"[{batch_size}, {columns if parameter.is_list else 1}]"
            raise InvalidRequest(f"{name} has shape {list(value.shape)}; it must be {expected}")
    common = [RawValue(name, value) for name, value in values.items()]
    return [
        _element(inputs, common, index, f"batch element {index}: " if batch_size > 1 else "")
        for index in range(batch_size)
    ]


def _batch_size(inputs: RawInputs) -> int:
    given = [name for name in PROMPTS if name in inputs]
    if len(given) > 1:
        raise InvalidRequest(f"{given[0]} and {given[1]} are both given; a request must have one of them")
    if not given:
        given = [name for name in (DESCRIPTION, LORA_PATH) if name in inputs][:1]
    if not given:
        raise InvalidRequest("text_input is missing, and so is input_ids: a request must have one of them")
    (name,) = given
    prompts = inputs[name]
    batch_size = prompts.shape[0] if prompts.ndim else 0
    if batch_size == 0:
        columns = "number of values" if name == "input_ids" else "1"
        raise InvalidRequest(f"{name} has shape {list(prompts.shape)}; it must be [batch, {columns}], batch at least 1")
    return batch_size


def _element(inputs: RawInputs, common: list[RawValue], index: int, prefix: str) -> RawElement:
    raw: dict[str, RawValue] = {}

    def add(new: RawValue, names: Mapping[str, str], kind: str) -> None:
        name = names.get(new.name)
        if name is None:
            raise InvalidRequest(prefix, show(new.name), f" is no {kind}{_suggestion(new.name, names)}")
        first = raw.setdefault(name, new)
        if first is not new and not _agree(PARAMETERS[name].bound, first, new):
            values = f"is {show(first.value)} and {new.name} is {show(new.value)}"
            raise InvalidRequest(f"{prefix}{first.name} ", values, "; the field must have one value")

    for name, values in inputs.items():
        is_list = PARAMETERS[NAMES[name]].is_list
        add(RawValue(name, values[index] if is_list else values[index, 0]), NAMES, "input")
    for raw_value in common:
        add(raw_value, NAMES, "input of this model, and so no request parameter")
    if "sampling_parameters" in raw:
        for name, value in _sampling_parameters(raw["sampling_parameters"].value, prefix).items():
            # vLLM's clients send null for missing parameters.
            if value is not None:
                add(RawValue(name, value), SAMPLING_PARAMETERS, "parameter that sampling_parameters may have")
    return RawElement(raw, prefix)


def _agree(bound: Bound[object], first: RawValue, second: RawValue) -> bool:
    """Return whether both values are valid and equal."""
    try:
        values = bound.parse(first.value), bound.parse(second.value)
    except BoundError:
        return False
    # An FP32 input and the same number in text differ in float64.
    floats = [value for value in values if isinstance(value, float)]
    return math.isclose(*floats, rel_tol=1e-6) if len(floats) == 2 else values[0] == values[1]


def _sampling_parameters(value: object, prefix: str) -> dict[str, object]:
    try:
        values = dict(read_object(value))
    except BoundError as error:
        raise InvalidRequest(f"{prefix}sampling_parameters is ", error.value, f"; it must be {error.bound}") from None
    if values.get("top_k") in (-1, "-1"):
        # vLLM's clients send -1 for "off".
        values["top_k"] = 0
    return values


def _suggestion(name: str, names: Iterable[str]) -> str:
    near = get_close_matches(name[:64], names, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""
