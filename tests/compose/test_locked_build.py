"""A build installs only files whose hashes are in its lock."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from compose.commands import CommandFailedError
from compose.conftest import NewProject

NAME = "triton_llama_test_package"


def put_wheel(folder: Path) -> None:
    """Write an empty package's wheel."""
    with zipfile.ZipFile(folder / f"{NAME}-1.0-py3-none-any.whl", "w") as wheel:
        info = f"{NAME}-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize(
    ("lock", "reason"),
    [
        (f"{NAME}==1.0\n", "Hashes are required in --require-hashes mode"),
        (f"{NAME}==1.0 --hash=sha256:{'0' * 64}\n", "DO NOT MATCH THE HASHES"),
    ],
    ids=["no hash", "another file's hash"],
)
def test_a_file_without_its_hash_in_the_lock_is_refused(
    new_project: NewProject, tmp_path: Path, lock: str, reason: str
) -> None:
    put_wheel(tmp_path)
    (tmp_path / "requirements.lock").write_text(lock)
    with new_project({"TRITON_WHEELS": str(tmp_path)}) as project:
        with pytest.raises(CommandFailedError) as failed:
            project.compose("build", timeout=300)
        assert reason in str(failed.value)
