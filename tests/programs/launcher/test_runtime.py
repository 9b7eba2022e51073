"""The runtime that the launcher assembles from the nvidia-pytriton wheel and this Python."""

import subprocess
import threading
from collections.abc import Callable
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
WHEEL = find_wheel(INTERPRETER.site_packages)


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    return prepare_runtime(WHEEL, INTERPRETER, tmp_path)


def _half_installed(folder: Path) -> TritonWheel:
    metadata = folder / f"nvidia_pytriton-{WHEEL.version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: nvidia-pytriton\nVersion: {WHEEL.version}\n")
    return find_wheel([folder])


@pytest.mark.parametrize(
    ("refused", "error", "message"),
    [
        (
            lambda folder: replace(INTERPRETER, version=(3, 12, 4), library_dirs=(folder,)).libpython(),
            MissingLibpythonError,
            r"libpython3\.12\.so\.1\.0 in .* the package libpython3\.12 ",
        ),
        (
            lambda folder: find_wheel([folder]),
            MissingWheelError,
            r"package nvidia-pytriton.* isn't installed in .*pip install",
        ),
        (_half_installed, MissingWheelError, "is installed without .*tritonserver"),
        (
            lambda _: WHEEL.stub("3.7"),
            UnsupportedInterpreterError,
            r"Python 3\.7 has no .*3\.8, 3\.9, 3\.10, 3\.11",
        ),
    ],
)
def test_a_missing_part_is_refused_by_name(
    tmp_path: Path, refused: Callable[[Path], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        refused(tmp_path)


def test_the_environment_sets_the_cache() -> None:
    default = Path.home() / ".cache" / "triton-llama"
    assert cache_root({"TRITON_LLAMA_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}) == Path("/own")
    assert cache_root({"XDG_CACHE_HOME": "/xdg"}) == Path("/xdg/triton-llama")
    assert cache_root({"XDG_CACHE_HOME": "relative"}) == cache_root({}) == default


def test_concurrent_first_starts_share_one_runtime(tmp_path: Path) -> None:
    together = threading.Barrier(8)

    def start(_: int) -> Path:
        together.wait()
        return prepare_runtime(WHEEL, INTERPRETER, tmp_path).root

    with ThreadPoolExecutor(8) as pool:
        roots = set(pool.map(start, range(8)))
    assert roots == set(tmp_path.iterdir()), "a half-built runtime is left"
    assert len(roots) == 1


def test_a_runtime_that_lost_a_file_is_rebuilt(runtime: Runtime, tmp_path: Path) -> None:
    stub = runtime.backends / "python" / "triton_python_backend_stub"
    stub.unlink()
    assert prepare_runtime(WHEEL, INTERPRETER, tmp_path).root == runtime.root
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
    # The seconds are the supervisor's; tests/unit/test_supervisor_settings.py has the rest.
    own = {name: value for name, value in environment.items() if name.startswith("LLAMA_")}
    assert own == {"LLAMA_MODEL": "gpt2", "LLAMA_DRAIN_SECONDS": "90", "LLAMA_STUCK_SECONDS": "30"}
    assert environment["A"] == "b"
    assert Supervised(stuck_after=None).stuck_seconds == 0
