"""The runtime that the launcher assembles from the nvidia-pytriton wheel and this Python."""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from triton_local.errors import MissingPartError
from triton_local.runtime import Interpreter, TritonWheel, find_wheel, link_runtime, refuse_numpy_2, runtime_environment

INTERPRETER = Interpreter.current()
WHEEL = find_wheel(INTERPRETER.site_packages)


def _install(folder: Path, name: str, version: str) -> None:
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


def _half_installed(folder: Path) -> TritonWheel:
    _install(folder, "nvidia_pytriton", WHEEL.version)
    return find_wheel([folder])


def _with_numpy(folder: Path, version: str) -> None:
    _install(folder, "numpy", version)
    refuse_numpy_2(replace(INTERPRETER, site_packages=(folder,)), WHEEL)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (
            lambda folder: replace(INTERPRETER, minor_version="3.12", library_dirs=(folder,)).libpython(),
            r"libpython3\.12\.so\.1\.0 in .* the package libpython3\.12 ",
        ),
        (lambda folder: find_wheel([folder]), r"package nvidia-pytriton.* isn't installed in .*pip install"),
        (_half_installed, "is installed without .*tritonserver"),
        (lambda _: WHEEL.stub("3.7"), r"Python 3\.7 has no .*3\.11"),
        (
            lambda folder: _with_numpy(folder, "2.3.1"),
            rf"^numpy 2\.3\.1 is .* with numpy 2 or newer: {INTERPRETER.executable} -m pip install 'numpy<2'$",
        ),
    ],
)
def test_a_missing_part_is_refused_by_name(tmp_path: Path, refused: Callable[[Path], object], message: str) -> None:
    with pytest.raises(MissingPartError, match=message):
        refused(tmp_path)


def test_an_older_numpy_is_accepted(tmp_path: Path) -> None:
    _with_numpy(tmp_path, "1.26.4")


def test_the_stub_links_this_interpreters_libpython(tmp_path: Path) -> None:
    link_runtime(tmp_path, WHEEL, INTERPRETER)
    inherited = {"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/cuda"}
    environment = runtime_environment(tmp_path, WHEEL, INTERPRETER, inherited)
    stub = str(tmp_path / "backends" / "python" / "triton_python_backend_stub")
    linked = subprocess.run(["ldd", stub], env=environment, capture_output=True, text=True, check=True).stdout
    assert f"{tmp_path}/lib/{INTERPRETER.libpython().name}" in linked
    assert "not found" not in linked
    assert environment["PATH"].split(":")[0] == str(INTERPRETER.executable.parent)
    assert environment["LD_LIBRARY_PATH"].endswith(":/cuda")
