"""What the launcher refuses before it starts anything."""

import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner
from end_to_end.servers import ROOT
from triton_local.__main__ import main
from triton_local.errors import InvalidSettingError
from triton_local.ports import SERVICES, choose_ports, resolve_host
from triton_local.server import LocalTriton, resolve_model


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


@pytest.mark.parametrize("name", ["checkpoint", "model.gguf"])
def test_a_model_path_becomes_absolute(folder: Path, name: str) -> None:
    assert resolve_model(name) == str(folder / name)


@pytest.mark.parametrize("hub_id", ["gpt2", "org.name/model_1.5"])
def test_a_hub_id_passes_unchanged(hub_id: str) -> None:
    assert resolve_model(hub_id) == hub_id


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
