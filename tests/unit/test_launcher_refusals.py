"""What the launcher refuses before it starts anything."""

import math
import socket
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
from triton_local.ports import HeldPorts, Service, resolve_host
from triton_local.process import Supervised
from triton_local.repository import ModelRepository, resolve_model

FREE: dict[Service, int] = {"http": 0, "grpc": 0, "metrics": 0}


@pytest.fixture
def repository(tmp_path: Path) -> ModelRepository:
    (tmp_path / "llama" / "configs").mkdir(parents=True)
    for config in ("config.pbtxt", "configs/second.pbtxt", "configs/first.pbtxt"):
        (tmp_path / "llama" / config).touch()
    return ModelRepository.at(tmp_path)


def test_an_unknown_variant_is_refused_with_the_known_ones(repository: ModelRepository) -> None:
    with pytest.raises(UnknownVariantError, match="unknown variant 'third': known are default, first, second"):
        repository.check_variant("third")


def test_a_folder_without_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownRepositoryError, match=r"llama/config\.pbtxt is missing"):
        ModelRepository.at(tmp_path)


def test_a_model_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoint").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("checkpoint") == str(tmp_path / "checkpoint")


@pytest.mark.parametrize("hub_id", ["meta-llama/Llama-2-7b-hf", "gpt2", "org.name/model_1.5"])
def test_a_hub_id_passes_unchanged(hub_id: str) -> None:
    assert resolve_model(hub_id) == hub_id


@pytest.mark.parametrize("typo", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "a/b/c", "models/typo", "x/", ""])
def test_a_model_path_that_does_not_exist_is_refused(
    typo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownModelError, match="neither an existing folder nor a hub id"):
        resolve_model(typo)


def test_one_port_for_two_services_is_refused() -> None:
    with pytest.raises(PortInUseError, match="port 18123 is set twice: http and metrics"):
        HeldPorts("127.0.0.1", {"http": 18123, "grpc": 0, "metrics": 18123})


def test_a_held_port_is_not_free_but_can_be_listened_on() -> None:
    with HeldPorts("127.0.0.1", FREE) as held, HeldPorts("127.0.0.1", FREE) as other:
        assert len({*held.numbers.values(), *other.numbers.values()}) == 6
        with socket.create_server(("127.0.0.1", held.numbers["http"])) as server:
            socket.create_connection(server.getsockname()).close()


@pytest.mark.parametrize("host", ["::1", "no such host", "256.0.0.1"])
def test_a_host_without_an_ipv4_address_is_refused(host: str) -> None:
    with pytest.raises(InvalidSettingError, match="is no IPv4 address"):
        resolve_host(host)


# tritonserver accepts abbreviations.
SHORT = ("--exit-timeout=5", "--http-p=1", "--allow-met=off")


@pytest.mark.parametrize("argument", ["--http-port=1", "--model-config-name=x", "--grpc-address", "stray", *SHORT])
@pytest.mark.parametrize("supervised", [True, False])
def test_arguments_that_the_launcher_sets_are_refused(argument: str, supervised: bool) -> None:
    with pytest.raises(ReservedArgumentError, match=argument.split("=")[0]):
        check_extra_arguments([argument], supervised)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--model-control-mode=poll", "--model-control-mode .* use --unsupervised"),
        ("--http-restricted-api=inference:k=v", "a supervised tritonserver, .*; use a proxy"),
        ("--grpc-restricted-protocol=health:k=v", "a supervised tritonserver, .*; use a proxy"),
    ],
)
def test_arguments_that_the_supervisor_sets_are_refused(argument: str, message: str) -> None:
    with pytest.raises(ReservedArgumentError, match=message):
        check_extra_arguments([argument], supervised=True)
    with pytest.raises(ReservedArgumentError, match="--model-control is cut short"):
        check_extra_arguments(["--model-control=none"], supervised=True)
    check_extra_arguments([argument], supervised=False)


@pytest.mark.parametrize(
    ("supervised", "message"),
    [
        (Supervised(stuck_after=0), "stuck after 0 is out of bounds: more than 0 seconds"),
        (Supervised(stuck_after=math.nan), "stuck after nan"),
        (Supervised(notice=-1), "notice -1 is out of bounds: 0 seconds or more"),
        (Supervised(notice=math.inf), "notice inf"),
    ],
)
def test_seconds_out_of_bounds_are_refused(supervised: Supervised, message: str) -> None:
    with pytest.raises(InvalidSettingError, match=message):
        supervised.check()


@pytest.mark.parametrize(
    ("extra", "seconds"), [([], 120), (["--exit-timeout-secs=5"], 5), (["--exit-timeout-secs", "7"], 7)]
)
def test_the_last_exit_timeout_is_the_grace_period(extra: list[str], seconds: float) -> None:
    assert exit_timeout(extra) == seconds


@pytest.mark.parametrize("value", ["inf", "nan", "-5", "3601", "5s", "1.5", ""])
def test_an_exit_timeout_that_is_no_number_of_seconds_is_refused(value: str) -> None:
    with pytest.raises(InvalidSettingError) as refused:
        exit_timeout([f"--exit-timeout-secs={value}"])
    assert str(refused.value) == f"--exit-timeout-secs is {value!r}; it must be a whole number, 0 ... 3600"


def test_a_service_that_is_off_is_not_served() -> None:
    assert served(["--allow-metrics=OFF", "--allow-grpc", "off"]) == ("http",)
    assert served(["--allow-metrics=OFF", "--allow-metrics=on"]) == ("http", "grpc", "metrics")
