"""Two replicas behind the proxy are restarted or replaced one after the other under load, and no request is lost.

Every client keeps its connection to the proxy open.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
from compose.commands import CommandFailedError, run
from compose.project import BUILD_AND_START_S, STOP_S
from compose.proxied import Connection, Proxied
from compose.steady_load import Request, SteadyLoad, steady_load
from triton_llama import LlamaClient

PROMPTS = ["The list class in Python", "A dictionary is", "Return True if", "Raise an error if"]
TOKENS = 60
# The penalty is the client library's default; the checkpoint's differs.
LIMITS = {"max_tokens": TOKENS, "min_tokens": TOKENS, "temperature": 0.0, "repetition_penalty": 1.0}


@pytest.fixture(scope="module")
def texts(proxied: Proxied) -> list[str]:
    """Each prompt's completion without other load."""
    with closing(Connection(proxied, "steady")) as connection:
        return [connection.generate({"text_input": prompt, **LIMITS}) for prompt in PROMPTS]


@contextmanager
def http_clients(proxied: Proxied) -> Iterator[list[Request]]:
    """Yield a client for each prompt, each on its own connection."""
    with ExitStack() as stack:
        connections = [stack.enter_context(closing(Connection(proxied, "steady"))) for _ in PROMPTS]
        yield [
            partial(connection.generate, {"text_input": prompt, **LIMITS})
            for connection, prompt in zip(connections, PROMPTS, strict=True)
        ]


@contextmanager
def grpc_clients(proxied: Proxied, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Request]]:
    """Yield a client for each prompt over gRPC, all on one connection."""
    monkeypatch.setenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", str(proxied.gate.certificate))
    headers = {"Authorization": proxied.gate.authorization("steady")}
    with LlamaClient(f"grpcs://{proxied.address}", "grpc", timeout=180, headers=headers) as client:

        def generate(prompt: str) -> str:
            return client.generate(prompt, max_tokens=TOKENS, min_tokens=TOKENS, temperature=0.0).text

        yield [partial(generate, prompt) for prompt in PROMPTS]


def rolling_restart(proxied: Proxied, *options: str, **variables: str) -> str:
    """Run deploy/proxy/rolling-restart.sh; return its output. Raises CommandFailedError."""
    project = proxied.project
    environment = {
        **project.engine.environment,
        "COMPOSE_PROJECT_NAME": project.name,
        "COMPOSE_ENV_FILES": str(project.variables),
        **variables,
    }
    script: Path = project.repository / "deploy" / "proxy" / "rolling-restart.sh"
    return run([script, *options], environment=environment, timeout=BUILD_AND_START_S).stdout


def restart_under_load(
    proxied: Proxied, texts: list[str], monkeypatch: pytest.MonkeyPatch, *options: str
) -> tuple[list[str], list[str]]:
    """Restart under HTTP and gRPC load and check every response; return the replicas before and after."""
    before = proxied.replicas()
    with (
        http_clients(proxied) as http,
        grpc_clients(proxied, monkeypatch) as grpc,
        steady_load([*http, *grpc]) as load,
    ):
        output = rolling_restart(proxied, *options)
        load.wait_for_more()
    assert output.count("has stopped with exit code 0") == 2
    assert_complete(load, texts * 2)
    return before, proxied.replicas()


def assert_complete(load: SteadyLoad, texts: list[str]) -> None:
    """Every response is the whole text, once."""
    for text, responses in zip(texts, load.responses, strict=True):
        assert set(responses) == {text}


def test_a_rolling_restart_loses_no_request_and_no_connection(
    proxied: Proxied, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = {replica: proxied.started_at(replica) for replica in proxied.replicas()}
    before, _ = restart_under_load(proxied, texts, monkeypatch)
    assert len(before) == 2
    assert all(proxied.started_at(replica) != started[replica] for replica in before)


def test_recreating_replicas_loses_no_request_and_serves_the_new_environment(
    proxied: Proxied, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxied.project.variables.open("a") as variables:
        variables.write("LLAMA_DEFAULT_MAX_TOKENS=33\n")
    old, new = restart_under_load(proxied, texts, monkeypatch, "--recreate")
    assert len(new) == 2
    assert not set(new) & set(old)
    for replica in new:
        environment = proxied.project.engine.docker("inspect", "--format", "{{.Config.Env}}", replica).stdout
        assert "LLAMA_DEFAULT_MAX_TOKENS=33" in environment


def test_replicas_are_not_recreated_without_the_proxys_ready_port(proxied: Proxied) -> None:
    before = proxied.replicas()
    with pytest.raises(CommandFailedError, match="TRITON_READY_PORT"):
        rolling_restart(proxied, "--recreate", COMPOSE_FILE="docker-compose.yml")
    assert proxied.replicas() == before


def test_a_replica_that_stops_without_notice_costs_no_http_request(proxied: Proxied, texts: list[str]) -> None:
    docker = proxied.project.engine.docker
    replica = proxied.replicas()[0]
    with http_clients(proxied) as clients, steady_load(clients) as load:
        # Announced, so that there is no notice; for 0 s, so that the proxy has not checked since.
        docker("exec", replica, "python3", "-m", "triton_supervisor", "announce", "--seconds", "0")
        docker("stop", replica, timeout=STOP_S)
        load.wait_for_more()
    assert docker("inspect", "--format", "{{.State.ExitCode}}", replica).stdout.strip() == "0"
    docker("start", replica)
    assert_complete(load, texts)
