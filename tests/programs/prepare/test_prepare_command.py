"""The command: exit codes, one line for a failure, and progress bars on terminals only."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from filelock import FileLock
from programs.prepare.hubs import MODEL, running_hub
from triton_prepare.__main__ import main

FILE_BYTES = 1 << 18
"""Size that a file may have, in a process whose download is larger: as on a disk that becomes full."""


def _environment(**settings: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "LLAMA_"))}
    return {**inherited, **settings}


def _start(*arguments: str, cwd: Path, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """Start it elsewhere, with nothing on its path but the installed packages."""
    environment = _environment()
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-m", "triton_prepare", *arguments]
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)


def test_the_command_says_what_it_did(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(original), "--device", "cpu"]) == 0
    # The default OUT.
    assert (tmp_path / "prepared" / "small-int8" / "manifest.json").exists()
    assert main([str(original), "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert all(line.startswith("prepare: ") for line in printed.out.splitlines())
    assert main(["./absent", "--out", "x"]) == 1
    assert capsys.readouterr().err == "prepare: model is './absent': no such folder\n"


@pytest.mark.parametrize("arguments", [[], [""], ["x", "--device", "tpu"]])
def test_a_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "triton_prepare: error: " in capsys.readouterr().err


def test_a_checkpoint_that_the_server_refuses_is_one_line(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(original, broken, ignore=shutil.ignore_patterns("tokenizer.json"))
    assert main([str(broken), "--out", str(tmp_path / "out"), "--device", "cpu"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("prepare: ")
    assert str(broken) in line
    assert not (tmp_path / "out").exists()


def test_a_run_starts_anywhere_and_prints_nothing_to_stderr(original: Path, out: Path, tmp_path: Path) -> None:
    for folder, last in ((tmp_path / "new", "prepare: "), (out, "prepare: nothing to do: ")):
        process = _start(str(original), "--out", str(folder), "--device", "cpu", cwd=tmp_path)
        printed, errors = process.communicate(timeout=120)
        assert (process.returncode, errors) == (0, "")
        assert all(line.startswith("prepare: ") for line in printed.splitlines())
        assert printed.splitlines()[-1].startswith(last)


def test_a_second_run_does_not_import_pytorch(original: Path, out: Path) -> None:
    code = f"import sys; from triton_prepare.__main__ import main; main({[str(original), '--out', str(out)]!r})"
    code += "; print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    imports = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert imports.stdout.splitlines()[-1] == "[]"


def test_sigterm_ends_a_run_that_waits_for_the_lock(original: Path, tmp_path: Path) -> None:
    """The kernel drops signals to a container's first process unless it handles them."""
    with (
        FileLock(tmp_path / "out.lock"),
        _start(str(original), "--out", str(tmp_path / "out"), cwd=tmp_path) as process,
    ):
        assert process.stdout is not None
        assert any("waiting for it to end" in line for line in process.stdout)
        process.terminate()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM


def test_sigterm_ends_a_run_that_is_still_importing(tmp_path: Path) -> None:
    # Imported in place of the package, from the working directory.
    (tmp_path / "filelock.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    with _start("model", cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.terminate()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM


def test_a_terminal_gets_a_progress_bar(original: Path, out: Path, tmp_path: Path) -> None:
    reading, terminal = pty.openpty()
    try:
        # Without a size there is no room for a bar.
        termios.tcsetwinsize(terminal, (24, 100))
        process = _start(str(original), "--out", str(out), cwd=tmp_path, stderr=terminal)
        printed, _ = process.communicate(timeout=120)
        assert select.select([reading], [], [], 0)[0], "nothing was drawn"
        drawn = os.read(reading, 1 << 16).decode()
    finally:
        os.close(terminal)
        os.close(reading)
    assert process.returncode == 0
    assert "\rchecking the files: " in drawn
    assert "nothing to do: " in printed


LIMIT = f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({FILE_BYTES}, {FILE_BYTES}))"
# The imports come first, because they may write compiled files.
LOAD = f"""
import torch
from llama_engine.model.loader import load_checkpoint
from llama_engine.errors import CheckpointError
from llama_engine.settings import Settings
{LIMIT}
try:
    load_checkpoint(Settings(model=sys.argv[1], quantization="none"), torch.device("cpu"))
except CheckpointError as error:
    sys.exit(print(error, file=sys.stderr) or 1)
"""
PREPARE = f"from triton_prepare.__main__ import main; {LIMIT}; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize(("program", "start"), [(LOAD, "can't load"), (PREPARE, "prepare:")], ids=["load", "prepare"])
def test_a_download_that_does_not_fit_is_one_line(original: Path, tmp_path: Path, program: str, start: str) -> None:
    assert (original / "model.safetensors").stat().st_size > FILE_BYTES
    with running_hub(original) as hub:
        hub_settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        environment = _environment(**hub_settings, PYTHONPATH=os.pathsep.join(sys.path))
        command = [sys.executable, "-c", program, MODEL]
        run = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert hub.downloads("model.safetensors") >= 1
    assert run.returncode == 1
    (reason,) = run.stderr.splitlines()
    assert reason.startswith(start)
    assert "File too large" in reason
