"""The health check: a model whose process died doesn't count as healthy, and the reason is one line."""

from __future__ import annotations

import pytest
from compose.conftest import NewProject
from triton_llama import LlamaClient, ServerError

HEALTH_CHECK = ("python3", "-I", "/srv/triton-llama/bin/healthcheck.py", "--timeout", "20")
KILL_THE_MODEL = """
for process in /proc/[0-9]*; do
  case $(cat $process/comm) in triton_python_b*) kill -9 ${process#/proc/} ;; esac
done
"""


def test_a_dead_model_process_is_unhealthy_and_the_reason_is_one_line(new_project: NewProject) -> None:
    with new_project({}) as project:
        project.up()
        assert project.inside(*HEALTH_CHECK).stdout.startswith("healthy: one token in ")
        project.inside("sh", "-c", KILL_THE_MODEL)
        with LlamaClient(project.address(8000)) as client, pytest.raises(ServerError):
            client.generate("The list class in Python", max_tokens=1)
        refused = project.inside(*HEALTH_CHECK, check=False)
        assert refused.returncode == 1
        assert refused.stdout.startswith("unhealthy: HTTP ")
        assert len(refused.stdout.splitlines()) == 1
