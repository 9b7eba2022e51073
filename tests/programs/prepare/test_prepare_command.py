"""The command: exit codes, one line for a failure, SIGTERM, and progress bars on terminals only."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from triton_prepare.__main__ import main


def _start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """Start it elsewhere, with nothing on its path but the installed packages."""
    dropped = ("HF_", "LLAMA_", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    command, pipe = [sys.executable, "-m", "triton_prepare", *arguments], subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.long
def test_the_command_says_what_it_did(original: Path, tmp_path: Path) -> None:
    for last in ("prepare: ", "prepare: nothing to do: "):
        process = _start(str(original), "--device", "cpu", cwd=tmp_path)
        printed, errors = process.communicate(timeout=120)
        assert (process.returncode, errors) == (0, "")
        assert all(line.startswith("prepare: ") for line in printed.splitlines())
        assert printed.splitlines()[-1].startswith(last)
        # The default OUT.
        assert (tmp_path / "prepared" / "small-int8" / "manifest.json").exists()


@pytest.mark.parametrize("missing", ["model", "tokenizer.json"])
def test_a_model_that_cannot_be_prepared_is_one_line(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    model = tmp_path / "model"
    if missing != "model":
        shutil.copytree(original, model, ignore=shutil.ignore_patterns(missing))
    assert main([str(model), "--out", str(tmp_path / "out"), "--device", "cpu"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("prepare: ")
    assert str(model) in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("importing", [False, True], ids=["waiting for the lock", "importing"])
def test_sigterm_ends_a_run(original: Path, tmp_path: Path, importing: bool) -> None:
    """The kernel drops signals to a container's first process unless it handles them."""
    last = "another run is preparing"
    if importing:
        # Imported in place of the package, from the working directory.
        last = "importing"
        (tmp_path / "filelock.py").write_text(f"import time; print({last!r}, flush=True); time.sleep(60)")
    command = (str(original), "--out", str(tmp_path / "out"))
    with FileLock(tmp_path / "out.lock"), _start(*command, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert any(last in line for line in process.stdout)
        process.terminate()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
