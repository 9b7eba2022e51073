"""The rows of a request before their values are checked: inputs, request parameters and `sampling_parameters` together.

A field has one value. It may be given twice, under an alias perhaps, as Triton's vLLM backend's client does; with two
values it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llama_engine.api.compound_types import read_object
from llama_engine.api.fields import ALIASES, FIELDS, PROMPTS, SAMPLING_PARAMETERS, Field, field_of
from llama_engine.api.value_types import BoundError, show
from llama_engine.errors import InvalidRequest

RawInputs = Mapping[str, NDArray[Any]]
"""The inputs of one request by name: [rows, 1], or [rows, n] for lists; strings as bytes."""

Parameters = Mapping[str, object]
"""The parameters of one request by name: strings, numbers or booleans, for every row."""


_INPUTS: Mapping[str, str] = {**{name: name for name in FIELDS}, **ALIASES}
"""The fields of inputs and request parameters, by their names there."""


@dataclass(frozen=True)
class Given:
    """A value that was given. name: under which."""

    name: str
    value: object


@dataclass(frozen=True)
class RawRow:
    """One row. given: by the field's name. prefix: of error messages, names the row of several."""

    given: Mapping[str, Given]
    prefix: str
    _read: dict[str, object] = field(default_factory=dict, repr=False)

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def refusal(self, name: str, value: object, bound: str) -> InvalidRequest:
        """Return the error of a field that violates a bound. value: as the message shows it."""
        given = self.given[name].name if name in self.given else name
        return InvalidRequest(f"{self.prefix}{given} is ", str(value), f"; it must be {bound}")

    def read(self, name: str) -> object:
        """Return a given value in its Python form, parsed once. Raises InvalidRequest if it violates its bound."""
        if name not in self._read:
            try:
                self._read[name] = FIELDS[name].bound.parse(self.given[name].value)
            except BoundError as error:
                raise self.refusal(name, error.value, error.bound) from None
        return self._read[name]

    def attributes(self) -> dict[str, object]:
        """Return the attributes of GenerationRequest that the row's fields set; the others are checked, too."""
        read = {name: self.read(name) for name in self.given if name not in PROMPTS}
        return {FIELDS[name].attribute: value for name, value in read.items() if FIELDS[name].attribute}


def raw_rows(inputs: RawInputs, parameters: Parameters) -> list[RawRow]:
    """Return the rows of a request. Raises InvalidRequest for a wrong shape, an unknown or repeated field."""
    rows = _count_rows(inputs)
    for name, value in inputs.items():
        field = field_of(name)
        if field is None:
            raise InvalidRequest("", name, f" is no input of this model{_near(name)}")
        if value.ndim != 2 or value.shape[0] != rows or (value.shape[1] != 1 and not field.is_list):
            many = "number of words" if field.type == "STRING" else "number of values"
            expected = f"[{rows}, {many if field.is_list else 1}]"
            raise InvalidRequest(f"{name} has shape {list(value.shape)}; it must be {expected}")
    common = [Given(name, value) for name, value in parameters.items()]
    return [_row(inputs, common, row, f"row {row}: " if rows > 1 else "") for row in range(rows)]


def _count_rows(inputs: RawInputs) -> int:
    if "text_input" in inputs and "input_ids" in inputs:
        raise InvalidRequest("text_input and input_ids are both given; a request must have one of them")
    name = "input_ids" if "input_ids" in inputs else "text_input"
    prompts = inputs.get(name)
    if prompts is None:
        raise InvalidRequest("text_input is missing, and so is input_ids: a request must have one of them")
    rows = prompts.shape[0] if prompts.ndim else 0
    if rows == 0:
        one = "number of values" if name == "input_ids" else "1"
        raise InvalidRequest(f"{name} has shape {list(prompts.shape)}; it must be [rows, {one}], at least one row")
    return rows


def _row(inputs: RawInputs, common: list[Given], row: int, prefix: str) -> RawRow:
    given: dict[str, Given] = {}

    def add(one: Given, fields: Mapping[str, str], what: str) -> None:
        name = fields.get(one.name)
        if name is None:
            raise InvalidRequest(prefix, show(one.name), f" is no {what}{_near(one.name)}")
        first = given.setdefault(name, one)
        if first is not one and not _agree(FIELDS[name], first, one):
            values = f"is {show(first.value)} and {one.name} is {show(one.value)}"
            raise InvalidRequest(f"{prefix}{first.name} ", values, "; the field must have one value")

    for name, value in inputs.items():
        field = field_of(name)
        add(Given(name, value[row] if field is not None and field.is_list else value[row, 0]), _INPUTS, "input")
    for one in common:
        add(one, _INPUTS, "input of this model, and so no request parameter")
    if "sampling_parameters" in given:
        for name, parameter in _sampling_parameters(given["sampling_parameters"].value, prefix).items():
            # vLLM's parameters are null where they are not given.
            if parameter is not None:
                add(Given(name, parameter), SAMPLING_PARAMETERS, "parameter that sampling_parameters may have")
    return RawRow(given, prefix)


def _agree(field: Field, first: Given, second: Given) -> bool:
    """Return whether both have the field's type and one value; FP32 in its own precision."""
    try:
        one, other = field.bound.parse(first.value), field.bound.parse(second.value)
    except BoundError:
        return False
    if field.type != "FP32":
        return one == other
    # What is beyond FP32 is infinite in both.
    with np.errstate(over="ignore"):
        return np.array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def _sampling_parameters(value: object, prefix: str) -> dict[str, object]:
    try:
        read = dict(read_object(value))
    except BoundError as error:
        raise InvalidRequest(f"{prefix}sampling_parameters is ", error.value, f"; it must be {error.bound}") from None
    if read.get("top_k") in (-1, "-1"):
        # What vLLM's clients send for "off".
        read["top_k"] = 0
    return read


def _near(name: str) -> str:
    near = get_close_matches(name[:64], [*FIELDS, *ALIASES], 1)
    return f" (did you mean {near[0]!r}?)" if near else ""
