"""The runtime that the launcher assembles from the nvidia-pytriton wheel and this Python."""

import importlib.metadata
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from triton_local.command import server_environment
from triton_local.errors import (
    MissingLibpythonError,
    MissingWheelError,
    UnsupportedInterpreterError,
)
from triton_local.installation import Interpreter, TritonWheel, find_wheel
from triton_local.process import Supervised
from triton_local.runtime import Runtime, cache_root, prepare_runtime

INTERPRETER = Interpreter.current()


@pytest.fixture
def wheel() -> TritonWheel:
    return find_wheel(INTERPRETER.site_packages)


@pytest.fixture
def runtime(wheel: TritonWheel, tmp_path: Path) -> Runtime:
    return prepare_runtime(wheel, INTERPRETER, tmp_path)


def test_a_missing_libpython_is_refused_with_its_debian_package(tmp_path: Path) -> None:
    static = replace(INTERPRETER, version=(3, 12, 4), library_dirs=(tmp_path,))
    with pytest.raises(MissingLibpythonError, match=r"libpython3\.12\.so\.1\.0 in .* the package libpython3\.12 "):
        static.libpython()


def test_libpython_is_the_interpreters_own() -> None:
    assert INTERPRETER.libpython().parent in INTERPRETER.library_dirs
    assert all(str(folder).startswith(sys.base_prefix) for folder in INTERPRETER.library_dirs)


def test_a_missing_wheel_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(MissingWheelError, match=r"package nvidia-pytriton.* isn't installed in .*pip install"):
        find_wheel([tmp_path])


def test_a_half_installed_wheel_is_refused_with_the_missing_part(tmp_path: Path, wheel: TritonWheel) -> None:
    metadata_folder = tmp_path / f"nvidia_pytriton-{wheel.version}.dist-info"
    metadata_folder.mkdir()
    (metadata_folder / "METADATA").write_text(f"Name: nvidia-pytriton\nVersion: {wheel.version}\n")
    with pytest.raises(MissingWheelError, match=r"is installed without .*tritonserver"):
        find_wheel([tmp_path])


def test_the_installed_wheel_is_found_with_its_version(wheel: TritonWheel) -> None:
    assert wheel.version == importlib.metadata.version("nvidia-pytriton")
    assert os.access(wheel.tritonserver, os.X_OK)


def test_a_python_without_a_stub_is_refused_with_the_supported_ones(wheel: TritonWheel) -> None:
    with pytest.raises(UnsupportedInterpreterError, match=r"Python 3\.7 has no .*3\.8, 3\.9, 3\.10, 3\.11"):
        wheel.stub("3.7")


def test_the_environment_sets_the_cache() -> None:
    assert cache_root({"TRITON_LLAMA_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}) == Path("/own")
    assert cache_root({"XDG_CACHE_HOME": "/xdg"}) == Path("/xdg/triton-llama")
    assert cache_root({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "triton-llama"
    assert cache_root({}) == Path.home() / ".cache" / "triton-llama"


def test_concurrent_first_starts_share_one_runtime(tmp_path: Path, wheel: TritonWheel) -> None:
    together = threading.Barrier(8)

    def start(_: int) -> Path:
        together.wait()
        return prepare_runtime(wheel, INTERPRETER, tmp_path).root

    with ThreadPoolExecutor(8) as pool:
        roots = set(pool.map(start, range(8)))
    assert roots == set(tmp_path.iterdir()), "a half-built runtime is left"
    assert len(roots) == 1


def test_a_runtime_that_lost_a_file_is_rebuilt(runtime: Runtime, tmp_path: Path, wheel: TritonWheel) -> None:
    stub = runtime.backends / "python" / "triton_python_backend_stub"
    stub.unlink()
    assert prepare_runtime(wheel, INTERPRETER, tmp_path).root == runtime.root
    assert stub.exists()
    assert list(tmp_path.iterdir()) == [runtime.root]


def test_the_stub_links_this_interpreters_libpython(runtime: Runtime) -> None:
    inherited = {"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/cuda"}
    environment = server_environment(runtime, inherited, "gpt2", {"A": "b"}, grace=90, stuck=30.0)
    stub = str(runtime.backends / "python" / "triton_python_backend_stub")
    linked = subprocess.run(["ldd", stub], env=environment, capture_output=True, text=True, check=True).stdout
    assert f"{runtime.root}/lib/{INTERPRETER.libpython().name}" in linked
    assert "not found" not in linked
    assert environment["PATH"].split(":")[0] == str(INTERPRETER.executable.parent)
    assert environment["LD_LIBRARY_PATH"].endswith(":/cuda")
    assert environment["LLAMA_MODEL"] == "gpt2"
    assert environment["A"] == "b"


def test_the_model_has_the_launchers_seconds_unless_set(runtime: Runtime) -> None:
    def seconds(inherited: dict[str, str], overrides: dict[str, str], stuck: float | None = 30.0) -> list[str | None]:
        environment = server_environment(runtime, inherited, None, overrides, grace=90, stuck=stuck)
        return [environment.get(f"LLAMA_{name}_SECONDS") for name in ("DRAIN", "STUCK")]

    assert seconds({}, {}) == ["90", "30"]
    assert seconds({"LLAMA_DRAIN_SECONDS": "", "LLAMA_STUCK_SECONDS": ""}, {}) == ["90", "30"]
    assert seconds({"LLAMA_DRAIN_SECONDS": "5"}, {"LLAMA_STUCK_SECONDS": "6"}) == ["5", "6"]
    assert seconds({}, {}, Supervised(stuck_after=None).stuck_seconds) == ["90", "0"]
    assert seconds({}, {}, None) == ["90", None]
