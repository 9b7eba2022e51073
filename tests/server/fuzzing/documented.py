"""Requests that an OpenAPI document of the Open Inference Protocol describes, and ones that break it in one place.

Schemathesis makes them from `open_inference.yaml`, and checks that each answer has a status, a content type and a body
that the document has.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import requests
import schemathesis
import yaml
from hypothesis.strategies import SearchStrategy
from schemathesis import GenerationMode
from schemathesis.errors import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from server.clients import DTYPES
from server.fuzzing import values
from server.fuzzing.attacks import CLOSED, GONE, HUNG, TIMEOUT_S, Outcome, errors
from server.fuzzing.values import survivable
from triton_local.server import LocalTriton

DOCUMENT = Path(__file__).with_name("open_inference.yaml")
_CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
_TYPES = {"INT32": "integer", "UINT64": "integer", "FP32": "number", "BOOL": "boolean", "BYTES": "string"}


@dataclass(frozen=True)
class DocumentedCall:
    """A request after the document. It is shown as a curl command."""

    case: schemathesis.Case[Any]

    @property
    def route(self) -> str:
        """The document's operation."""
        return f"documented {self.case.operation.label}"

    def __repr__(self) -> str:
        shown: str = self.case.as_curl_command()
        return shown

    def send(self, server: LocalTriton, channel: grpc.Channel) -> Outcome:
        """Send it over HTTP, and compare the answer with the document."""
        address = f"http://{server.http_url}"
        try:
            response = self.case.call(base_url=address, headers={"Connection": "close"}, timeout=TIMEOUT_S)
        except requests.Timeout:
            return Outcome(HUNG)
        except requests.ConnectionError as error:
            return Outcome(GONE if "refused" in str(error) else CLOSED)
        status, said = str(response.status_code), tuple(errors(response.content))
        try:
            self.case.validate_response(response, checks=_CHECKS)
        except FailureGroup as failures:
            return Outcome(status, said, "; ".join(f"{one.title}: {one.message}" for one in failures.exceptions))
        return Outcome(status, said)


def documented_calls(model: str) -> SearchStrategy[DocumentedCall]:
    """Return requests to every operation. model: answers /infer as well as /generate."""
    document = yaml.safe_load(DOCUMENT.read_text())
    parts: dict[str, Any] = document["components"]
    parts["parameters"]["model"]["schema"]["enum"] = [model]
    parts["schemas"]["request_input"]["properties"]["name"]["enum"] = [*DTYPES]
    parts["schemas"]["generate_request"]["properties"] = {name: {"type": _TYPES[of]} for name, of in DTYPES.items()}
    operations = schemathesis.openapi.from_dict(document)
    # There are few different requests without a body.
    posts, gets = operations.include(method="POST"), operations.include(method="GET")
    cases = [part.as_strategy(generation_mode=mode) for part in (posts, posts, gets) for mode in GenerationMode]
    return values.weighted(*((1, one) for one in cases)).filter(_survivable).map(DocumentedCall)


def _survivable(case: schemathesis.Case[Any]) -> bool:
    tensors = case.body.get("inputs") if isinstance(case.body, dict) else None
    parts = tensors if isinstance(tensors, list) else []
    shapes = [tensor.get("shape") for tensor in parts if isinstance(tensor, dict)]
    return all(map(survivable, shapes)) and values.DEADLY not in str(case.body)
