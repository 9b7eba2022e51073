"""A setting that makes no sense stops the server before it serves, with a line that says which, and what is allowed."""

from __future__ import annotations

from functools import partial

import pytest
from server.clients import at_once
from server.servers import new_server
from triton_local.errors import StartFailedError

REFUSED: list[tuple[dict[str, str], tuple[str, ...]]] = [
    ({"LLAMA_SLOTS": "0"}, ("LLAMA_SLOTS", "slots", "'0'", "from 1 to 1024")),
    ({"LLAMA_NONSENSE": "1"}, ("LLAMA_NONSENSE", "unknown setting", "known are", "quantization")),
    ({"LLAMA_MODEL": "/does/not/exist"}, ("model", "'/does/not/exist'", "no such folder")),
    (
        {"LLAMA_MEMORY_FRACTION": "0.05", "LLAMA_SLOTS": "1024"},
        ("memory plan", "1024 slots", "512 tokens", "does not fit", "lower slots to"),
    ),
]


def test_a_server_serves_or_does_not_say_why() -> None:
    """All of them at once: each start is some seconds of imports before a setting is looked at."""
    reasons = at_once([partial(_refusal, environment) for environment, _ in REFUSED])
    for reason, (_, said) in zip(reasons, REFUSED, strict=True):
        assert "\n" not in reason
        assert "the model refused to load: llama: " in reason
        for part in said:
            assert part in reason


def _refusal(environment: dict[str, str]) -> str:
    server = new_server(environment=environment)
    try:
        with pytest.raises(StartFailedError) as refusal:
            server.start()
    finally:
        server.stop()
    return str(refusal.value)
