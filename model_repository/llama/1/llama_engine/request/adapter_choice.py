"""The LoRA adapters that a request can name, and requests that load or unload one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from llama_engine.bounds import show
from llama_engine.errors import InvalidRequest, OtherAdapter
from llama_engine.request.parameters import LORA_PATH, RequestParameters
from llama_engine.request.raw_values import RawElement, RawInputs, RequestValues, raw_elements

if TYPE_CHECKING:
    from collections.abc import Iterable

_Key = TypeVar("_Key", str, int)

_COMMAND = ("lora_name", "lora_task_id", LORA_PATH)


@dataclass(frozen=True)
class Adapter:
    """A loaded adapter. number: its `lora_task_id`; 0 is none. index: the model runner's, from 1."""

    name: str
    number: int
    digest: str
    rank: int
    index: int


@dataclass(frozen=True)
class AdapterCommand:
    """Load the adapter in the folder `path` as `name`; an empty path unloads it. number: 0 is none."""

    name: str
    number: int
    path: str


def adapters_json(adapters: Iterable[Adapter]) -> str:
    """Return the loaded adapters as a JSON list of objects with name, number, digest and rank."""
    values = [{key: getattr(each, key) for key in ("name", "number", "digest", "rank")} for each in adapters]
    return json.dumps(values, separators=(",", ":"))


def requested_adapter(request: RequestParameters, element: RawElement, adapters: Sequence[Adapter]) -> Adapter | None:
    """Return the adapter that a request names; None is the base model. adapters: the loaded ones.

    Raises InvalidRequest if none of them has the name or the number, if these are of two adapters, and for a digest
    without either; OtherAdapter if the adapter's digest is another one than the request's.
    """
    by_name = _find(element, "lora_name", request.lora_name, {adapter.name: adapter for adapter in adapters})
    numbered = {adapter.number: adapter for adapter in adapters if adapter.number}
    by_number = _find(element, "lora_task_id", request.lora_task_id, numbered)
    if by_name and by_number and by_name != by_number:
        bound = f"that of {by_name.name!r}, {by_name.number}, beside this lora_name"
        raise element.refusal("lora_task_id", request.lora_task_id, bound)
    adapter = by_name or by_number
    if request.lora_digest and adapter is None:
        raise element.refusal("lora_digest", "given", "missing without lora_name and lora_task_id")
    if adapter and request.lora_digest not in ("", adapter.digest):
        named = f"lora_name {adapter.name!r}" if by_name else f"lora_task_id {adapter.number}"
        message = f"{named} is another version than the one of the request's lora_digest"
        raise OtherAdapter(f"{element.prefix}{message}")
    return adapter


def _find(element: RawElement, field: str, key: _Key, adapters: Mapping[_Key, Adapter]) -> Adapter | None:
    if not key:
        return None
    if key not in adapters:
        loaded = f"one of {', '.join(map(str, adapters))}"
        raise element.refusal(field, show(key), loaded if adapters else "missing: no adapter with one is loaded")
    return adapters[key]


def parse_command(inputs: RawInputs, values: RequestValues) -> AdapterCommand:
    """Return what a request with `lora_path` instead of a prompt asks for. Raises InvalidRequest."""
    elements = raw_elements(inputs, values)
    if others := sorted({raw.name for element in elements for raw in element.raw.values()}.difference(_COMMAND)):
        raise InvalidRequest(f"{others[0]} is given beside {LORA_PATH}, which has lora_name and lora_task_id alone")
    if len(elements) > 1:
        raise InvalidRequest(f"{LORA_PATH} is given in a batch of {len(elements)}; it must be the only one")
    (element,) = elements
    name, number, path = (element.read(field) if field in element else None for field in _COMMAND)
    if not name:
        raise element.refusal("lora_name", "missing", f"the name of an adapter beside {LORA_PATH}")
    assert isinstance(number, int | None)
    return AdapterCommand(str(name), number or 0, str(path))
