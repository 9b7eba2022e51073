"""A model that refuses its settings ends the start, with its reason in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from end_to_end.servers import new_server
from triton_local.errors import StartFailedError


def test_an_unknown_setting_is_refused_in_one_line() -> None:
    server = new_server(environment={"LLAMA_NONSENSE": "1"})
    with pytest.raises(StartFailedError) as refusal:
        server.start()
    assert not Path(f"/proc/{server.pid}").exists()
    assert "Traceback" not in server.log_text()
    reason = str(refusal.value)
    assert "\n" not in reason
    assert "the model refused to load: llama: " in reason
    assert "LLAMA_NONSENSE" in reason
    assert "unknown setting" in reason
