"""Two replicas behind the example proxy: they are restarted one after the other, and no request is lost; and what the
proxy lets through to them.

Every client keeps its connection to the proxy all the time, as clients do.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from threading import Event

import grpc
import pytest
from compose.commands import CommandFailedError, run
from compose.conftest import REPOSITORY, NewProject
from compose.engine import DockerEngine
from compose.haproxy import proxy_image
from compose.project import BUILD_AND_START_S, STOP_S
from compose.proxied import PROXY_PORT, Connection, Proxied, make_gate, readme_block
from compose.steady_load import Ask, steady_load
from server.servers import until
from triton_llama import LlamaClient

REQUESTS_A_MINUTE = 4000
GREEDY_CONNECTIONS = 8
MOST_GREEDY_REQUESTS = 5 * REQUESTS_A_MINUTE
"""Over each connection, so that the test has an end."""

PROMPTS = ["The list class in Python", "A dictionary is", "Return True if", "Raise an error if"]
TOKENS = 60
# The penalty is the client library's; the checkpoint's own is another.
LIMITS = {"max_tokens": TOKENS, "min_tokens": TOKENS, "temperature": 0.0, "repetition_penalty": 1.0}
GENERATE = "/v2/models/llama/generate"
GRPC = "/inference.GRPCInferenceService"
# The type for which Triton 2.51 reads a body on its stack, and dies of a large one.
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
TOO_LONG = 600_000


@pytest.fixture(scope="module")
def proxied(
    new_project: NewProject, engine: DockerEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxied]:
    gate = make_gate(tmp_path_factory.mktemp("gate"))
    image = proxy_image(engine, REPOSITORY)
    variables = {"PROXY_REQUESTS_A_MINUTE": str(REQUESTS_A_MINUTE), **({"PROXY_IMAGE": image} if image else {})}
    with new_project({**gate.variables(), **variables}) as project:
        project.up()
        one = Proxied(project, gate)
        until(lambda: is_healthy(one), lambda: "the proxy has found a replica that is ready")
        yield one


def is_healthy(proxied: Proxied) -> bool:
    """Whether the proxy says that it has a replica; not if it doesn't listen yet."""
    try:
        with closing(Connection(proxied, None)) as connection:
            return connection.get("/healthy") == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def alone(proxied: Proxied) -> dict[str, str]:
    """What each prompt is answered when nobody disturbs it."""
    with closing(Connection(proxied, "steady")) as connection:
        return {prompt: connection.generate({"text_input": prompt, **LIMITS}) for prompt in PROMPTS}


@contextmanager
def http_clients(proxied: Proxied) -> Iterator[list[Ask]]:
    """One for each prompt, on a connection of its own."""
    with ExitStack() as stack:
        connections = [stack.enter_context(closing(Connection(proxied, "steady"))) for _ in PROMPTS]
        yield [
            partial(connection.generate, {"text_input": prompt, **LIMITS})
            for connection, prompt in zip(connections, PROMPTS, strict=True)
        ]


@contextmanager
def grpc_clients(proxied: Proxied, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Ask]]:
    """The same over gRPC, all on one connection."""
    monkeypatch.setenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", str(proxied.gate.certificate))
    headers = {"Authorization": proxied.gate.authorization("steady")}
    with LlamaClient(f"grpcs://{proxied.address}", "grpc", timeout=180, headers=headers) as client:

        def ask(prompt: str) -> str:
            return client.generate(prompt, max_tokens=TOKENS, min_tokens=TOKENS, temperature=0.0).text

        yield [partial(ask, prompt) for prompt in PROMPTS]


def rolling_restart(proxied: Proxied, *options: str, **variables: str) -> str:
    """Run the script that README.md gives; what it says. Raises CommandFailedError."""
    project = proxied.project
    environment = {
        **project.engine.environment,
        "COMPOSE_PROJECT_NAME": project.name,
        "COMPOSE_ENV_FILES": str(project.variables),
        **variables,
    }
    script: Path = project.repository / "deploy" / "proxy" / "rolling-restart.sh"
    return run([script, *options], environment=environment, timeout=BUILD_AND_START_S).stdout


