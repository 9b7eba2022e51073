"""A setting that makes no sense stops the server before it serves, with a line that says which, and what is allowed."""

from __future__ import annotations

import pytest
from server.servers import serve
from triton_local.errors import StartFailedError


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"LLAMA_SLOTS": "0"}, ("LLAMA_SLOTS", "slots", "'0'", "from 1 to 1024")),
        ({"LLAMA_NONSENSE": "1"}, ("LLAMA_NONSENSE", "unknown setting", "known are", "quantization")),
        ({"LLAMA_MODEL": "/does/not/exist"}, ("model", "'/does/not/exist'", "no such folder")),
        (
            {"LLAMA_MEMORY_FRACTION": "0.05", "LLAMA_SLOTS": "1024"},
            ("memory plan", "1024 slots", "512 tokens", "does not fit", "lower slots to"),
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_the_server_refuses_and_says_why(environment: dict[str, str], said: tuple[str, ...]) -> None:
    with pytest.raises(StartFailedError) as refusal, serve(environment=environment):
        pass
    reason = str(refusal.value)
    assert "\n" not in reason
    assert "the model refused to load: llama: " in reason
    for part in said:
        assert part in reason
