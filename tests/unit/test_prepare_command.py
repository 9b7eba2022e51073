"""The command as people and init containers call it: exit codes, one line for a failure, bars for a person only."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import termios
from pathlib import Path

import llama_engine
import pytest
from engine.small_checkpoints import save_small
from llama_engine.text.tokenizer import Tokenizer
from triton_prepare.cli import main
from triton_prepare.lock import locked
from unit.prepared import prepare_folder


@pytest.fixture(scope="module")
def original(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small(tmp_path_factory.mktemp("originals") / "small", tokenizer)


@pytest.fixture(scope="module")
def out(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished result."""
    folder = tmp_path_factory.mktemp("whole") / "small-int8"
    prepare_folder(original, folder)
    return folder


def _command(*arguments: str, cwd: Path, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """Run it as a program, somewhere else, with nothing on its path but what is installed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-m", "triton_prepare", *arguments],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=120,
        check=False,
    )


def test_an_init_container_that_is_told_to_end_goes_on(original: Path, tmp_path: Path) -> None:
    """The kernel drops signals to a container's first process unless it handles them."""
    with locked(tmp_path / "out.lock", lambda: pytest.fail("nobody holds it")):
        process = subprocess.Popen(
            [sys.executable, "-m", "triton_prepare", str(original), "--out", str(tmp_path / "out")],
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout is not None
            assert "waiting for it to end" in process.stdout.readline()
            process.terminate()
            assert process.wait(timeout=60) == 128 + signal.SIGTERM


def test_the_exit_code_hides_what_happened(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(original), "--device", "cpu"]) == 0
    # Where nothing is said about it.
    assert (tmp_path / "prepared" / "small-int8" / "manifest.json").exists()
    assert main([str(original), "--device", "cpu"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert all(line.startswith("prepare: ") for line in said.out.splitlines())
    assert main(["./absent", "--out", "x"]) == 1
    assert capsys.readouterr().err == "prepare: model is './absent': no such folder\n"


@pytest.mark.parametrize("arguments", [[], [""], ["x", "--device", "tpu"]])
def test_a_command_that_makes_no_sense_is_run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "triton_prepare: error: " in capsys.readouterr().err


def test_a_checkpoint_that_the_server_refuses_ends_in_a_traceback(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in original.iterdir():
        if path.name != "tokenizer.json":
            (broken / path.name).write_bytes(path.read_bytes())
    assert main([str(broken), "--out", str(tmp_path / "out"), "--device", "cpu"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("prepare: ")
    assert str(broken) in line
    assert not (tmp_path / "out").exists()


def test_the_program_is_not_found_from_elsewhere_or_imports_pytorch_to_do_nothing(
    original: Path, out: Path, tmp_path: Path
) -> None:
    run = _command(str(original), "--out", str(out), cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert "nothing to do: " in run.stdout
    asked = f"import sys; from triton_prepare.cli import main; main({[str(original), '--out', str(out)]!r})"
    imports = subprocess.run(
        [sys.executable, "-c", f"{asked}; print(sorted({{'torch', 'transformers'}} & sys.modules.keys()))"],
        env={**os.environ, "PYTHONPATH": str(Path(llama_engine.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert imports.stdout.splitlines()[-1] == "[]"


def test_a_person_at_a_terminal_sees_no_bar(original: Path, out: Path, tmp_path: Path) -> None:
    reading, terminal = pty.openpty()
    try:
        # A terminal has a size, or there is no room for a bar.
        termios.tcsetwinsize(terminal, (24, 100))
        run = _command(str(original), "--out", str(out), cwd=tmp_path, stderr=terminal)
        assert select.select([reading], [], [], 0)[0], "nothing was drawn"
        drawn = os.read(reading, 1 << 16).decode()
    finally:
        os.close(terminal)
        os.close(reading)
    assert run.returncode == 0
    assert "\rprepare: checking what is there: " in drawn
    assert "nothing to do: " in run.stdout
