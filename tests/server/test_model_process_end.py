"""How the model's process ends, which tritonserver doesn't tell: in order, not in a signal."""

from __future__ import annotations

import sys
from pathlib import Path

from server.clients import ask, generate
from server.fleet import copy_repository
from server.servers import new_server, until
from triton_local.wheel import STUB_NAME, find_wheel


def test_the_models_process_ends_in_a_signal(tmp_path: Path) -> None:
    """Our metrics, destroyed with the interpreter and no sooner, ended it in signal 11 on Triton 2.51."""
    repository = copy_repository(tmp_path)
    status = tmp_path / "status"
    real = find_wheel([Path(folder) for folder in sys.path]).stub(f"{sys.version_info.major}.{sys.version_info.minor}")
    # The Python backend takes a model's own stub before its own.
    stub = repository / "llama" / STUB_NAME
    stub.write_text(f"#!/bin/sh\n'{real}' \"$@\"\necho $? > '{status}.new'\nmv '{status}.new' '{status}'\n")
    stub.chmod(0o755)
    with new_server(repository=repository) as server:
        ask(server, generate, text_input="The class", max_tokens=3)
        server.terminate()
        assert server.wait() == 0
    until(status.exists, lambda: "the model's process has ended")
    assert status.read_text() == "0\n"
