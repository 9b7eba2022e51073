"""A tritonserver that dies under the launcher is started again on its ports, with the ready file away meanwhile.

The bounds and pauses of restarts are the supervisor's, and tested with its fake.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from launcher.launching import Launch, Launcher, generate, supervisor_lines
from programs.supervisor.supervisors import until
from server.servers import HTTP
from triton_supervisor.process import model_processes


def _facts_of_another(launcher: Launcher, pid: str) -> dict[str, str]:
    """Return the ready file's content once it names another tritonserver."""

    def named() -> str:
        try:
            return str(json.loads(launcher.ready_file.read_text())["pid"])
        except FileNotFoundError:
            return pid

    until(lambda: named() != str(pid) or launcher.process.poll() is not None)
    return launcher.facts()


def test_a_server_that_dies_is_started_again_on_its_ports(launch: Launch) -> None:
    launcher = launch()
    first = launcher.facts()
    os.kill(int(first["pid"]), signal.SIGSEGV)
    second = _facts_of_another(launcher, first["pid"])
    assert second | {"pid": ""} == first | {"pid": ""}
    assert generate(second["http"], "again") == "again"
    assert "nv_inference_count" in HTTP.get(f"http://{second['metrics']}/metrics").text
    launcher.process.send_signal(signal.SIGTERM)
    code, _, errors = launcher.ends()
    assert code == 0
    assert supervisor_lines(errors) == ["tritonserver died of SIGSEGV; tritonserver is started again at once (1 of 5)"]


def test_a_signal_ends_a_server_that_is_being_started_again(launch: Launch, tmp_path: Path) -> None:
    loads = tmp_path / "loads"
    loads.touch()
    launcher = launch(LOAD_WHEN=str(loads))
    facts = launcher.facts()
    loads.unlink()
    (model,) = model_processes(int(facts["pid"]))
    os.kill(model.pid, signal.SIGKILL)
    until(lambda: not launcher.ready_file.exists())
    launcher.process.send_signal(signal.SIGTERM)
    code, _, errors = launcher.ends()
    assert code == 0
    line = f"the model process {model.pid} is gone: it crashed, or was killed; tritonserver is started again at once"
    assert supervisor_lines(errors) == [f"{line} (1 of 5)"]
