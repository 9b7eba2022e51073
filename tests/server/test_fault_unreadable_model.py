"""A checkpoint that was cut short, and a disk that is full: the start ends with one line that names file and reason."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from server.servers import EMBEDDED, ENVIRONMENT
from triton_local.errors import StartFailedError
from triton_local.server import LocalTriton

WEIGHTS = "model.safetensors"
LOST = 1_000_000
"""Bytes of the weights that did not arrive."""


def test_a_server_serves_half_a_checkpoint_or_needs_its_log_file_to_say_so(tmp_path: Path) -> None:
    folder = tmp_path / "half"
    shutil.copytree(EMBEDDED, folder)
    whole = (folder / WEIGHTS).stat().st_size
    os.truncate(folder / WEIGHTS, whole - LOST)
    server = LocalTriton(
        model=str(folder), environment=ENVIRONMENT, ready_timeout=240.0, log_file="/dev/full"
    )  # fmt: skip
    try:
        with pytest.raises(StartFailedError) as refused:
            server.start()
    finally:
        server.stop()
    reason = f"can't load {folder}: {WEIGHTS}: it has {whole - LOST} bytes; its header says {whole}"
    message = str(refused.value)
    assert "\n" not in message
    assert message.endswith(f"the model refused to load: llama: {reason}")
    assert "Traceback" not in server.log_text()
    assert "the log file can't be written any more: No space left on device" in server.log_text()
    assert not Path(f"/proc/{server.pid}").exists()
