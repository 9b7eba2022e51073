"""API keys: a file with a key a line, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from starlette.requests import Request

from triton_llama_openai.errors import ApiError
from triton_llama_openai.settings import InvalidSettingsError


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
        """Accept a header `Bearer <key>`, and note the key's digest; raises ApiError 401 for anything else."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(401, "no API key; send the header Authorization: Bearer <key>", None, "invalid_api_key")
        # Headers are bytes, which Starlette reads as Latin-1.
        digest = _digest(key.strip().encode("latin-1"))
        # Every key is compared, so that the time tells nothing about which one was close.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise ApiError(401, "the API key is wrong", None, "invalid_api_key")
        request.state.record.key_digest = digest


def _digest(key: bytes) -> bytes:
    # Digests have one length, whatever the keys'.
    return hashlib.sha256(key).digest()
