"""docs/openai.md agrees with the endpoint's schemas, settings, metrics and paths."""

from __future__ import annotations

import re
from typing import Literal, get_args, get_origin

import pytest
from contract.code_blocks import ROOT, table
from prometheus_client.parser import text_string_to_metric_families
from triton_llama_openai.metrics import Metrics
from triton_llama_openai.protocol.chat import ChatRequest
from triton_llama_openai.protocol.completions import CompletionRequest
from triton_llama_openai.protocol.responses import ResponsesRequest
from triton_llama_openai.protocol.sampling import SamplingRequest
from triton_llama_openai.protocol.schema import IGNORED, Schema
from triton_llama_openai.protocol.tokenization import DetokenizeRequest, TokenizeRequest
from triton_llama_openai.settings import Settings

FOLDER = ROOT / "frontend" / "triton_llama_openai"
PAGE = (ROOT / "docs" / "openai.md").read_text()
SCHEMAS: dict[str, type[SamplingRequest]] = {"chat": ChatRequest, "completions": CompletionRequest}


def _listed(path: str) -> dict[str, str]:
    """Return the status of each field that the page lists for a path."""
    statuses: dict[str, str] = {}
    for names, paths, status, *_ in table(PAGE, "field"):
        for name in re.findall(r"`(\w+)`", names):
            if paths in ("both", path):
                assert name not in statuses, f"{name} is listed twice"
                statuses[name] = status
    return statuses


def _status(schema: type[Schema], name: str) -> str:
    """Return what the schema does with a field."""
    field = schema.model_fields[name]
    if field.json_schema_extra == IGNORED:
        return "ignored"
    kinds = get_args(field.annotation)
    only_one_boolean = any(get_origin(kind) is Literal and set(get_args(kind)) <= {True, False} for kind in kinds)
    return "refused" if only_one_boolean or object in kinds else "supported"


@pytest.mark.parametrize("path", SCHEMAS)
def test_the_page_lists_every_field_with_what_the_schema_does_with_it(path: str) -> None:
    schema = SCHEMAS[path]
    listed = _listed(path)
    expected = {name: _status(schema, name) for name in schema.model_fields}
    if path == "chat":
        # The page has one line for both paths.
        expected["echo"] = "supported"
    # The page's line names which of these the completions have.
    bookkeeping = {"metadata", "store", "service_tier", "safety_identifier"} if path == "completions" else set()
    assert {name: status for name, status in listed.items() if name not in bookkeeping} == expected


def test_the_page_lists_every_field_of_a_response_with_what_is_done() -> None:
    rows = [(name, row[1]) for row in table(PAGE, "field of a response") for name in re.findall(r"`(\w+)`", row[0])]
    listed = dict(rows)
    assert len(listed) == len(rows)
    assert listed == {name: _status(ResponsesRequest, name) for name in ResponsesRequest.model_fields}


@pytest.mark.parametrize(("path", "schema"), [("tokenize", TokenizeRequest), ("detokenize", DetokenizeRequest)])
def test_the_page_lists_every_field_of_the_paths_about_tokens(path: str, schema: type[Schema]) -> None:
    rows = [row for row in table(PAGE, "field of a path") if row[1] in ("all", path)]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row[0])} == set(schema.model_fields)


def test_the_page_lists_every_setting_with_its_default() -> None:
    rows = {re.findall(r"`(\w+)`", row[0])[0]: row[1] for row in table(PAGE, "setting")}
    assert list(rows) == list(Settings.model_fields)
    for name, shown in rows.items():
        default = Settings.model_fields[name].default
        assert default is None or shown == f"`{default}`", name


def test_the_page_lists_every_metric_with_its_help() -> None:
    rows = {re.findall(r"`(\w+)`", row[0])[0].removesuffix("_total"): (row[1], row[2]) for row in table(PAGE, "metric")}
    families = text_string_to_metric_families(Metrics().page().decode())
    assert rows == {
        family.name: (family.type, family.documentation) for family in families if not family.name.endswith("_created")
    }


def test_the_page_lists_every_path() -> None:
    routes = re.findall(r'@router\.(get|post)\("([^"]+)"', (FOLDER / "app.py").read_text())
    listed = set(re.findall(r"`((?:GET|POST) /[^`]*)`", "\n".join(row[0] for row in table(PAGE, "path"))))
    assert {f"{method.upper()} {path.replace(':path', '')}" for method, path in routes} == listed
