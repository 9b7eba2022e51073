"""What the launcher refuses before it starts anything, from facts given as arguments: no server runs here."""

import importlib.metadata
import math
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from triton_local.command import check_extra_arguments, exit_timeout, served, server_environment
from triton_local.errors import (
    InvalidSettingError,
    MissingLibpythonError,
    MissingWheelError,
    PortInUseError,
    ReservedArgumentError,
    UnknownModelError,
    UnknownRepositoryError,
    UnknownVariantError,
    UnsupportedInterpreterError,
)
from triton_local.interpreter import Interpreter
from triton_local.ports import HeldPorts, Service, resolve_host
from triton_local.repository import ModelRepository, resolve_model
from triton_local.runtime import cache_root, prepare_runtime
from triton_local.supervised import Supervised
from triton_local.wheel import TritonWheel, find_wheel

INTERPRETER = Interpreter.current()
FREE: dict[Service, int] = {"http": 0, "grpc": 0, "metrics": 0}


@pytest.fixture
def wheel() -> TritonWheel:
    return find_wheel(INTERPRETER.site_packages)


@pytest.fixture
def repository(tmp_path: Path) -> ModelRepository:
    (tmp_path / "llama" / "configs").mkdir(parents=True)
    for config in ("config.pbtxt", "configs/second.pbtxt", "configs/first.pbtxt"):
        (tmp_path / "llama" / config).touch()
    return ModelRepository.at(tmp_path)


def test_missing_libpython_names_the_debian_package(tmp_path: Path) -> None:
    static = replace(INTERPRETER, version=(3, 12, 4), library_dirs=(tmp_path,))
    with pytest.raises(MissingLibpythonError, match=r"libpython3\.12\.so\.1\.0 in .* the package libpython3\.12 "):
        static.libpython()


def test_libpython_is_the_interpreters_own_and_not_another_builds() -> None:
    assert INTERPRETER.libpython().parent in INTERPRETER.library_dirs
    assert all(str(folder).startswith(sys.base_prefix) for folder in INTERPRETER.library_dirs)


def test_missing_wheel_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingWheelError, match=r"package nvidia-pytriton.* isn't installed in .*pip install"):
        find_wheel([tmp_path])


def test_half_installed_wheel_is_named_with_what_is_missing(tmp_path: Path, wheel: TritonWheel) -> None:
    metadata_folder = tmp_path / f"nvidia_pytriton-{wheel.version}.dist-info"
    metadata_folder.mkdir()
    (metadata_folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: nvidia-pytriton\nVersion: {wheel.version}\n"
    )
    with pytest.raises(MissingWheelError, match=r"is installed without .*tritonserver"):
        find_wheel([tmp_path])


def test_the_installed_wheel_is_found_with_its_version(wheel: TritonWheel) -> None:
    assert wheel.version == importlib.metadata.version("nvidia-pytriton")
    assert os.access(wheel.tritonserver, os.X_OK)


def test_an_interpreter_without_a_stub_is_refused_with_the_supported_ones_in_order(wheel: TritonWheel) -> None:
    with pytest.raises(UnsupportedInterpreterError, match=r"Python 3\.7 has no .*3\.8, 3\.9, 3\.10, 3\.11"):
        wheel.stub("3.7")


def test_unknown_variant_lists_the_known_ones(repository: ModelRepository) -> None:
    with pytest.raises(UnknownVariantError, match="unknown variant 'third': known are default, first, second"):
        repository.check_variant("third")


def test_a_folder_without_our_model_is_no_repository(tmp_path: Path) -> None:
    with pytest.raises(UnknownRepositoryError, match=r"llama/config\.pbtxt is missing"):
        ModelRepository.at(tmp_path)


def test_a_model_folder_becomes_absolute_so_that_the_servers_working_folder_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoint").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("checkpoint") == str(tmp_path / "checkpoint")


@pytest.mark.parametrize("hub_id", ["meta-llama/Llama-2-7b-hf", "gpt2", "org.name/model_1.5"])
def test_a_hub_id_passes_as_it_is(hub_id: str) -> None:
    assert resolve_model(hub_id) == hub_id


