"""The supervisor's settings and tritonserver's command line, and what is refused before a start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from triton_supervisor.settings import RefusedError, Settings
from triton_supervisor.triton import Address
from triton_supervisor.tritonserver_options import (
    CONTROL_HEADER,
    MAX_BODY_BYTES,
    Options,
    served_models,
    server_command,
)

DEFAULTS = Settings.of({})


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two configs, and a tritonserver on PATH that prints its help."""
    (tmp_path / "llama" / "configs").mkdir(parents=True)
    (tmp_path / "llama_unary").mkdir()
    for name, decoupled in (("streaming", "true"), ("batched", "false # not decoupled: true")):
        config = tmp_path / "llama" / "configs" / f"{name}.pbtxt"
        config.write_text(f"# decoupled: true\nmodel_transaction_policy {{ decoupled: {decoupled}\n}}")
    _tritonserver(tmp_path, "--model-repository <string>")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def _tritonserver(folder: Path, help_text: str) -> None:
    program = folder / "tritonserver"
    program.write_text(f"#!/bin/sh\necho '{help_text}'\n")
    program.chmod(0o755)


def _command(repository: Path, *arguments: str, settings: Settings = DEFAULTS) -> list[str]:
    arguments = (f"--model-repository={repository}", *arguments)
    return server_command(arguments, Options.parse(arguments), ["llama"], settings, "the-key", "prefix_")


def test_missing_settings_are_the_defaults() -> None:
    names = ("GRACE_SECONDS", "STUCK_SECONDS", "MODEL_CONFIG")
    assert Settings.of({f"TRITON_{name}": "" for name in names}) == DEFAULTS
    assert Settings("streaming", 120, 120) == DEFAULTS


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("TRITON_GRACE_SECONDS", "0", "1 ... 3600"),
        ("TRITON_STUCK_SECONDS", "5", "0 (never) or 10 ... 3600"),
        ("TRITON_STUCK_SECONDS", "1_0", "0 ... 3600"),
        ("TRITON_STUCK_SECONDS", "9" * 5000, "0 ... 3600"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_bound(name: str, value: str, bound: str) -> None:
    with pytest.raises(RefusedError) as refused:
        Settings.of({name: value})
    assert name in str(refused.value)
    assert value in str(refused.value)
    assert str(refused.value).endswith(bound)


@pytest.mark.parametrize(
    ("variables", "drain", "stuck"),
    [
        ({"TRITON_GRACE_SECONDS": "45", "TRITON_STUCK_SECONDS": "50"}, "45", "50"),
        ({"TRITON_STUCK_SECONDS": "0", "LLAMA_DRAIN_SECONDS": "", "LLAMA_MODEL": ""}, "120", "0"),
        ({"TRITON_STUCK_SECONDS": "45", "LLAMA_STUCK_SECONDS": "7", "LLAMA_DRAIN_SECONDS": "8"}, "8", "7"),
    ],
)
def test_the_model_has_the_supervisors_seconds_unless_set(variables: dict[str, str], drain: str, stuck: str) -> None:
    model = Settings.of(variables).for_model(variables)
    # An empty setting is a missing one.
    seconds = {"LLAMA_DRAIN_SECONDS": drain, "LLAMA_STUCK_SECONDS": stuck}
    assert {name: value for name, value in model.items() if name.startswith("LLAMA_")} == seconds


@pytest.mark.parametrize(
    ("config", "models"),
    [("default", ("llama",)), ("batched", ("llama",)), ("streaming", ("llama", "llama_unary"))],
)
def test_llama_unary_is_loaded_beside_a_decoupled_config(
    repository: Path, config: str, models: tuple[str, ...]
) -> None:
    assert served_models(repository, config) == models
    (repository / "llama_unary").rmdir()
    assert served_models(repository, config) == ("llama",)


def test_an_unknown_config_is_refused(repository: Path) -> None:
    with pytest.raises(RefusedError, match=r"'fast' \(VARIANT, .*\) is unknown; known: default batched streaming$"):
        served_models(repository, "fast")


def test_control_apis_need_the_key_over_both_protocols(repository: Path) -> None:
    setting = f"model-repository,shared-memory,trace,logging:{CONTROL_HEADER}=the-key"
    command = _command(repository)
    assert f"--http-restricted-api={setting}" in command
    assert f"--grpc-restricted-protocol={setting}" in command


@pytest.mark.parametrize("has_limit", [False, True])
def test_only_a_tritonserver_with_the_option_gets_the_body_limit(repository: Path, has_limit: bool) -> None:
    if has_limit:
        _tritonserver(repository, "--http-max-input-size <integer>")
    assert (f"--http-max-input-size={MAX_BODY_BYTES}" in _command(repository)) == has_limit


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--model-control-mode=poll", "--model-control-mode can't go to tritonserver directly"),
        ("--exit-timeout-secs=3", "use TRITON_GRACE_SECONDS"),
        ("--allow-http=false", "the supervisor drains over HTTP"),
        ("--http-port=many", r"--http-port is 'many'; it must be a whole number, 1 \.\.\. 65535"),
        ("--metrics-port", "--metrics-port: expected one argument"),
        ("--http-restricted-api=inference:key=x", "use a proxy: it controls who reaches the rest"),
        ("--grpc-restricted-protocol=health:key=x", "--grpc-restricted-protocol can't go .* use a proxy"),
    ],
)
def test_an_option_that_contradicts_the_supervisor_is_refused(repository: Path, argument: str, message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        _command(repository, argument)


def test_a_word_that_is_no_option_is_refused() -> None:
    with pytest.raises(RefusedError, match="unexpected argument 'serve'"):
        server_command(["serve"], Options.parse(["serve"]), [], DEFAULTS, "", "")


def test_other_options_go_to_tritonserver(repository: Path) -> None:
    others = ["--http-thread-count=4", "--model-load-thread-count", "2", "--log-info=off", "--allow-grpc=false"]
    assert _command(repository, *others)[-len(others) :] == others


def test_addresses_come_from_the_options() -> None:
    for arguments, http, metrics in (
        ([], ("127.0.0.1", 8000), ("127.0.0.1", 8002)),
        (
            ["--http-port", "1", "--http-address=127.0.0.9", "--metrics-port=3", "--http-port=2"],
            ("127.0.0.9", 2),
            ("127.0.0.9", 3),
        ),
        (["--http-address=0.0.0.0", "--metrics-address=127.0.0.7"], ("127.0.0.1", 8000), ("127.0.0.7", 8002)),
    ):
        options = Options.parse(arguments)
        assert (options.http, options.metrics) == (Address(*http), Address(*metrics))


@pytest.mark.parametrize("value", ["false", "oFf", "0"])
def test_metrics_that_are_off_have_no_address(value: str) -> None:
    assert Options.parse(["--allow-metrics=true", "--allow-metrics", value]).metrics is None
