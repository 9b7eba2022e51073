"""A disk that is full: a log is given up and serving goes on, a download ends with one line that says why."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine.small_checkpoints import save_small
from llama_engine.text.tokenizer import Tokenizer
from triton_local.errors import InvalidSettingError
from triton_local.server_log import ServerLog
from unit.hubs import MODEL, running_hub

FULL = Path("/dev/full")
"""What is written there never fits."""

ROOM = 1 << 18
"""Bytes that a file may have, for a process that downloads more: as on a disk that becomes full, only without one."""

# In a process of its own: the library reads its environment once, and the bound is the whole process's.
LOADS = f"""
import resource, sys
import torch
from llama_engine.model.loader import load_checkpoint
from llama_engine.errors import CheckpointError
from llama_engine.settings import Settings
resource.setrlimit(resource.RLIMIT_FSIZE, ({ROOM}, {ROOM}))
try:
    load_checkpoint(Settings(model=sys.argv[1], quantization="none"), torch.device("cpu"))
except CheckpointError as error:
    print(error)
"""


def test_a_full_disk_loses_lines_for_those_who_listen_or_is_not_told() -> None:
    heard: list[str] = []
    with ServerLog(FULL, heard.append) as log:
        for line in ("one", "two", "three"):
            log.add(line)
        assert log.lines() == [
            "one",
            "triton_local: the log file can't be written any more: No space left on device",
            "two",
            "three",
        ]
    assert heard == ["one", "two", "three"]
    # A file that was left open would be told now, as a warning.
    gc.collect()


def test_a_log_in_a_place_that_cannot_be_is_given_up_silently(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, reason in ((tmp_path, "Is a directory"), (tmp_path / "file" / "log", "Not a directory")):
        with pytest.raises(InvalidSettingError) as refused:
            ServerLog(place, None)
        assert str(refused.value) == f"log file {place} can't be written: {reason}"


def test_a_download_that_does_not_fit_is_served_or_does_not_say_why(tmp_path: Path, tokenizer: Tokenizer) -> None:
    weights = save_small(tmp_path / "small", tokenizer) / "model.safetensors"
    assert weights.stat().st_size > ROOM
    with running_hub(tmp_path / "small") as hub:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "LLAMA_"))}
        environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        command = [sys.executable, "-c", LOADS, MODEL]
        loading = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=240, check=False
        )  # fmt: skip
        assert hub.downloads("model.safetensors") >= 1
    assert (loading.returncode, loading.stderr) == (0, "")
    (reason,) = loading.stdout.splitlines()
    assert reason.startswith(f"can't load {MODEL}: ")
    assert "File too large" in reason