@pytest.mark.parametrize("typo", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "a/b/c", "models/typo", "x/", ""])
def test_a_model_that_looks_like_a_path_and_does_not_exist_is_refused(
    typo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownModelError, match="neither an existing folder nor a hub id"):
        resolve_model(typo)


def test_a_taken_port_is_named_with_its_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=rf"port {port} \(grpc\) on 127\.0\.0\.1 is in use.*--grpc-port"):
            HeldPorts("127.0.0.1", {**FREE, "grpc": port})


def test_one_port_for_two_services_is_refused() -> None:
    with pytest.raises(PortInUseError, match="port 18123 is asked for twice: http and metrics"):
        HeldPorts("127.0.0.1", {"http": 18123, "grpc": 0, "metrics": 18123})


def test_a_held_port_goes_to_nobody_else_who_wants_any_but_can_be_listened_on_by_name() -> None:
    with HeldPorts("127.0.0.1", FREE) as held, HeldPorts("127.0.0.1", FREE) as other:
        assert len({*held.numbers.values(), *other.numbers.values()}) == 6
        with socket.create_server(("127.0.0.1", held.numbers["http"])) as server:
            socket.create_connection(server.getsockname()).close()


@pytest.mark.parametrize("host", ["::1", "no such host", "256.0.0.1"])
def test_a_host_that_tritonserver_could_not_listen_on_is_refused(host: str) -> None:
    with pytest.raises(InvalidSettingError, match="is no IPv4 address"):
        resolve_host(host)


@pytest.mark.parametrize(
    "argument",
    [
        "--http-port=1",
        "--model-config-name=x",
        "--grpc-address",
        "stray",
        # tritonserver takes these for options that they are the beginning of.
        "--exit-timeout=5",
        "--http-p=1",
        "--allow-met=off",
    ],
)
@pytest.mark.parametrize("supervised", [True, False])
def test_arguments_that_would_contradict_the_launcher_are_refused(argument: str, supervised: bool) -> None:
    with pytest.raises(ReservedArgumentError, match=argument.split("=")[0]):
        check_extra_arguments([argument], supervised)


def test_model_control_is_the_supervisors_where_there_is_one() -> None:
    with pytest.raises(ReservedArgumentError, match=r"--model-control-mode .* use --unsupervised"):
        check_extra_arguments(["--model-control-mode=poll"], supervised=True)
    with pytest.raises(ReservedArgumentError, match="--model-control is cut short"):
        check_extra_arguments(["--model-control=none"], supervised=True)
    for restricted in ("--http-restricted-api=inference:k=v", "--grpc-restricted-protocol=health:k=v"):
        with pytest.raises(ReservedArgumentError, match=r"a supervised tritonserver, .*; use a proxy"):
            check_extra_arguments([restricted], supervised=True)
        check_extra_arguments([restricted], supervised=False)
    check_extra_arguments(["--model-control-mode=poll"], supervised=False)


@pytest.mark.parametrize(
    ("supervised", "message"),
    [
        (Supervised(stuck_after=0), "stuck after 0 is out of bounds: more than 0 seconds"),
        (Supervised(stuck_after=math.nan), "stuck after nan"),
        (Supervised(notice=-1), "notice -1 is out of bounds: 0 seconds or more"),
        (Supervised(notice=math.inf), "notice inf"),
    ],
)
def test_seconds_that_nobody_can_wait_are_refused(supervised: Supervised, message: str) -> None:
    with pytest.raises(InvalidSettingError, match=message):
        supervised.check()


@pytest.mark.parametrize(
    ("extra", "seconds"), [([], 120), (["--exit-timeout-secs=5"], 5), (["--exit-timeout-secs", "7"], 7)]
)
def test_the_kill_after_sigterm_waits_for_tritonservers_own_timeout(extra: list[str], seconds: float) -> None:
    assert exit_timeout(extra) == seconds


