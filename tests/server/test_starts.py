"""A server that can't serve does not start, and says in one line why; from a prepared checkpoint it starts without the
hub, writes nothing, and has the texts of the original. What else is refused is tested in tests/engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from server.clients import ask, generate
from server.servers import EMBEDDED, facts, in_use, new_server
from triton_local.errors import StartFailedError
from triton_local.server import LocalTriton
from triton_prepare.prepare import prepare

REQUESTS = [
    {"text_input": "Return a list of", "max_tokens": 40, "temperature": 0.0},
    {"text_input": "A dictionary is", "max_tokens": 40, "temperature": 0.8, "top_p": 0.9, "seed": 7},
    # Missing inputs come from the checkpoint's generation config.
    {"text_input": "This module provides", "max_tokens": 30, "seed": 11},
    {"text_input": "class C:\n    def é(self):", "max_tokens": 30, "temperature": 0.0, "stop_words": ["\n\n"]},
]


def test_an_unknown_setting_is_refused_in_one_line() -> None:
    server = new_server(environment={"LLAMA_NONSENSE": "1"})
    with pytest.raises(StartFailedError) as refusal:
        server.start()
    assert not Path(f"/proc/{server.pid}").exists()
    assert "Traceback" not in server.log_text()
    reason = str(refusal.value)
    assert "\n" not in reason
    for part in (
        "the model refused to load: llama: ",
        "LLAMA_NONSENSE",
        "unknown setting",
        "known are",
        "quantization",
    ):
        assert part in reason


def _content(folder: Path) -> dict[str, tuple[str, int]]:
    """Return digest and modification time of every file."""
    return {
        path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in folder.iterdir()
    }


class Prepared(NamedTuple):
    """A server of a prepared checkpoint; before: the files' content before it started."""

    server: LocalTriton
    folder: Path
    before: dict[str, tuple[str, int]]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepared]:
    folder = tmp_path_factory.mktemp("prepared") / "pydoc-llama-int8"
    prepare(str(EMBEDDED), None, folder, "cpu")
    before = _content(folder)
    offline = new_server(environment={"LLAMA_MODEL": str(folder), "HF_HUB_OFFLINE": "1"})
    with offline as server, in_use("prepared", server):
        yield Prepared(server, folder, before)


@pytest.mark.long
def test_a_prepared_checkpoint_answers_as_the_original(prepared: Prepared, triton: LocalTriton) -> None:
    # One at a time: sums of floats may round differently in a batch of another size.
    answers = [[ask(server, generate, **inputs) for inputs in REQUESTS] for server in (triton, prepared.server)]
    assert answers[1] == answers[0]
    assert all(answer.num_output_tokens > 1 for answer in answers[0])
    # The same weights in the same precision, and at the same threshold.
    assert facts(prepared.server).partition("llama: loaded ")[2] == facts(triton).partition("llama: loaded ")[2]


@pytest.mark.long
def test_the_log_names_a_prepared_checkpoint(prepared: Prepared, triton: LocalTriton) -> None:
    quantized = "llama: prepared checkpoint, quantized from the folder pydoc-llama revision sha256:"
    assert quantized in prepared.server.log_text()
    assert "llama: prepared checkpoint" not in triton.log_text()


@pytest.mark.long
def test_a_prepared_checkpoint_is_not_written_to(prepared: Prepared) -> None:
    ask(prepared.server, generate, **REQUESTS[0])
    assert _content(prepared.folder) == prepared.before
