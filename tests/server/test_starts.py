"""A server that can't serve does not start, and says in one line which setting or file is wrong; from a prepared
checkpoint it starts without the hub, writes nothing, and has the texts of the original.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
from server.clients import ask, at_once, generate
from server.servers import EMBEDDED, facts, in_use, new_server
from triton_local.errors import StartFailedError
from triton_local.server import LocalTriton
from triton_prepare.prepare import prepare

WEIGHTS = "model.safetensors"

REFUSED: list[tuple[dict[str, str], tuple[str, ...]]] = [
    ({"LLAMA_SLOTS": "0"}, ("LLAMA_SLOTS", "slots", "'0'", "from 1 to 1024")),
    ({"LLAMA_NONSENSE": "1"}, ("LLAMA_NONSENSE", "unknown setting", "known are", "quantization")),
    (
        {"LLAMA_MEMORY_FRACTION": "0.05", "LLAMA_SLOTS": "1024"},
        ("memory plan", "1024 slots", "512 tokens", "does not fit", "lower slots to"),
    ),
]

REQUESTS = [
    {"text_input": "Return a list of", "max_tokens": 40, "temperature": 0.0},
    {"text_input": "A dictionary is", "max_tokens": 40, "temperature": 0.8, "top_p": 0.9, "seed": 7},
    # Missing inputs come from the checkpoint's generation config.
    {"text_input": "This module provides", "max_tokens": 30, "seed": 11},
    {"text_input": "class C:\n    def é(self):", "max_tokens": 30, "temperature": 0.0, "stop_words": ["\n\n"]},
]


def _refusal(server: LocalTriton) -> str:
    with pytest.raises(StartFailedError) as refusal:
        server.start()
    assert not Path(f"/proc/{server.pid}").exists()
    assert "Traceback" not in server.log_text()
    return str(refusal.value)


def test_bad_settings_and_a_truncated_checkpoint_are_refused_in_one_line(tmp_path: Path) -> None:
    """All at once: each start imports for some seconds before it reads a setting."""
    folder = tmp_path / "half"
    shutil.copytree(EMBEDDED, folder)
    size = (folder / WEIGHTS).stat().st_size
    os.truncate(folder / WEIGHTS, size - 1_000_000)
    truncated = f"can't load {folder}: {WEIGHTS}: it has {size - 1_000_000} bytes; its header says {size}"
    refused = [*REFUSED, ({"LLAMA_MODEL": str(folder)}, (truncated,))]
    reasons = at_once([partial(_refusal, new_server(environment=environment)) for environment, _ in refused])
    for reason, (_, parts) in zip(reasons, refused, strict=True):
        assert "\n" not in reason
        assert [part for part in ("the model refused to load: llama: ", *parts) if part not in reason] == [], reason


def _content(folder: Path) -> dict[str, tuple[str, int]]:
    """Return digest and modification time of every file."""
    return {
        path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in folder.iterdir()
    }


def test_a_prepared_checkpoint_answers_as_the_original_and_is_not_written_to(
    tmp_path: Path, triton: LocalTriton
) -> None:
    folder = tmp_path / "pydoc-llama-int8"
    prepare(str(EMBEDDED), None, folder, "cpu")
    before = _content(folder)
    offline = new_server(environment={"LLAMA_MODEL": str(folder), "HF_HUB_OFFLINE": "1"})
    with offline as prepared, in_use("prepared", prepared):
        # One at a time: sums of floats may round differently in a batch of another size.
        answers = [[ask(server, generate, **inputs) for inputs in REQUESTS] for server in (triton, prepared)]
        assert answers[1] == answers[0]
        assert all(answer.num_output_tokens > 1 for answer in answers[0])
        # The same weights in the same precision, and at the same threshold.
        assert facts(prepared).partition("llama: loaded ")[2] == facts(triton).partition("llama: loaded ")[2]
        quantized = "llama: prepared checkpoint, quantized from the folder pydoc-llama revision sha256:"
        assert quantized in prepared.log_text()
    assert "llama: prepared checkpoint" not in triton.log_text()
    assert _content(folder) == before