def test_a_restart_of_every_replica_costs_a_request_or_a_connection(
    proxied: Proxied, alone: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = proxied.replicas()
    before = {replica: proxied.started_at(replica) for replica in replicas}
    with (
        http_clients(proxied) as http,
        grpc_clients(proxied, monkeypatch) as grpc,
        steady_load([*http, *grpc]) as load,
    ):
        said = rolling_restart(proxied)
        load.wait_for_more()
    assert len(replicas) == 2
    assert all(proxied.started_at(replica) != before[replica] for replica in replicas)
    assert said.count("has stopped with exit code 0") == 2
    # Each answer is the whole text, once.
    for prompt, answers in zip([*PROMPTS, *PROMPTS], load.answers, strict=True):
        assert set(answers) == {alone[prompt]}


def test_another_version_costs_a_request_or_is_not_what_serves(
    proxied: Proxied, alone: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = proxied.replicas()
    with proxied.project.variables.open("a") as variables:
        variables.write("LLAMA_DEFAULT_MAX_TOKENS=33\n")
    with (
        http_clients(proxied) as http,
        grpc_clients(proxied, monkeypatch) as grpc,
        steady_load([*http, *grpc]) as load,
    ):
        said = rolling_restart(proxied, "--recreate")
        load.wait_for_more()
    new = proxied.replicas()
    assert len(new) == 2
    assert not set(new) & set(old)
    for replica in new:
        told = proxied.project.engine.docker("inspect", "--format", "{{.Config.Env}}", replica).stdout
        assert "LLAMA_DEFAULT_MAX_TOKENS=33" in told
    assert said.count("has stopped with exit code 0") == 2
    for prompt, answers in zip([*PROMPTS, *PROMPTS], load.answers, strict=True):
        assert set(answers) == {alone[prompt]}


def test_a_replica_is_made_that_no_proxy_can_find(proxied: Proxied) -> None:
    before = proxied.replicas()
    with pytest.raises(CommandFailedError, match="TRITON_READY_PORT"):
        rolling_restart(proxied, "--recreate", COMPOSE_FILE="docker-compose.yml")
    assert proxied.replicas() == before


def test_a_replica_that_refuses_before_the_proxy_knows_costs_a_request(proxied: Proxied, alone: dict[str, str]) -> None:
    docker = proxied.project.engine.docker
    replica = proxied.replicas()[0]
    with http_clients(proxied) as clients, steady_load(clients) as load:
        # Announced, so that no notice is given; and for no time, so that the proxy can't have looked.
        docker("exec", replica, "python3", "-m", "triton_supervisor", "announce", "--seconds", "0")
        docker("stop", replica, timeout=STOP_S)
        load.wait_for_more()
    assert docker("inspect", "--format", "{{.State.ExitCode}}", replica).stdout.strip() == "0"
    docker("start", replica)
    for prompt, answers in zip(PROMPTS, load.answers, strict=True):
        assert set(answers) == {alone[prompt]}


@pytest.mark.parametrize(
    "path",
    [
        "/v2/repository/index",
        "/v2/models/llama/trace/setting",
        "/v2/logging",
        "/v2/systemsharedmemory/status",
        "/v2/models/llama/infer",
        "/v2/models/llama/versions/1/infer",
    ],
)
def test_a_client_reaches_what_is_not_for_clients(proxied: Proxied, path: str) -> None:
    with closing(Connection(proxied, "steady")) as connection:
        assert connection.get(path) == 403


@pytest.mark.parametrize("client", [None, "nobody"])
def test_somebody_without_a_key_is_answered(proxied: Proxied, client: str | None) -> None:
    with closing(Connection(proxied, client)) as connection:
        assert connection.get("/v2/health/ready") == 401


def test_a_body_that_is_too_long_is_read(proxied: Proxied) -> None:
    with closing(Connection(proxied, "steady")) as connection:
        assert connection.head_of_body(GENERATE, 600_000) == 413


def test_a_body_without_a_length_is_refused_although_it_is_short(proxied: Proxied) -> None:
    with closing(Connection(proxied, "steady")) as connection:
        body = json.dumps({"text_input": PROMPTS[0], **LIMITS}).encode().ljust(100_000)
        assert connection.chunked(GENERATE, FORM, body) == 200


@pytest.mark.parametrize(
    ("headers_of_4_kib", "status"),
    [(0, 413), (1, 413), (4, 431)],
    ids=["no head", "a head", "a head that fills the buffer"],
)
def test_a_body_that_does_not_say_how_long_it_is_comes_through(
    proxied: Proxied, headers_of_4_kib: int, status: int
) -> None:
    headers = {f"X-{number}": "x" * 4096 for number in range(headers_of_4_kib)}
    with closing(Connection(proxied, "steady")) as connection:
        assert connection.chunked(GENERATE, {**FORM, **headers}, bytes(TOO_LONG)) == status


@pytest.mark.parametrize(
    ("path", "content_type", "status"),
    [
        (f"{GRPC}/ModelStreamInfer", FORM["Content-Type"], 403),
        (f"{GRPC}/ModelInfer", FORM["Content-Type"], 415),
        (GENERATE, "application/grpc", 415),
    ],
)
def test_a_request_is_grpc_to_one_rule_and_http_to_another(
    proxied: Proxied, path: str, content_type: str, status: int
) -> None:
    with closing(Connection(proxied, "steady")) as connection:
        assert connection.chunked(path, {"Content-Type": content_type}, bytes(TOO_LONG)) == status


def test_a_compressed_body_gets_around_the_limit(proxied: Proxied) -> None:
    with closing(Connection(proxied, "steady")) as connection:
        assert connection.chunked(GENERATE, {"Content-Encoding": "gzip"}, bytes(1000)) == 415


@pytest.mark.parametrize(
    ("method", "message", "compression", "status"),
    [
        ("ModelInfer", bytes(TOO_LONG), grpc.Compression.NoCompression, "413"),
        ("ModelInfer", bytes(TOO_LONG), grpc.Compression.Gzip, "415"),
        ("ModelStreamInfer", b"", grpc.Compression.NoCompression, "403"),
    ],
)
def test_grpc_gets_around_the_limits(
    proxied: Proxied, method: str, message: bytes, compression: grpc.Compression, status: str
) -> None:
    credentials = grpc.ssl_channel_credentials(proxied.gate.certificate.read_bytes())
    metadata = [("authorization", proxied.gate.authorization("steady"))]
    with grpc.secure_channel(proxied.address, credentials) as channel:
        # On the wire a stream of one message is what a single one is.
        call = channel.unary_unary(f"{GRPC}/{method}")
        with pytest.raises(grpc.RpcError) as refused:
            call(message, timeout=60, metadata=metadata, compression=compression)
    assert status in refused.value.details()


def test_http2_gets_around_the_limit_in_small_pieces(proxied: Proxied) -> None:
    # The first piece of it: a body whose length nobody has declared. curl sends what it reads without one.
    authorization = f"Authorization: {proxied.gate.authorization('steady')}"
    asking = ["curl", "-sS", "--http2", "--cacert", str(proxied.gate.certificate), "-H", authorization, "-X", "POST"]
    url = f"https://{proxied.address}{GENERATE}"
    said = run(["bash", "-c", 'echo "{}" | "$@"', "curl", *asking, "-T", "-", "-w", "%{http_code}", url], timeout=60)
    assert said.stdout.endswith("411")


def test_what_the_readme_asks_is_not_answered(proxied: Proxied) -> None:
    gate = proxied.gate
    asking = readme_block("curl --cacert")
    asking = asking[asking.index("curl") :].replace(f"localhost:{PROXY_PORT}", proxied.address)
    environment = {"gate": str(gate.certificate.parent), "key": gate.keys["steady"], "PATH": os.environ["PATH"]}
    assert "text_output" in run(["bash", "-c", asking], timeout=120, environment=environment).stdout


def test_a_greedy_client_is_never_told_to_wait(proxied: Proxied) -> None:
    told = Event()

    def ask(connection: Connection) -> Counter[int]:
        statuses: Counter[int] = Counter()
        while not told.is_set() and statuses.total() < MOST_GREEDY_REQUESTS:
            # Nothing that a server would be asked for.
            statuses[connection.get("/greedy")] += 1
            if statuses[429]:
                told.set()
        return statuses

    # On several connections, because what counts is how many come within a minute.
    with ExitStack() as stack, ThreadPoolExecutor(GREEDY_CONNECTIONS) as pool:
        connections = [stack.enter_context(closing(Connection(proxied, "greedy"))) for _ in range(GREEDY_CONNECTIONS)]
        statuses = sum(pool.map(ask, connections), Counter[int]())
    assert statuses[429] >= 1, f"nobody was told to wait: {statuses}"
    assert set(statuses) == {403, 429}
    assert statuses[403] >= REQUESTS_A_MINUTE
