"""What the launcher refuses before it starts anything, the runtime that it assembles, and why a start has failed."""

import socket
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from end_to_end.servers import ROOT
from triton_local.__main__ import main
from triton_local.errors import InvalidSettingError, MissingPartError
from triton_local.ports import SERVICES, choose_ports, resolve_host
from triton_local.runtime import Interpreter, TritonWheel, find_wheel, link_runtime, refuse_numpy_2, runtime_environment
from triton_local.server import LocalTriton, resolve_model
from triton_local.triton_log import failure_reason


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a model repository, a checkpoint, and a folder and a file of other things."""
    for name in ("llama/configs", "checkpoint", "models"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("llama/config.pbtxt", "llama/configs/second.pbtxt", "file", "model.gguf"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: LocalTriton(model_repository="models"), r"llama/config\.pbtxt is missing"),
        (lambda: LocalTriton(model_repository="", ready_timeout=0), "ready timeout 0 is out of bounds"),
        (
            lambda: LocalTriton(model_repository="", extra_args=["--http-port=1"]),
            "--http-port can't go to tritonserver",
        ),
        (lambda: choose_ports("192.0.2.1", {"http": 0}), r"port 0 \(http\) on 192\.0\.2\.1 can't be bound: "),
        (lambda: resolve_host("::1"), "is no IPv4 address"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused(refused: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidSettingError, match=message):
        refused()


def test_a_port_that_is_no_number_is_refused_with_the_bounds() -> None:
    result = CliRunner().invoke(main, ["--http-port=abc"])
    assert result.exit_code == 2
    assert "'--http-port': 'abc' is no port; it must be 0 ... 65535" in result.output


@pytest.mark.parametrize("service", ["grpc", "openai"])
def test_a_port_in_use_is_one_line_and_exit_code_2(service: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        free = [f"--{name}-port=0" for name in SERVICES]
        result = CliRunner().invoke(main, ["--model-repository=.", *free, f"--{service}-port={taken}"])
    use = f"choose another with --{service}-port, 0 for any free one"
    line = f"triton_local: port {taken} ({service}) on 127.0.0.1 is in use: {use}\n"
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", line)


def test_the_default_is_config_pbtxt_where_there_is_no_config_streaming(folder: Path) -> None:
    assert LocalTriton(model_repository=folder).variant == "default"
    assert LocalTriton(model_repository=ROOT / "model_repository").variant == "streaming"


@pytest.mark.parametrize("name", ["checkpoint", "model.gguf", "gpt2", "org.name/model_1.5"])
def test_a_model_path_becomes_absolute_and_a_hub_id_passes_unchanged(folder: Path, name: str) -> None:
    assert resolve_model(name) == str(folder / name if (folder / name).exists() else name)


@pytest.mark.parametrize("typo", ["./nowhere", "a/b/c", "models/typo", "", "./file"])
def test_a_model_path_that_does_not_exist_is_refused(typo: str) -> None:
    with pytest.raises(InvalidSettingError, match="neither an existing folder or GGUF file nor a hub id"):
        resolve_model(typo)


def test_free_ports_differ() -> None:
    assert len({*choose_ports("127.0.0.1", dict.fromkeys((*SERVICES, "openai"), 0)).values()}) == 4


def test_a_port_that_is_held_is_free_for_its_server_alone() -> None:
    with ExitStack() as holder, socket.socket() as other, socket.socket() as server:
        address = ("127.0.0.1", choose_ports("127.0.0.1", {"http": 0}, holder)["http"])
        with pytest.raises(OSError, match="in use"):
            other.bind(address)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen()


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


LOADING = 'I1121 00:42:11.710140 15186 model_lifecycle.cc:472] "loading: llama:1"'
CUDA = 'E1121 00:42:29.966857 15449 server.cc:241] "CudaDriverHelper has not been initialized."'
LOAD = (
    "E1121 00:42:30.407856 15449 model_lifecycle.cc:642] \"failed to load 'llama' version 1: Internal: ValueError: "
    'slots must be in 1 ... 64, got 9000\\n\\nAt:\\n  /models/llama/1/model.py(8): initialize\\n"'
)
SOCKET = "failed to start HTTP service: Unavailable - Socket '127.0.0.1:44715' already in use"
TAKEN = f'E1129 22:18:11.355878 3467 main.cc:257] "{SOCKET} "'
ENDED = "triton_supervisor: tritonserver has ended with code 1; the server ends with code 1"
REFUSED = LOAD.replace("ValueError: ", "TritonModelException: llama: ")
ENDING = "error: creating server: Internal - failed to load all models"
USAGE = ["/bin/tritonserver: unrecognized option '--x'", "Usage: tritonserver [options]", "  --help"]
EXCEPTION = [
    "failed to load 'llama' version 1: Internal: ValueError: slots must be in 1 ... 64, got 9000",
    "At:",
    "  /models/llama/1/model.py(8): initialize",
]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([CUDA, LOADING, LOAD, LOAD, ENDING], EXCEPTION),
        ([REFUSED, ENDING], ["the model refused to load: llama: slots must be in 1 ... 64, got 9000"]),
        ([CUDA, *USAGE], ["CudaDriverHelper has not been initialized.", USAGE[0]]),
        ([CUDA, LOADING, TAKEN, ENDED], ["CudaDriverHelper has not been initialized.", SOCKET, ENDED]),
        ([LOADING, CUDA], ["CudaDriverHelper has not been initialized."]),
        (["one", "", "two"], ["one", "two"]),
        ([], ["it wrote nothing"]),
    ],
)
def test_a_failed_start_has_a_reason(lines: list[str], reason: list[str]) -> None:
    assert failure_reason(lines).splitlines() == reason
