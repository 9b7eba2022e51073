"""Two replicas behind the proxy are restarted or replaced one after the other under load, and no request is lost.

Every client keeps its connection to the proxy open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from threading import Event

import pytest
from compose.commands import CommandFailedError, run
from compose.engine import BUILD_AND_START_S
from compose.proxied import Connection, Proxied
from contract.code_blocks import ROOT
from server.servers import until
from triton_llama import LlamaClient

PROMPTS = ["The list class in Python", "A dictionary is", "Return True if", "Raise an error if"]
TOKENS = 60
# The penalty is the client library's default; the checkpoint's differs.
LIMITS = {"max_tokens": TOKENS, "min_tokens": TOKENS, "temperature": 0.0, "repetition_penalty": 1.0}

Request = Callable[[], str]


@contextmanager
def http_clients(proxied: Proxied) -> Iterator[list[Request]]:
    """Yield a client for each prompt, each on its own connection."""
    with ExitStack() as stack:
        yield [
            partial(
                stack.enter_context(closing(Connection(proxied, proxied.authorization("steady")))).generate,
                {"text_input": prompt, **LIMITS},
            )
            for prompt in PROMPTS
        ]


@contextmanager
def grpc_clients(proxied: Proxied, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Request]]:
    """Yield a client for each prompt over gRPC, all on one connection."""
    monkeypatch.setenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", str(proxied.certificate))
    headers = proxied.authorization("steady")
    with LlamaClient(f"grpcs://{proxied.address}", "grpc", timeout=180, headers=headers) as client:

        def generate(prompt: str) -> str:
            return client.generate(prompt, max_tokens=TOKENS, min_tokens=TOKENS, temperature=0.0).text

        yield [partial(generate, prompt) for prompt in PROMPTS]


@contextmanager
def steady_load(requests: Sequence[Request], texts: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Repeat each request in a thread of its own until the end of the block; every response must be its whole text.

    Yields, once each has a response, a function that waits until each has another. Raises a client's exception.
    """
    stop, responses = Event(), [0] * len(requests)

    def repeat(index: int) -> None:
        while not stop.is_set():
            assert requests[index]() == texts[index]
            responses[index] += 1
            # The server is quick: without a pause these clients would exceed the proxy's rate.
            stop.wait(0.5)

    with ThreadPoolExecutor(len(requests)) as pool:
        clients = [pool.submit(repeat, index) for index in range(len(requests))]

        def wait_for_more() -> None:
            before = [*responses]

            def all_have_more() -> bool:
                return all(now > then for now, then in zip(responses, before, strict=True))

            until(
                lambda: all_have_more() or any(client.done() for client in clients),
                lambda: f"every client has another response: {responses}",
            )

        try:
            wait_for_more()
            yield wait_for_more
        finally:
            stop.set()
        for client in clients:
            client.result()


@pytest.fixture(scope="module")
def texts(proxied: Proxied) -> list[str]:
    """Each prompt's completion without other load."""
    with http_clients(proxied) as clients:
        return [client() for client in clients]


def rolling_restart(proxied: Proxied, *options: str, **variables: str) -> str:
    """Run deploy/proxy/rolling-restart.sh; return its output. Raises CommandFailedError."""
    project = proxied.project
    files = {"COMPOSE_PROJECT_NAME": project.name, "COMPOSE_ENV_FILES": str(project.variables)}
    script = ROOT / "deploy" / "proxy" / "rolling-restart.sh"
    environment = {**project.engine.environment, **files, **variables}
    return run([script, *options], environment=environment, timeout=BUILD_AND_START_S).stdout


@pytest.mark.parametrize("options", [(), ("--recreate",)], ids=["restart", "recreate"])
def test_a_rolling_restart_loses_no_request_and_no_connection(
    proxied: Proxied, texts: list[str], monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    with proxied.project.variables.open("a") as variables:
        variables.write("LLAMA_DEFAULT_MAX_TOKENS=33\n")
    before = proxied.replicas()
    with (
        http_clients(proxied) as http,
        grpc_clients(proxied, monkeypatch) as grpc,
        steady_load([*http, *grpc], texts * 2) as wait_for_more,
    ):
        output = rolling_restart(proxied, *options)
        wait_for_more()
    assert output.count("has stopped with exit code 0") == 2
    after = proxied.replicas()
    assert (len(before), len(after)) == (2, 2)
    assert not set(before.values()) & set(after.values()), "a replica goes on as it was"
    assert (set(before) & set(after) == set()) if options else (set(before) == set(after))
    for replica in after:
        environment = proxied.project.engine.inspect(replica, "{{.Config.Env}}")
        assert ("LLAMA_DEFAULT_MAX_TOKENS=33" in environment) == bool(options), "only a new container has it"


def test_replicas_are_not_recreated_without_the_proxys_ready_port(proxied: Proxied) -> None:
    before = proxied.replicas()
    with pytest.raises(CommandFailedError, match="TRITON_READY_PORT"):
        rolling_restart(proxied, "--recreate", COMPOSE_FILE="docker-compose.yml")
    assert proxied.replicas() == before
