"""Requests that name an adapter, and requests that load or unload one, as the parser reads them."""

from typing import Any

import pytest
from engine.parsing import parse, refusal, tensor
from llama_engine.errors import InvalidRequest, OtherAdapter
from llama_engine.request.adapter_choice import Adapter, AdapterCommand, parse_command
from llama_engine.text.tokenizer import Tokenizer

LOADED = SQL, JSON = Adapter("sql", 7, "d1", 16, 1), Adapter("org/json", 0, "d2", 8, 2)
OPTIONS = {"adapters": lambda: LOADED}


@pytest.mark.parametrize(
    ("values", "adapter"),
    [
        ({}, None),
        ({"lora_name": "", "lora_task_id": 0, "lora_digest": ""}, None),
        ({"lora_name": "org/json"}, JSON),
        ({"lora_task_id": 7}, SQL),
        ({"lora_name": "sql", "lora_task_id": 7, "lora_digest": "d1"}, SQL),
        ({"sampling_parameters": '{"lora_name": "sql"}'}, SQL),
    ],
)
def test_a_request_names_its_adapter(tokenizer: Tokenizer, values: dict[str, object], adapter: Adapter | None) -> None:
    assert parse(tokenizer, None, OPTIONS, **values).adapter == adapter


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lora_name": "x"}, "lora_name is 'x'; it must be one of sql, org/json"),
        ({"lora_task_id": 8}, "lora_task_id is 8; it must be one of 7"),
        ({"lora_name": "org/json", "lora_task_id": 7}, "lora_task_id is 7; it must be that of 'org/json', 0, beside"),
        ({"lora_digest": "d1"}, "lora_digest is given; it must be missing without lora_name and lora_task_id"),
        ({"lora_name": "sql\n"}, "lora_name is 'sql\\n'; it must be 1 to 128 characters of"),
        ({"lora_name": "x" * 129}, "it must be 1 to 128 characters of"),
        ({"lora_name": "sql", "lora_path": "x"}, "lora_path is given beside a prompt; one of them must be missing"),
    ],
)
def test_an_adapter_that_cannot_serve_the_request_is_refused(
    tokenizer: Tokenizer, values: dict[str, object], message: str
) -> None:
    assert message in refusal(tokenizer, None, OPTIONS, **values)


def test_a_name_is_refused_where_none_is_loaded(tokenizer: Tokenizer) -> None:
    refused = refusal(tokenizer, lora_name="sql")
    assert refused == "lora_name is 'sql'; it must be missing: no adapter with one is loaded"


@pytest.mark.parametrize(("field", "value", "named"), [("lora_name", "sql", "'sql'"), ("lora_task_id", 7, "7")])
def test_another_version_of_an_adapter_has_a_code_of_its_own(
    tokenizer: Tokenizer, field: str, value: object, named: str
) -> None:
    message = rf"^{field} {named} is another version than the one of the request's lora_digest$"
    with pytest.raises(OtherAdapter, match=message) as refused:
        parse(tokenizer, None, OPTIONS, lora_digest="d2", **{field: value})
    assert refused.value.code == "OTHER_ADAPTER"


def _command(**rows: list[Any]) -> AdapterCommand:
    return parse_command({name: tensor(name, values) for name, values in rows.items()}, {})


def test_a_command_has_a_name_a_number_and_a_path() -> None:
    command = _command(lora_name=["sql"], lora_task_id=[2**64 - 1], lora_path=["v1/sql"])
    assert command == AdapterCommand("sql", 2**64 - 1, "v1/sql")
    assert _command(lora_name=["sql"], lora_path=[""]) == AdapterCommand("sql", 0, "")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"lora_path": ["x"]}, "lora_name is missing; it must be the name of an adapter beside lora_path"),
        ({"lora_path": ["x"], "lora_name": [""]}, "lora_name is missing"),
        ({"lora_path": ["x"], "lora_name": ["../x y"]}, "lora_name is '../x y'; it must be 1 to 128 characters"),
        ({"lora_path": ["x"], "lora_name": ["a"], "seed": [1]}, "seed is given beside lora_path"),
        ({"lora_path": ["x" * 4097], "lora_name": ["a"]}, "lora_path is a text of 4097 bytes; it must be at most 4096"),
        ({"lora_path": ["x"] * 2, "lora_name": ["a", "b"]}, "lora_path is given in a batch of 2"),
    ],
)
def test_a_command_with_anything_else_is_refused(rows: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        _command(**rows)
