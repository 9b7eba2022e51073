"""Errors in OpenAI's form, below /v1/messages in Anthropic's, and what Triton's and pydantic's errors become.

    {"error": {"message": "...", "type": "invalid_request_error", "param": "temperature", "code": "invalid_value"}}

`message` names the field, its value and the bound; `param` is the field, with its position in lists:
`messages[0].content`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.responses import JSONResponse, Response
from starlette.types import Scope
from triton_llama.errors import (
    LlamaConnectionError,
    LlamaTimeoutError,
    OverloadedError,
    RejectedInputError,
    TritonLlamaError,
)

_SHOWN = 80
"""Characters of a refused value in its message."""

_MESSAGES_PATH = "/v1/messages"
_MESSAGES_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's classes of errors by status; of others it is `invalid_request_error` below 500, else `api_error`."""


class ClientLeftError(Exception):
    """The client has closed its connection, so its answer has no reader."""


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def type(self) -> str:
        """OpenAI's class of the error."""
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, object]:
        """Return the JSON that the client gets."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def messages_body(self, request_id: str) -> dict[str, object]:
        """Return the JSON that a client of the Messages API gets."""
        kind = _MESSAGES_ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}, "request_id": request_id}


def error_response(error: ApiError, scope: Scope) -> Response:
    """Return an error as the client gets it. scope: the request's."""
    path = scope["path"]
    if path == _MESSAGES_PATH or path.startswith((f"{_MESSAGES_PATH}/", f"/v1{_MESSAGES_PATH}")):
        body = error.messages_body(scope["state"]["record"].id)
    else:
        body = error.body()
    # An overloaded or starting model may be ready in a second.
    headers = {"retry-after": "1"} if error.status == 503 else {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(body, error.status, headers)


def invalid(param: str, value: object, bound: str) -> ApiError:
    """Return the error of a field whose value violates a bound."""
    return ApiError(400, f"{param} is {shorten(value)}; it must be {bound}", param, "invalid_value")


def unsupported(param: str, reason: str) -> ApiError:
    """Return the error of a field, or a value of it, that this endpoint doesn't support."""
    return ApiError(400, f"{param} is not supported: {reason}", param, "unsupported_parameter")


def prompt_too_long(param: str, tokens: int, context: int) -> ApiError:
    """Return the error of a prompt that leaves no room for a completion, as the model would word it."""
    message = (
        f"{param} is {tokens} tokens; it must be at most {context - 1} tokens (max_model_len - 1); "
        f"the prompt is too long: this model's maximum context length is {context} tokens"
    )
    return ApiError(400, message, param, "context_length_exceeded")


def shorten(value: object) -> str:
    """Return a value as a message shows it."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


_MAX_VIOLATIONS = 1000
"""Violations of a schema that are read; pydantic makes objects of each, and a body may have hundreds of thousands."""

_CODES = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}


def from_validation(error: ValidationError) -> ApiError:
    """Convert pydantic's error to a response (400) for its first violation, or for their number."""
    if error.error_count() > _MAX_VIOLATIONS:
        return ApiError(400, f"the body violates the schema {error.error_count()} times", None, "invalid_value")
    first = error.errors(include_url=False)[0]
    param = _path(first)
    kind = first["type"]
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['msg']}", None, "invalid_json")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _tag_error(first, param)
    if kind == "missing":
        return ApiError(400, f"{param} is missing", param, _CODES[kind])
    if kind == "extra_forbidden":
        param = param or str(first["loc"][-1])
        return ApiError(400, f"{param} is unknown: no field of this request has that name", param, _CODES[kind])
    if kind == "unsupported_parameter":
        return ApiError(400, f"{param} is not supported: {first['msg']}", param, kind)
    bound = re.sub(r"^(Input|String|List|Dictionary|Value) should ", "it must ", first["msg"])
    bound = re.sub(r" after validation, not (\d+|more)$", "", bound)
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return ApiError(400, f"{param or 'the body'} is {shorten(first['input'])}; {bound}", param or None, code)


def _tag_error(details: ErrorDetails, param: str) -> ApiError:
    """Return the error of an object whose kind, such as a message's role, is unknown or missing."""
    context = details["ctx"]
    param = f"{param}.{context['discriminator'].strip(chr(39))}"
    if details["type"] == "union_tag_not_found":
        return ApiError(400, f"{param} is missing", param, _CODES["missing"])
    return invalid(param, context["tag"], f"one of {context['expected_tags']}")


_TAGGED = {"messages", "response_format", "input", "format"}
"""Fields whose values pydantic tells apart by a role or type, which is then the next part of an error's place."""


def _path(details: ErrorDetails) -> str:
    """Return `messages[0].content` for ("messages", 0, "user", "content"); other unions' tags are in angle brackets."""
    path, follows_tagged = "", False
    for part in details["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif (part.startswith("<") and part.endswith(">")) or part == "[key]":
            continue
        elif follows_tagged:
            follows_tagged = False
        else:
            path += f".{part}" if path else part
            follows_tagged = part in _TAGGED
    return path


def from_triton(error: TritonLlamaError, fields: Mapping[str, str]) -> ApiError:
    """Return what a client gets for an error of Triton or the model.

    fields: the request's field for each input of the model, such as `stop` for `stop_words`.
    """
    message = str(error)
    if isinstance(error, RejectedInputError):
        names = error.inputs
        if not all(name in fields for name in names):
            return ApiError(400, message, None, "invalid_value")
        params = [fields[name] for name in names]
        message = ", ".join(params) + message.removeprefix(", ".join(names))
        if params == ["model"]:
            return ApiError(404, message, "model", "model_not_found")
        code = "context_length_exceeded" if error.code == "CONTEXT_LENGTH" else "invalid_value"
        return ApiError(400, message, params[0], code)
    if isinstance(error, OverloadedError):
        return ApiError(503, message, None, "overloaded")
    if isinstance(error, LlamaConnectionError):
        return ApiError(503, message, None, "engine_unavailable")
    if isinstance(error, LlamaTimeoutError):
        return ApiError(504, message, None, "timeout")
    return ApiError(500, message, None, "internal_error")
