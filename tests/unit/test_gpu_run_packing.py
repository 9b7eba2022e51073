"""What travels to a machine without a package index, and what its script does with it there."""

from __future__ import annotations

import os
import subprocess
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest
from gpu import pack
from setting import machine
from setting.machine import ROOT

SCRIPT = ROOT / "perf" / "gpu" / "elsewhere.sh"

PYTHON = """#!/bin/sh
if [ "$1" = -c ]; then echo "$SITE"; else echo "python3 $*"; echo "path $PYTHONPATH"; fi
"""


def test_another_cuda_s_library_travels_or_none_does(tmp_path: Path) -> None:
    pack.pack_site(tmp_path / "site.tar.gz", ["bitsandbytes"], "130")
    with tarfile.open(tmp_path / "site.tar.gz") as tar:
        names = tar.getnames()
    libraries = {Path(name).name for name in names if Path(name).name.startswith("libbitsandbytes")}
    assert libraries == {"libbitsandbytes_cpu.so", "libbitsandbytes_cuda130.so"}
    assert "bitsandbytes/__init__.py" in names
    assert any(name.endswith(".dist-info/METADATA") for name in names)
    assert not any("__pycache__" in name for name in names)


def test_a_package_of_this_python_is_taken_to_another() -> None:
    with pytest.raises(ValueError, match=r"numpy .* was built for this Python; it can't be taken to another one"):
        list(pack.files_of("numpy"))


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("pytriton/tritonserver/bin/tritonserver", True),
        ("pytriton/tritonserver/python_backend_stubs/3.12/triton_python_backend_stub", True),
        ("pytriton/tritonserver/python_backend_stubs/3.11/triton_python_backend_stub", False),
        ("nvidia_pytriton.libs/libtritonserver-717102f0.so", True),
        ("nvidia_pytriton.libs/libpython3-419a3a08.13.so.1.0", False),
        ("nvidia_pytriton-0.7.0.dist-info/METADATA", True),
        ("pytriton/triton.py", False),
    ],
)
def test_the_server_lacks_a_file_or_has_one_too_many(name: str, needed: bool) -> None:
    assert pack.is_of_the_server(name, "3.12") is needed


def test_a_copy_does_not_say_what_it_is_a_copy_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert machine.sources()["commit"] == "unknown"
    carried = tmp_path / machine.CARRIED
    carried.parent.mkdir(parents=True)
    carried.write_text('{"commit": "45dd544", "uncommitted_changes": false, "changes_sha256": null}')
    assert machine.sources()["commit"] == "45dd544"


def test_two_versions_lie_in_one_folder_or_the_results_elsewhere(tmp_path: Path) -> None:
    """The script in a checkout of its own, with a Python that says what it is asked for."""
    checkout, site, out = tmp_path / "checkout", tmp_path / "site", tmp_path / "out"
    for folder in (checkout / "perf" / "gpu", checkout / ".work" / "gpu", site / "bitsandbytes", out, tmp_path / "bin"):
        folder.mkdir(parents=True)
    (checkout / "perf" / "gpu" / SCRIPT.name).write_bytes(SCRIPT.read_bytes())
    (tmp_path / "bin" / "python3").write_text(PYTHON)
    (tmp_path / "bin" / "python3").chmod(0o755)
    (site / "bitsandbytes" / "old.py").write_text("")
    (site / "bitsandbytes-0.1.dist-info").mkdir()
    (site / "bitsandbytes_more-0.1.dist-info").mkdir()
    pack.pack_site(checkout / ".work" / "gpu" / "site.tar.gz", ["bitsandbytes"], "130")
    (checkout / ".work" / "gpu" / "gpu.json").write_text("before")
    ran = subprocess.run(
        ["bash", f"perf/gpu/{SCRIPT.name}", "--budget", "8", "--resume"],
        cwd=checkout,
        env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "OUT": str(out), "SITE": str(site)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    asked, path = ran.stdout.splitlines()[-2:]
    assert asked == f"python3 -m gpu --output {out}/gpu.json --partial {out} --budget 8 --resume"
    assert f"{checkout}/perf:{checkout}/tests" in path
    assert (site / "bitsandbytes" / "__init__.py").exists()
    assert not (site / "bitsandbytes" / "old.py").exists()
    assert sorted(entry.name for entry in site.glob("*.dist-info")) == [
        f"bitsandbytes-{version('bitsandbytes')}.dist-info",
        "bitsandbytes_more-0.1.dist-info",
    ]
    assert (out / "gpu.json").read_text() == "before"
