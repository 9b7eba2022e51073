"""A build takes nothing that its lock hasn't the hash of: neither a package nor a file that was swapped."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from compose.commands import CommandFailedError
from compose.conftest import NewProject

NAME = "triton_llama_test_package"


def put_wheel(folder: Path) -> None:
    """Put a package without content there."""
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
def test_a_file_whose_hash_is_not_known_is_installed(
    new_project: NewProject, tmp_path: Path, lock: str, reason: str
) -> None:
    put_wheel(tmp_path)
    (tmp_path / "requirements.lock").write_text(lock)
    with new_project({"TRITON_WHEELS": str(tmp_path)}) as project:
        with pytest.raises(CommandFailedError) as failed:
            project.compose("build", timeout=300)
        assert reason in str(failed.value)
