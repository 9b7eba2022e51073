"""API keys: a file with a key a line, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from starlette.requests import Request

from triton_llama_openai.errors import ApiError
from triton_llama_openai.settings import InvalidSettingsError

_KEY_HEADERS = ("x-api-key", "api-key")
"""Anthropic's and Azure's, beside `Authorization: Bearer`."""


class ApiKeys:
    """The keys that are accepted, as digests. None of them is shown or logged."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    @classmethod
    def read(cls, file: Path) -> ApiKeys:
        """Read a file; blank lines and lines that begin with # are no keys.

        Raises:
            InvalidSettingsError: it can't be read, or has no key.
        """
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidSettingsError(f"api_keys_file {file} can't be read: {error}") from error
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise InvalidSettingsError(f"api_keys_file {file} has no key; leave the setting out to ask for none")
        return cls(keys)

    # async: FastAPI would run a plain function in a thread.
    async def authorize(self, request: Request) -> None:
        """Accept a key of the headers, and note its digest; raises ApiError 401 without a known one."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        keys = [token if scheme.lower() == "bearer" else "", *(request.headers.get(name, "") for name in _KEY_HEADERS)]
        # Headers are bytes, which Starlette reads as Latin-1.
        digests = [_digest(key.strip().encode("latin-1")) for key in keys if key.strip()]
        if not digests:
            message = "no API key; send the header Authorization: Bearer <key>, x-api-key: <key> or api-key: <key>"
            raise ApiError(401, message, None, "invalid_api_key")
        # Every key is compared, so that the time tells nothing about which one was close.
        matches = [digest for digest in digests for known in self._digests if hmac.compare_digest(digest, known)]
        if not matches:
            raise ApiError(401, "the API key is wrong", None, "invalid_api_key")
        request.state.record.key_digest = matches[0]


def _digest(key: bytes) -> bytes:
    # Digests have one length, whatever the keys'.
    return hashlib.sha256(key).digest()
