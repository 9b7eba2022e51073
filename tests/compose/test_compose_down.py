"""`docker compose stop` and `down` answer every accepted request first, whether it is running or queued."""

from __future__ import annotations

import http.client
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from compose.conftest import NewProject
from compose.project import GRPC, HTTP, METRICS, STOP_S
from server.servers import until
from triton_llama import Completion, LlamaClient
from triton_llama.endpoint import Protocol

ACCEPTED: list[tuple[int, Protocol]] = [(HTTP, "http"), (GRPC, "grpc"), (HTTP, "http"), (GRPC, "grpc")]
TOKENS = 400
"""Long enough that the first request still runs when the last one arrives, on a busy machine too."""
PENDING = re.compile(r'^nv_inference_pending_request_count\{model="llama".*\} (\d+)', re.MULTILINE)


def generate(address: str, protocol: Protocol) -> Completion:
    with LlamaClient(address, protocol, timeout=180) as client:
        return client.generate("The list class in Python", max_tokens=TOKENS, min_tokens=TOKENS)


def queued(metrics: str) -> int:
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=10) as response:
        return int(PENDING.findall(response.read().decode())[0])


def test_stop_answers_every_accepted_request_and_down_leaves_no_container(new_project: NewProject) -> None:
    # One request at a time: the others wait in Triton's queue, whose metric shows that they have arrived.
    with (
        new_project({"TRITON_MODEL_CONFIG": "naive_fp16"}) as project,
        ThreadPoolExecutor(len(ACCEPTED)) as pool,
    ):
        project.up()
        host, _, port = project.address(HTTP).partition(":")
        # Once: asking Docker for an address takes longer than a request waits.
        addresses = [(project.address(port), protocol) for port, protocol in ACCEPTED]
        metrics = project.address(METRICS)
        with closing(http.client.HTTPConnection(host, int(port), timeout=10)) as idle:
            idle.request("GET", "/v2/health/live")
            idle.getresponse().read()
            responses = [pool.submit(generate, *address) for address in addresses]
            waiting = len(ACCEPTED) - 1
            until(lambda: queued(metrics) >= waiting, lambda: f"{waiting} requests are queued: {queued(metrics)}")
            assert not any(response.done() for response in responses)
            project.compose("stop", timeout=STOP_S)
            completions = [response.result(timeout=5) for response in responses]
        assert [completion.num_output_tokens for completion in completions] == [TOKENS] * len(ACCEPTED)
        # 137 would mean that Docker had to kill the container.
        assert project.inspect(".State.ExitCode") == 0
        project.compose("down", timeout=STOP_S)
        assert project.containers() == []
