"""A container whose model is dead ends, and Docker restarts it."""

from __future__ import annotations

import time

import pytest
from compose.conftest import NewProject
from triton_llama import LlamaClient, LlamaConnectionError

TIMEOUT_S = 240.0
KILL_THE_MODEL = """
for process in /proc/[0-9]*; do
  case $(cat $process/comm) in triton_python_b*) kill -9 ${process#/proc/} ;; esac
done
"""


def test_a_container_whose_model_was_killed_is_restarted_and_healthy_again(new_project: NewProject) -> None:
    with new_project({"TRITON_MODEL_CONFIG": "streaming"}) as project:
        project.up()
        with LlamaClient(project.address(8000), timeout=120) as client:
            pieces = client.stream("The list class in Python", max_tokens=500, min_tokens=500)
            next(pieces)
            project.inside("sh", "-c", KILL_THE_MODEL)
            with pytest.raises(LlamaConnectionError):
                list(pieces)
        deadline = time.monotonic() + TIMEOUT_S
        while project.inspect(".RestartCount") != 1 or project.inspect(".State.Health.Status") != "healthy":
            assert time.monotonic() < deadline, project.compose("logs", "--no-color", "--tail", "50").stdout
            time.sleep(0.5)
        log = project.compose("logs", "--no-color").stdout.splitlines()
        (last,) = [line for line in log if "triton_supervisor: " in line]
        assert last.endswith(" is gone: it crashed, or was killed; the server ends with code 70")
        # The published port may have changed.
        with LlamaClient(project.address(8000)) as client, client.stream("def", max_tokens=1) as pieces:
            assert sum(piece.num_output_tokens for piece in pieces) == 1
