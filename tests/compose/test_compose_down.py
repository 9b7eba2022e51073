"""`docker compose stop` and `down`: what was accepted is answered first, whether it is being generated or queued."""

from __future__ import annotations

import http.client
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from compose.conftest import NewProject
from compose.project import STOP_S, ComposeProject
from triton_llama import Completion, LlamaClient
from triton_llama.endpoint import Protocol

HTTP, GRPC, METRICS = 8000, 8001, 8002
ACCEPTED: list[tuple[int, Protocol]] = [(HTTP, "http"), (GRPC, "grpc"), (HTTP, "http"), (GRPC, "grpc")]
TOKENS = 400
"""Long enough that the first one still runs when the last one has come, on a machine that is busy otherwise, too."""
PENDING = re.compile(r'^nv_inference_pending_request_count\{model="llama".*\} (\d+)', re.MULTILINE)


def ask(address: str, protocol: Protocol) -> Completion:
    with LlamaClient(address, protocol, timeout=180) as client:
        return client.generate("The list class in Python", max_tokens=TOKENS, min_tokens=TOKENS)


def wait_until_queued(project: ComposeProject, requests: int) -> None:
    """Wait until so many requests are in Triton's queue, which is how it shows that it has got them all."""
    host, _, port = project.address(METRICS).partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    waiting = 0
    give_up = time.monotonic() + 60
    try:
        while waiting < requests:
            assert time.monotonic() < give_up, f"{waiting} of {requests} requests are queued after 60 s"
            connection.request("GET", "/metrics")
            waiting = int(PENDING.findall(connection.getresponse().read().decode())[0])
    finally:
        connection.close()


def test_down_answers_what_was_accepted_and_leaves_no_container(new_project: NewProject) -> None:
    # One request at a time: the others wait in the queue, where they can be seen.
    with (
        new_project({"TRITON_MODEL_CONFIG": "naive_fp16"}) as project,
        ThreadPoolExecutor(len(ACCEPTED)) as pool,
        ExitStack() as open_connections,
    ):
        project.up()
        host, _, port = project.address(HTTP).partition(":")
        idle = http.client.HTTPConnection(host, int(port), timeout=10)
        open_connections.callback(idle.close)
        idle.request("GET", "/v2/health/live")
        idle.getresponse().read()
        answers = [pool.submit(ask, project.address(port), protocol) for port, protocol in ACCEPTED]
        wait_until_queued(project, len(ACCEPTED) - 1)
        assert not any(answer.done() for answer in answers)
        project.compose("stop", timeout=STOP_S)
        completions = [answer.result(timeout=5) for answer in answers]
        assert [completion.num_output_tokens for completion in completions] == [TOKENS] * len(ACCEPTED)
        # Not 137, which is what a container has that Docker had to kill.
        assert project.inspect(".State.ExitCode") == 0
        project.compose("down", timeout=STOP_S)
        assert project.containers() == []