@pytest.mark.parametrize("value", ["inf", "nan", "-5", "3601", "5s", "1.5", ""])
def test_an_exit_timeout_that_is_no_number_of_seconds_is_waited_for_or_breaks_the_start(value: str) -> None:
    with pytest.raises(InvalidSettingError) as refused:
        exit_timeout([f"--exit-timeout-secs={value}"])
    assert str(refused.value) == f"--exit-timeout-secs is {value!r}; it must be a whole number, 0 ... 3600"


def test_a_service_that_is_off_is_waited_for() -> None:
    assert served(["--allow-metrics=OFF", "--allow-grpc", "off"]) == ("http",)
    assert served(["--allow-metrics=OFF", "--allow-metrics=on"]) == ("http", "grpc", "metrics")


def test_the_cache_is_where_the_environment_says() -> None:
    assert cache_root({"TRITON_LLAMA_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}) == Path("/own")
    assert cache_root({"XDG_CACHE_HOME": "/xdg"}) == Path("/xdg/triton-llama")
    assert cache_root({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "triton-llama"
    assert cache_root({}) == Path.home() / ".cache" / "triton-llama"


def test_first_starts_at_the_same_time_share_one_whole_runtime(tmp_path: Path, wheel: TritonWheel) -> None:
    roots: list[Path] = []
    together = threading.Barrier(8)

    def start() -> None:
        together.wait()
        roots.append(prepare_runtime(wheel, INTERPRETER, tmp_path).root)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(roots) == 8
    assert set(roots) == set(tmp_path.iterdir()), "one runtime, and no half-built one beside it"


def test_a_runtime_that_lost_a_file_is_built_again(tmp_path: Path, wheel: TritonWheel) -> None:
    runtime = prepare_runtime(wheel, INTERPRETER, tmp_path)
    stub = runtime.backends / "python" / "triton_python_backend_stub"
    stub.unlink()
    assert prepare_runtime(wheel, INTERPRETER, tmp_path).root == runtime.root
    assert stub.exists()
    assert list(tmp_path.iterdir()) == [runtime.root]


def test_the_stub_finds_this_interpreters_python_and_library_first(tmp_path: Path, wheel: TritonWheel) -> None:
    runtime = prepare_runtime(wheel, INTERPRETER, tmp_path)
    inherited = {"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/cuda"}
    environment = server_environment(runtime, inherited, "gpt2", {"A": "b"}, grace=90, stuck=30.0)
    linked = subprocess.run(
        ["ldd", str(runtime.backends / "python" / "triton_python_backend_stub")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"{runtime.root}/lib/{INTERPRETER.libpython().name}" in linked
    assert "not found" not in linked
    assert environment["PATH"].split(":")[0] == str(INTERPRETER.executable.parent)
    assert environment["LD_LIBRARY_PATH"].endswith(":/cuda")
    assert environment["LLAMA_MODEL"] == "gpt2"
    assert environment["A"] == "b"


def test_the_models_own_seconds_are_others_than_the_launchers(tmp_path: Path, wheel: TritonWheel) -> None:
    runtime = prepare_runtime(wheel, INTERPRETER, tmp_path)

    def seconds(inherited: dict[str, str], overrides: dict[str, str], stuck: float | None = 30.0) -> list[str | None]:
        environment = server_environment(runtime, inherited, None, overrides, grace=90, stuck=stuck)
        return [environment.get(f"LLAMA_{name}_SECONDS") for name in ("DRAIN", "STUCK")]

    assert seconds({}, {}) == ["90", "30"]
    assert seconds({"LLAMA_DRAIN_SECONDS": "", "LLAMA_STUCK_SECONDS": ""}, {}) == ["90", "30"]
    assert seconds({"LLAMA_DRAIN_SECONDS": "5"}, {"LLAMA_STUCK_SECONDS": "6"}) == ["5", "6"]
    assert seconds({}, {}, Supervised(stuck_after=None).stuck_seconds) == ["90", "0"]
    assert seconds({}, {}, None) == ["90", None]
