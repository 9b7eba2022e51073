"""Two Tritons behind Envoy: sessions keep their replica, and a death reaches no client.

Restarts, and answers that go on elsewhere, are in tests/perf/test_resumption.py. The last test leaves one
Triton dead.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from end_to_end.plans import planned
from end_to_end.servers import HTTP, is_healthy, until
from frontend.endpoints import endpoint
from triton_local.envoy import FOLDER, LocalEnvoy
from triton_local.server import LocalTriton

TURNS = 8
LONG = {"max_tokens": 300, "min_tokens": 300, "temperature": 2}
"""Nothing of this text repeats, so that drafts don't shorten it."""


class Replicas(NamedTuple):
    tritons: list[LocalTriton]
    envoy: LocalEnvoy

    @property
    def url(self) -> str:
        return f"http://{self.envoy.address('clients')}"


@pytest.fixture(scope="module")
def replicas(streaming: LocalTriton, ending: ExitStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """The server that other modules use, and one that a test kills."""
    folder = tmp_path_factory.mktemp("envoy")
    _make_certificate(folder)
    mortal = ending.enter_context(planned("streaming", folder))
    with LocalEnvoy() as envoy:
        port = int(envoy.address("tritons").split(":")[1])
        with endpoint(port, triton_metrics=streaming.metrics_address) as both:
            envoy.start([streaming, mortal], [f"127.0.0.1:{both.port}"], folder)
            until(lambda: is_healthy(f"http://{envoy.address('clients')}/health"), lambda: "it is healthy")
            yield Replicas([streaming, mortal], envoy)


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


def test_clients_get_http_2_over_tls(replicas: Replicas) -> None:
    address = replicas.envoy.address("clients_tls")
    command = ["curl", "--silent", "--insecure", "--http2", f"https://{address}/v1/models"]
    command += ["--write-out", "\n%{http_version}"]
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


def test_metrics_are_not_for_clients(replicas: Replicas) -> None:
    for target in ("/metrics", "/metrics/", "/metrics?x", "//metrics", "/%6detrics", "/a/../metrics", "/metrics%2f"):
        # httpx would resolve the dots.
        with closing(HTTPConnection(replicas.envoy.address("clients"))) as connection:
            connection.request("GET", target)
            assert connection.getresponse().status == 404, target


def test_no_request_fails_after_a_tritons_death(replicas: Replicas) -> None:
    """The last test: nothing starts it again."""
    os.kill(replicas.tritons[1].pid, signal.SIGKILL)
    assert [_complete(replicas.url, str(number)).status_code for number in range(20)] == [200] * 20
