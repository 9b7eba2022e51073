"""A server that can't serve does not start, and says in one line which setting or file is wrong."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import pytest
from server.clients import at_once
from server.servers import EMBEDDED, ENVIRONMENT, new_server
from triton_local.errors import StartFailedError
from triton_local.server import LocalTriton

WEIGHTS = "model.safetensors"
MISSING_BYTES = 1_000_000

REFUSED: list[tuple[dict[str, str], tuple[str, ...]]] = [
    ({"LLAMA_SLOTS": "0"}, ("LLAMA_SLOTS", "slots", "'0'", "from 1 to 1024")),
    ({"LLAMA_NONSENSE": "1"}, ("LLAMA_NONSENSE", "unknown setting", "known are", "quantization")),
    ({"LLAMA_MODEL": "/does/not/exist"}, ("model", "'/does/not/exist'", "no such folder")),
    (
        {"LLAMA_MEMORY_FRACTION": "0.05", "LLAMA_SLOTS": "1024"},
        ("memory plan", "1024 slots", "512 tokens", "does not fit", "lower slots to"),
    ),
]


def _refusal(server: LocalTriton) -> str:
    try:
        with pytest.raises(StartFailedError) as refusal:
            server.start()
    finally:
        server.stop()
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_bad_settings_are_refused_with_key_value_and_bound() -> None:
    """All at once: each start imports for some seconds before it reads a setting."""
    reasons = at_once([partial(_refusal, new_server(environment=environment)) for environment, _ in REFUSED])
    for reason, (_, parts) in zip(reasons, REFUSED, strict=True):
        assert [part for part in ("the model refused to load: llama: ", *parts) if part not in reason] == [], reason


def test_a_truncated_checkpoint_is_refused_although_the_log_file_is_on_a_full_disk(tmp_path: Path) -> None:
    folder = tmp_path / "half"
    shutil.copytree(EMBEDDED, folder)
    size = (folder / WEIGHTS).stat().st_size
    os.truncate(folder / WEIGHTS, size - MISSING_BYTES)
    server = LocalTriton(model=str(folder), environment=ENVIRONMENT, ready_timeout=240.0, log_file="/dev/full")
    reason = f"can't load {folder}: {WEIGHTS}: it has {size - MISSING_BYTES} bytes; its header says {size}"
    assert _refusal(server).endswith(f"the model refused to load: llama: {reason}")
    assert "Traceback" not in server.log_text()
    assert "the log file can't be written any more: No space left on device" in server.log_text()
    assert not Path(f"/proc/{server.pid}").exists()
