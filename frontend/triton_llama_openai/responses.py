"""What the answers of chats and completions share: their head, the stop reason, JSON in UTF-8."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence

from triton_llama_openai.engine_client import Chunk

Json = dict[str, object]


def response_head(prefix: str, kind: str, model: str, fingerprint: str | None) -> Json:
    """Return the fields that every object of one answer begins with; its id begins with `prefix`."""
    return {
        "id": f"{prefix}-{secrets.token_hex(16)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint,
    }


def stop_reason(chunk: Chunk, stop_strings: Sequence[str]) -> str | int | None:
    """Return vLLM's stop_reason: the stop string, the stop token's id, or None for an end token or the length."""
    reason = chunk.stop_reason
    if not reason or reason in stop_strings or not reason.isdecimal():
        return reason or None
    return int(reason)


def dumps(value: object) -> bytes:
    """Return JSON in UTF-8."""
    # A lone surrogate, which a call's arguments may escape, becomes an escape again.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")
