"""The launcher's ready file of a server that dies and is started again."""

from __future__ import annotations

from pathlib import Path

from triton_local.readiness import ReadyFile


def test_the_file_of_a_server_that_died_before_it_was_written_appears_when_it_serves_again(tmp_path: Path) -> None:
    path, said = tmp_path / "ready.json", list[str]()
    file = ReadyFile(path, said.append)
    file.server_serves(False)
    file.write({"http": "127.0.0.1:8000"}, lambda: 1, "default")
    assert not path.exists()
    file.server_serves(True)
    assert path.exists()
    assert said == []
