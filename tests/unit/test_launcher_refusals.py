"""What the launcher refuses before it starts anything."""

import math
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from triton_local.command import check_extra_arguments, exit_timeout, served
from triton_local.errors import (
    InvalidSettingError,
    PortInUseError,
    ReservedArgumentError,
    UnknownModelError,
    UnknownRepositoryError,
    UnknownVariantError,
)
from triton_local.log import ServerLog
from triton_local.ports import HeldPorts, Service, resolve_host
from triton_local.process import Supervised
from triton_local.repository import ModelRepository, resolve_model

FREE: dict[Service, int] = {"http": 0, "grpc": 0, "metrics": 0}
TWICE: dict[Service, int] = {"http": 18123, "grpc": 0, "metrics": 18123}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a model repository, a checkpoint, and a folder and a file of other things."""
    for name in ("llama/configs", "checkpoint", "models"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("llama/config.pbtxt", "llama/configs/second.pbtxt", "llama/configs/first.pbtxt", "file"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("refused", "error", "message"),
    [
        (
            lambda: ModelRepository.at(Path()).check_variant("third"),
            UnknownVariantError,
            "unknown variant 'third': known are default, first, second",
        ),
        (lambda: ModelRepository.at(Path("models")), UnknownRepositoryError, r"llama/config\.pbtxt is missing"),
        (lambda: HeldPorts("127.0.0.1", TWICE), PortInUseError, "port 18123 is set twice: http and metrics"),
        (lambda: resolve_host("::1"), InvalidSettingError, "is no IPv4 address"),
        (lambda: ServerLog(Path("models"), None), InvalidSettingError, "models can't be written: Is a directory$"),
        (lambda: ServerLog(Path("file/log"), None), InvalidSettingError, "log can't be written: Not a directory$"),
        (Supervised(stuck_after=0).check, InvalidSettingError, "stuck after 0 is out of bounds: more than 0 seconds"),
        (Supervised(stuck_after=math.nan).check, InvalidSettingError, "stuck after nan"),
        (Supervised(notice=math.inf).check, InvalidSettingError, "notice inf is out of bounds: 0 seconds or more"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused(
    refused: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        refused()


def test_a_model_folder_becomes_absolute_and_a_hub_id_passes_unchanged(folder: Path) -> None:
    assert resolve_model("checkpoint") == str(folder / "checkpoint")
    for hub_id in ("meta-llama/Llama-2-7b-hf", "gpt2", "org.name/model_1.5"):
        assert resolve_model(hub_id) == hub_id


@pytest.mark.parametrize("typo", ["./nowhere", "~/nowhere-at-all", "a/b/c", "models/typo", "x/", ""])
def test_a_model_path_that_does_not_exist_is_refused(typo: str) -> None:
    with pytest.raises(UnknownModelError, match="neither an existing folder nor a hub id"):
        resolve_model(typo)


def test_a_held_port_is_not_free_but_can_be_listened_on() -> None:
    with HeldPorts("127.0.0.1", FREE) as held, HeldPorts("127.0.0.1", FREE) as other:
        assert len({*held.numbers.values(), *other.numbers.values()}) == 6
        with socket.create_server(("127.0.0.1", held.numbers["http"])) as server:
            socket.create_connection(server.getsockname()).close()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--http-port=1", "--http-port can't go to tritonserver"),
        ("stray", "unexpected argument 'stray'"),
        # tritonserver accepts abbreviations.
        ("--exit-timeout=5", "--exit-timeout is cut short"),
        ("--model-control=none", "--model-control is cut short"),
        ("--model-control-mode=poll", "--model-control-mode can't go to tritonserver directly"),
        ("--http-restricted-api=inference:k=v", "use a proxy"),
    ],
)
def test_an_argument_that_the_launcher_sets_is_refused(argument: str, message: str) -> None:
    with pytest.raises(ReservedArgumentError, match=message):
        check_extra_arguments([argument])


def test_the_last_exit_timeout_is_the_grace_period() -> None:
    options = ["--exit-timeout-secs=5", "--exit-timeout-secs", "7"]
    assert [exit_timeout(options[:count]) for count in (0, 1, 3)] == [120, 5, 7]


@pytest.mark.parametrize("value", ["inf", "-5", "3601", "1.5", ""])
def test_an_exit_timeout_that_is_no_number_of_seconds_is_refused(value: str) -> None:
    with pytest.raises(InvalidSettingError) as refused:
        exit_timeout([f"--exit-timeout-secs={value}"])
    assert str(refused.value) == f"--exit-timeout-secs is {value!r}; it must be a whole number, 0 ... 3600"


def test_a_service_that_is_off_is_not_served() -> None:
    assert served(["--allow-metrics=OFF", "--allow-grpc", "off"]) == ("http",)
    assert served(["--allow-metrics=OFF", "--allow-metrics=on"]) == ("http", "grpc", "metrics")
