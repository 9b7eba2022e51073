"""Two Tritons behind Envoy: sessions keep their replica, and deaths and restarts reach no client."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from end_to_end.servers import HTTP, new_server, ports_of, until
from frontend.endpoints import endpoint
from triton_local.envoy import FOLDER, LocalEnvoy
from triton_local.server import LocalTriton

TURNS, SESSIONS = 8, 4
LONG = {"max_tokens": 300, "min_tokens": 300, "temperature": 2}
"""Nothing of this text repeats, so that drafts don't shorten it."""


class Replicas(NamedTuple):
    tritons: list[LocalTriton]
    envoy: LocalEnvoy
    alone: str
    """URL of an endpoint in front of the first Triton by itself."""

    @property
    def url(self) -> str:
        return f"http://{self.envoy.address('clients')}"


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    folder = tmp_path_factory.mktemp("envoy")
    _make_certificate(folder)
    with LocalEnvoy() as envoy, ExitStack() as stack:
        tritons = [new_server("streaming") for _ in range(2)]
        with ThreadPoolExecutor() as threads:
            list(threads.map(LocalTriton.start, tritons))
        # Those that tests have put in their place, too.
        stack.callback(_stop, tritons)
        both, alone = (
            stack.enter_context(endpoint(int(address.split(":")[1]), triton_metrics=tritons[0].metrics_url))
            for address in (envoy.address("tritons"), tritons[0].grpc_url)
        )
        envoy.start(tritons, [f"127.0.0.1:{both.port}"], folder)
        until(lambda: HTTP.get(f"http://{envoy.address('clients')}/health").is_success, lambda: "it is healthy")
        yield Replicas(tritons, envoy, f"http://127.0.0.1:{alone.port}")


def _stop(tritons: list[LocalTriton]) -> None:
    with ThreadPoolExecutor() as threads:
        list(threads.map(LocalTriton.stop, tritons))


def _make_certificate(folder: Path) -> None:
    Path(f"{folder}-tls").mkdir()
    text = (FOLDER / "certificate.yaml").read_text()
    (folder / "certificate.yaml").write_text(text.replace("/etc/envoy", str(folder)))
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", f"{folder}-tls/tls.key"]
    subprocess.run([*command, "-out", f"{folder}-tls/tls.crt"], check=True, capture_output=True)


def _complete(url: str, session: str = "", **fields: object) -> httpx.Response:
    body = {"prompt": "Return a list", "max_tokens": 8, **fields}
    return HTTP.post(f"{url}/v1/completions", json=body, headers={"x-session-id": session} if session else {})


def _cached_tokens(url: str) -> int:
    """Return how many tokens sessions of several turns find cached, in all of them."""

    def session(name: str) -> int:
        cached, text = 0, f"{name}: "
        for turn in range(TURNS):
            text += f"{turn}. What does the function of this name do with all the words in the list? "
            answer = _complete(url, name, prompt=text, temperature=0).raise_for_status().json()
            text += answer["choices"][0]["text"]
            cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached

    with ThreadPoolExecutor() as threads:
        return sum(threads.map(session, [secrets.token_hex(8) for _ in range(SESSIONS)]))


def test_sessions_find_as_many_pages_as_at_one_replica(replicas: Replicas) -> None:
    assert _cached_tokens(replicas.url) >= 0.9 * _cached_tokens(replicas.alone) > 0


def _shares(replicas: Replicas, answers: list[httpx.Response]) -> list[int]:
    """Return how many of these requests each Triton answered."""
    ids = {answer.raise_for_status().headers["x-request-id"] for answer in answers}

    def shares() -> list[int]:
        return [sum(f"id={name} " in triton.log_text() for name in ids) for triton in replicas.tritons]

    until(lambda: sum(shares()) == len(answers), lambda: "every request is in a log")
    return shares()


def test_a_sessions_turns_stay_at_one_replica(replicas: Replicas) -> None:
    answers = [_complete(replicas.url, "a", prompt=f"Turn {turn}") for turn in range(TURNS)]
    assert min(_shares(replicas, answers)) == 0


def test_a_loaded_home_gives_way(replicas: Replicas) -> None:
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda _: _complete(replicas.url, "b", **LONG), range(16)))
    # How many depends on how many of the answers are under way at a time.
    assert min(_shares(replicas, answers)) > 0


def test_no_request_fails_after_a_tritons_death(replicas: Replicas) -> None:
    os.kill(replicas.tritons[0].pid, signal.SIGKILL)
    assert [_complete(replicas.url, str(number)).status_code for number in range(20)] == [200] * 20
    _start_again(replicas.tritons, 0)


@pytest.mark.long
def test_a_rolling_restart_fails_no_request(replicas: Replicas) -> None:
    over = threading.Event()

    def send(_: int) -> set[int]:
        statuses = set[int]()
        while not over.is_set():
            statuses.add(_complete(replicas.url, secrets.token_hex(8)).status_code)
        return statuses

    with ThreadPoolExecutor(4) as threads:
        sending = threads.map(send, range(4))
        try:
            for number, triton in enumerate(replicas.tritons):
                triton.terminate()
                _start_again(replicas.tritons, number)
                # An orchestrator waits, too, until a new server is known to be ready.
                time.sleep(2)
        finally:
            over.set()
        assert set.union(*sending) == {200}


def _start_again(tritons: list[LocalTriton], number: int) -> None:
    """Start a server at the ports of one that ends."""
    old = tritons[number]
    until(lambda: old.exit_code is not None, lambda: "it ends")
    old.stop()
    tritons[number] = new_server("streaming", ports=ports_of(old))
    tritons[number].start()


def test_clients_get_http_2_over_tls(replicas: Replicas) -> None:
    address = replicas.envoy.address("clients_tls")
    command = [
        "curl",
        "--silent",
        "--insecure",
        "--http2",
        f"https://{address}/v1/models",
        "--write-out",
        "\n%{http_version}",
    ]
    models, version = subprocess.run(command, check=True, capture_output=True, text=True).stdout.rsplit("\n", 1)
    assert (json.loads(models)["data"][0]["id"], version) == ("pydoc-llama", "2")


def test_a_body_over_the_limit_is_refused(replicas: Replicas) -> None:
    assert _complete(replicas.url, prompt="a" * (4 << 20)).status_code == 413


def test_a_key_over_its_rate_is_refused_and_others_are_not(replicas: Replicas) -> None:
    # On a busy machine httpx sends no more in a second than Envoy allows.
    command = ["curl", "--silent", "--output", "/dev/null", "--write-out", "%{http_code} ", "--header"]

    def statuses(header: str, target: str = "/metrics") -> set[str]:
        url = f"{replicas.url}{target}"
        return {*subprocess.run([*command, header, url], check=True, capture_output=True, text=True).stdout.split()}

    assert "429" in statuses("authorization: Bearer fast", "/metrics?[1-5000]")
    assert statuses("authorization: Bearer slow") | statuses("x-api-key: another") == {"404"}


@pytest.mark.parametrize(
    "target",
    ["/metrics", "/metrics/", "/metrics?x", "//metrics", "/%6detrics", "/a/../metrics", "/metrics/a/..", "/metrics%2f"],
)
def test_metrics_are_not_for_clients(replicas: Replicas, target: str) -> None:
    # httpx would resolve the dots.
    with closing(HTTPConnection(replicas.envoy.address("clients"))) as connection:
        connection.request("GET", target)
        assert connection.getresponse().status == 404
