"""The archives for a machine without a package index, and the commit that a copy was made of."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from perf import environment
from perf.gpu import pack


def test_the_archive_has_one_cuda_library_of_bitsandbytes(tmp_path: Path) -> None:
    pack.pack_site(tmp_path / "site.tar.gz", ["bitsandbytes"], "130")
    with tarfile.open(tmp_path / "site.tar.gz") as tar:
        names = tar.getnames()
    libraries = {Path(name).name for name in names if Path(name).name.startswith("libbitsandbytes")}
    assert libraries == {"libbitsandbytes_cpu.so", "libbitsandbytes_cuda130.so"}
    assert "bitsandbytes/__init__.py" in names
    assert any(name.endswith(".dist-info/METADATA") for name in names)
    assert not any("__pycache__" in name for name in names)


def test_a_package_built_for_one_python_is_refused() -> None:
    with pytest.raises(ValueError, match=r"numpy .* was built for this Python; it can't be taken to another one"):
        list(pack.files_of("numpy"))


def test_only_the_servers_files_for_one_python_are_packed() -> None:
    stubs = "pytriton/tritonserver/python_backend_stubs"
    needed = {
        "pytriton/tritonserver/bin/tritonserver",
        f"{stubs}/3.12/triton_python_backend_stub",
        "nvidia_pytriton.libs/libtritonserver-717102f0.so",
        "nvidia_pytriton-0.7.0.dist-info/METADATA",
    }
    others = {
        f"{stubs}/3.11/triton_python_backend_stub",
        "nvidia_pytriton.libs/libpython3-419a3a08.13.so.1.0",
        "pytriton/triton.py",
    }
    assert {name for name in needed | others if pack.is_of_the_server(name, "3.12")} == needed


@pytest.mark.parametrize("git", ["no repository", "no git", "one that can't read it"])
def test_without_a_readable_repository_the_commit_is_the_carried_one(
    git: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    if git != "no repository":
        # As in a worktree whose repository was not copied.
        (tmp_path / ".git").write_text("gitdir: /nowhere/.git/worktrees/copy\n")
    if git == "no git":
        monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.sources()["commit"] == "unknown"
    carried = tmp_path / environment.CARRIED
    carried.parent.mkdir(parents=True)
    carried.write_text('{"commit": "45dd544", "uncommitted_changes": false, "changes_sha256": null}')
    assert environment.describe()["commit"] == "45dd544"
