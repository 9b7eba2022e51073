"""A build installs only files whose hashes are in its lock."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from compose.commands import CommandFailedError
from compose.conftest import NewProject

NAME = "triton_llama_test_package"
INFO = f"{NAME}-1.0.dist-info"
WHEEL = {
    f"{INFO}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{INFO}/RECORD": "",
}


@pytest.mark.parametrize(
    ("hashes", "reason"),
    [
        ("", "Hashes are required in --require-hashes mode"),
        (f" --hash=sha256:{'0' * 64}", "DO NOT MATCH THE HASHES"),
    ],
    ids=["no hash", "another file's hash"],
)
def test_a_file_without_its_hash_in_the_lock_is_refused(
    new_project: NewProject, tmp_path: Path, hashes: str, reason: str
) -> None:
    with zipfile.ZipFile(tmp_path / f"{NAME}-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in WHEEL.items():
            wheel.writestr(name, text)
    (tmp_path / "requirements.lock").write_text(f"{NAME}==1.0{hashes}\n")
    with new_project({"TRITON_WHEELS": str(tmp_path)}) as project, pytest.raises(CommandFailedError, match=reason):
        project.compose("build", timeout=300)
