"""The supervisor's settings and tritonserver's command line, and what is refused before a start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from triton_supervisor.command import is_off, last_value, plan_container
from triton_supervisor.plan import Plan
from triton_supervisor.settings import RefusedError, Settings, with_model_defaults
from triton_supervisor.shared_memory import prefix_for
from triton_supervisor.triton_http import Address

KEY = "k3y-" * 8


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two configs, and a tritonserver on PATH that prints its help."""
    (tmp_path / "llama" / "configs").mkdir(parents=True)
    (tmp_path / "llama_unary").mkdir()
    for name, decoupled in (("streaming", "true"), ("batched", "false # not decoupled: true")):
        config = tmp_path / "llama" / "configs" / f"{name}.pbtxt"
        config.write_text(f"# decoupled: true\nmodel_transaction_policy {{ decoupled: {decoupled}\n}}")
    program = tmp_path / "bin" / "tritonserver"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho '--model-repository <string>'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path


def _plan(repository: Path, *extra: str, **environment: str) -> Plan:
    given = {"PATH": os.environ["PATH"], **environment}
    return plan_container(extra, given, Settings.of(given), prefix_for("me"), repository)


def test_missing_and_empty_settings_are_the_defaults() -> None:
    default = Settings(grace=120, notice=0, stuck=120, restarts=5, restart_minutes=10, state_file=None, ready_port=None)
    seconds = ("GRACE_SECONDS", "NOTICE_SECONDS", "STUCK_SECONDS")
    names = (*seconds, "RESTARTS", "RESTART_MINUTES", "STATE_FILE", "READY_PORT")
    assert Settings.of({}) == Settings.of({f"TRITON_{name}": "" for name in names}) == default


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("TRITON_GRACE_SECONDS", "0", "1 ... 3600"),
        ("TRITON_GRACE_SECONDS", "1_0", "1 ... 3600"),
        ("TRITON_NOTICE_SECONDS", "-1", "0 ... 3600"),
        ("TRITON_STUCK_SECONDS", "5", "0 (never) or 10 ... 3600"),
        ("TRITON_RESTARTS", "1001", "0 ... 1000"),
        ("TRITON_RESTART_MINUTES", "0", "1 ... 1440"),
        ("TRITON_READY_PORT", "9" * 5000, "0 ... 65535"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_name_value_and_bound(name: str, value: str, bound: str) -> None:
    with pytest.raises(RefusedError) as refused:
        Settings.of({name: value})
    assert name in str(refused.value)
    assert value in str(refused.value)
    assert str(refused.value).endswith(bound)


@pytest.mark.parametrize(
    ("config", "models"),
    [("default", ["llama"]), ("batched", ["llama"]), ("", ["llama", "llama_unary"])],
)
def test_llama_unary_is_loaded_where_it_is_beside_a_decoupled_config(
    repository: Path, config: str, models: list[str]
) -> None:
    plan = _plan(repository, TRITON_MODEL_CONFIG=config)
    assert list(plan.models) == models
    (repository / "llama_unary").rmdir()
    assert _plan(repository, TRITON_MODEL_CONFIG=config).models == ("llama",)


@pytest.mark.parametrize(
    ("given", "drain", "stuck"),
    [
        ({}, "120", "120"),
        ({"TRITON_GRACE_SECONDS": "45", "TRITON_STUCK_SECONDS": "50"}, "45", "50"),
        ({"TRITON_STUCK_SECONDS": "0", "LLAMA_DRAIN_SECONDS": "", "LLAMA_MODEL": ""}, "120", "0"),
        ({"TRITON_STUCK_SECONDS": "45", "LLAMA_STUCK_SECONDS": "7", "LLAMA_DRAIN_SECONDS": "8"}, "8", "7"),
    ],
)
def test_the_model_has_the_supervisors_seconds_unless_set(
    repository: Path, given: dict[str, str], drain: str, stuck: str
) -> None:
    plan = _plan(repository, **given)
    assert f"--exit-timeout-secs={given.get('TRITON_GRACE_SECONDS', 120)}" in plan.arguments
    seconds = {"LLAMA_DRAIN_SECONDS": drain, "LLAMA_STUCK_SECONDS": stuck}
    # An empty setting is a missing one.
    assert {name: value for name, value in plan.environment.items() if name.startswith("LLAMA_")} == seconds


def test_the_models_stuck_seconds_are_whole_ones_up_to_an_hour() -> None:
    for stuck, text in ((0.2, "1"), (44.5, "45"), (1e9, "3600"), (0.0, "0")):
        assert with_model_defaults({}, grace=1, stuck=stuck)["LLAMA_STUCK_SECONDS"] == text
    assert "LLAMA_STUCK_SECONDS" not in with_model_defaults({}, grace=1, stuck=None)


def test_the_named_config_is_served_and_an_unknown_one_refused(repository: Path) -> None:
    for streaming in ({}, {"TRITON_MODEL_CONFIG": ""}, {"TRITON_MODEL_CONFIG": "streaming"}):
        assert "--model-config-name=streaming" in _plan(repository, **streaming).arguments
    arguments = _plan(repository, TRITON_MODEL_CONFIG="default").arguments
    assert not [argument for argument in arguments if argument.startswith("--model-config-name")]
    with pytest.raises(RefusedError, match=r"^TRITON_MODEL_CONFIG=fast is unknown; known: default batched streaming$"):
        _plan(repository, TRITON_MODEL_CONFIG="fast")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("serve", "unexpected argument 'serve'"),
        ("--model-control-mode=poll", "--model-control-mode can't go to tritonserver directly"),
        ("--exit-timeout-secs=3", "use TRITON_GRACE_SECONDS"),
        ("--model-config-name=x", "use TRITON_MODEL_CONFIG"),
        ("--allow-http=OFF", "--allow-http=OFF leaves the supervisor no way to drain"),
        ("--http-port=many", r"--http-port is 'many'; it must be a whole number, 1 \.\.\. 65535"),
        ("--metrics-port=70000", r"--metrics-port is '70000'; .* 1 \.\.\. 65535"),
        ("--exit-timeout=5", "--exit-timeout is cut short; write out the option, --exit-timeout-secs if"),
        ("--http-restricted-api=inference:key=x", "use a proxy: it controls who reaches the rest"),
        ("--grpc-restricted-protocol=health:key=x", "--grpc-restricted-protocol can't go .* use a proxy"),
    ],
)
def test_an_option_that_contradicts_the_supervisor_is_refused(repository: Path, argument: str, message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        _plan(repository, argument)


def test_other_options_go_to_tritonserver(repository: Path) -> None:
    # `--http-thread` and `--model-load-thread-count` abbreviate no option that the supervisor uses.
    others = ("--http-thread=4", "--model-load-thread-count", "2", "--log-info=off", "--allow-grpc=false")
    assert _plan(repository, *others).arguments[-len(others) :] == others


def test_the_last_value_turns_a_service_off() -> None:
    for value in ("false", "False", "FALSE", "oFf", "0"):
        assert is_off(["--allow-x=true", f"--allow-x={value}"], "--allow-x")
        assert is_off(["--allow-x", value], "--allow-x")
        assert not is_off([f"--allow-x={value}", "--allow-x=on"], "--allow-x")
        assert not is_off([f"--allow-xy={value}"], "--allow-x")
    assert last_value(["--allow-x"], "--allow-x") is None


def test_addresses_come_from_the_options(repository: Path) -> None:
    plan = _plan(repository)
    assert (plan.http, plan.metrics) == (Address("127.0.0.1", 8000), Address("127.0.0.1", 8002))
    plan = _plan(repository, "--http-port", "1", "--http-address=127.0.0.9", "--metrics-port=3", "--http-port=2")
    assert (plan.http, plan.metrics) == (Address("127.0.0.9", 2), Address("127.0.0.9", 3))
    plan = _plan(repository, "--http-address=0.0.0.0", "--metrics-address=127.0.0.7")
    assert (plan.http, plan.metrics) == (Address("127.0.0.1", 8000), Address("127.0.0.7", 8002))
    assert _plan(repository, "--allow-metrics=0").metrics is None
