"""The supervisor above a stand-in for tritonserver that dies: when it starts it again, how often, with which lines."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest
from programs.supervisor.supervisors import Supervisor, alive, free_port, supervisor, until
from triton_supervisor.restarts import START_CRASHES, Restarts
from triton_supervisor.shared_memory import SHARED_MEMORY

LONG_PAUSES = {"restarts._FIRST_PAUSE_S": 3600, "restarts._LONGEST_PAUSE_S": 3600}
SHORT_STARTS = {"start_watch._LEAST_S": 0.5, "start_watch._SLOWER": 0}
# Only the first start succeeds.
NO_PROCESS_LEFT = """
import sys
from triton_supervisor import cli
start, starts = cli.start_server, []
def start_server(*arguments):
    starts.append(arguments)
    if len(starts) > 1:
        raise BlockingIOError(11, "no process left")
    return start(*arguments)
cli.start_server = start_server
sys.exit(cli.main(sys.argv[1:]))
"""
SEGFAULT = "tritonserver died of SIGSEGV"
ROUTE = " (the last request's route is unknown: tritonserver logs it with --log-verbose=1 only)"
AT_ONCE = "tritonserver is started again at once"


def _serves_again(one: Supervisor, before: dict[str, str]) -> None:
    """Wait until it serves, later than in this condition."""

    def serves() -> bool:
        assert one.process.poll() is None, one.process.communicate()
        return one.condition()["state"] == "serving" and one.condition()["since"] != before["since"]

    until(serves)


def _die(one: Supervisor, number: signal.Signals = signal.SIGSEGV) -> dict[str, str]:
    """Kill its tritonserver; return the condition before."""
    one.wait_for("serving")
    before = one.condition()
    os.kill(one.tritonserver(), number)
    return before


def test_the_first_restart_follows_at_once_and_the_pauses_double_up_to_a_bound() -> None:
    now = 1000.0
    restarts = Restarts(8, 10, lambda: now)
    given = [restarts.after_death() for _ in range(9)]
    assert [restart and restart.pause for restart in given] == [0, 1, 2, 4, 8, 16, 30, 30, None]
    assert [str(restart) for restart in given[:2]] == ["1 of 8", "2 of 8"]
    assert restarts.total == 8
    # After ten minutes they count no more.
    now += 600
    assert str(restarts.after_death()) == "1 of 8"
    assert restarts.total == 9


def test_a_tritonserver_that_dies_is_started_again_with_nothing_left_of_the_old_one(tmp_path: Path) -> None:
    starts, port = tmp_path / "starts", free_port()
    with supervisor(tmp_path, FAKE_STARTS=starts, TRITON_RESTARTS="1", TRITON_READY_PORT=str(port)) as one:
        one.wait_for("serving")
        (model,) = one.models()
        left = SHARED_MEMORY / f"test-supervisor-{one.process.pid}-of_the_dead"
        left.touch()
        _serves_again(one, _die(one))
        assert not alive(model)
        assert not left.exists()
        assert len(one.models()) == 1
        assert httpx.get(f"http://127.0.0.1:{port}/").status_code == 200
        one.send(signal.SIGTERM)
        assert one.ends() == (0, [f"{SEGFAULT}{ROUTE}; {AT_ONCE} (1 of 1)"])
    assert starts.read_text().split() == ["0", "1"], "the model reads the number of restarts"


def test_a_dead_model_is_started_again_and_beyond_the_bound_the_end_has_the_last_code_and_reason(
    tmp_path: Path,
) -> None:
    with supervisor(tmp_path, TRITON_RESTARTS="1", TRITON_RESTART_MINUTES="7") as one:
        one.wait_for("serving")
        before, server, (model,) = one.condition(), one.tritonserver(), one.models()
        os.kill(model, signal.SIGKILL)
        _serves_again(one, before)
        assert not alive(server)
        _die(one)
        code, lines = one.ends()
        assert (code, lines) == (
            139,
            [
                f"the model process {model} is gone: it crashed, or was killed; {AT_ONCE} (1 of 1)",
                f"{SEGFAULT}, and tritonserver has been started again 1 time within 7 minutes; "
                "the server ends with code 139",
            ],
        )
        assert (one.condition()["state"], one.condition()["reason"]) == ("failed", SEGFAULT)


def test_during_a_pause_it_is_not_ready_and_sigterm_ends_it_with_code_0(tmp_path: Path) -> None:
    port = free_port()
    with supervisor(tmp_path, LONG_PAUSES, TRITON_RESTARTS="3", TRITON_READY_PORT=str(port)) as one:
        _serves_again(one, _die(one))
        _die(one, signal.SIGABRT)
        one.wait_for("starting")
        reason = "tritonserver died of SIGABRT; started again in 3600 s (2 of 3)"
        assert one.condition()["reason"] == reason
        answer = httpx.get(f"http://127.0.0.1:{port}/")
        assert (answer.status_code, answer.text) == (503, f"{reason}\n")
        one.send(signal.SIGTERM)
        code, lines = one.ends()
        assert (code, len(lines)) == (0, 2)


def test_sigterm_while_it_is_started_again_ends_it_with_code_0(tmp_path: Path) -> None:
    """The second start loads for ever."""
    loads = tmp_path / "loads"
    with supervisor(tmp_path, TRITON_RESTARTS="1", FAKE_LOADS=loads) as one:
        one.wait_for("serving")
        loads.touch()
        server = one.tritonserver()
        _die(one)
        until(lambda: one.condition()["reason"] == f"{SEGFAULT}; started again (1 of 1)")
        assert one.condition()["state"] == "starting"
        assert one.tritonserver() != server
        one.send(signal.SIGTERM)
        assert one.ends()[0] == 0


def test_a_start_again_that_hangs_is_killed_and_counts_as_a_death(tmp_path: Path) -> None:
    loads = tmp_path / "loads"
    with supervisor(tmp_path, SHORT_STARTS, TRITON_RESTARTS="1", FAKE_LOADS=loads) as one:
        one.wait_for("serving")
        loads.touch()
        _die(one)
        hung = "tritonserver isn't ready 0 s after its start"
        code, lines = one.ends()
        assert code == 137
        assert lines[1:] == [
            f"{hung}, and tritonserver has been started again 1 time within 10 minutes; the server ends with code 137"
        ]
        assert one.condition()["reason"] == hung


@pytest.mark.parametrize(("crashes", "survives"), [(START_CRASHES, True), (START_CRASHES + 1, False)])
def test_a_crash_before_the_first_readiness_is_tried_again_twice_whatever_the_settings(
    tmp_path: Path, crashes: int, survives: bool
) -> None:
    aborted = "tritonserver died of SIGABRT"
    lines = [f"{aborted}; {AT_ONCE} ({number} of 2)" for number in (1, 2)]
    environment = {"FAKE_CRASHES": str(crashes), "FAKE_STARTS": str(tmp_path / "starts"), "TRITON_RESTARTS": "0"}
    with supervisor(tmp_path, **environment) as one:
        if survives:
            one.wait_for("serving")
            one.send(signal.SIGTERM)
            assert one.ends() == (0, lines)
        else:
            given_up = f"{aborted}, and tritonserver has been started again 2 times; the server ends with code 134"
            assert one.ends() == (134, [*lines, given_up])


def test_a_start_that_ends_with_a_code_of_its_own_is_not_tried_again(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    with supervisor(tmp_path, FAKE_STARTS=starts, FAKE_FAILS="0", TRITON_RESTARTS="5") as one:
        assert one.ends() == (1, [])
        assert one.condition()["reason"] == "tritonserver has ended with code 1"
    assert len(starts.read_text().split()) == 1


def test_a_start_that_fails_after_a_death_is_tried_again_within_the_bound(tmp_path: Path) -> None:
    """What the dead server held, such as a GPU's memory, may be free a moment later."""
    starts = tmp_path / "starts"
    with supervisor(tmp_path, FAKE_STARTS=starts, FAKE_FAILS="1", TRITON_RESTARTS="2") as one:
        _die(one)
        code, lines = one.ends()
        assert code == 1
        assert [line.partition(";")[0] for line in lines[1:]] == [
            "tritonserver has ended with code 1",
            "tritonserver has ended with code 1, and tritonserver has been started again 2 times within 10 minutes",
        ]
    assert starts.read_text().split() == ["0", "1", "2"]


def test_a_tritonserver_that_somebody_else_ends_in_order_is_not_started_again(tmp_path: Path) -> None:
    with supervisor(tmp_path, TRITON_RESTARTS="5") as one:
        _die(one, signal.SIGINT)
        assert one.ends() == (0, ["tritonserver has ended with code 0; the server ends with code 0"])
        assert one.condition()["state"] == "failed"


def test_a_crash_during_the_drain_is_named(tmp_path: Path) -> None:
    busy = tmp_path / "busy"
    busy.touch()
    with supervisor(tmp_path, TRITON_RESTARTS="5", FAKE_BUSY=busy) as one:
        one.wait_for("serving")
        one.send(signal.SIGTERM)
        one.wait_for("draining")
        os.kill(one.tritonserver(), signal.SIGSEGV)
        code, lines = one.ends()
        # Before it another one, if the crash comes within the request to unload.
        assert (code, lines[-1]) == (139, f"{SEGFAULT}; the server ends with code 139")
        assert one.condition()["state"] == "failed"


@pytest.mark.parametrize("state", ["starting", "serving"])
def test_a_tritonserver_that_somebody_else_kills_is_named_with_its_code_and_its_model_is_killed(
    tmp_path: Path, state: str
) -> None:
    loads = tmp_path / "loads"
    if state == "starting":
        loads.touch()
    # A server that has served would be started again.
    with supervisor(tmp_path, FAKE_LOADS=loads, TRITON_RESTARTS="5" if state == "starting" else "0") as one:
        one.wait_for(state)
        models = one.models()
        assert len(models) == (state == "serving")
        os.kill(one.tritonserver(), signal.SIGKILL)
        assert one.ends() == (137, ["tritonserver died of SIGKILL; the server ends with code 137"])
        assert not any(alive(model) for model in models)


def test_a_restart_that_the_kernel_refuses_counts_as_a_death(tmp_path: Path) -> None:
    with supervisor(tmp_path, None, NO_PROCESS_LEFT, TRITON_RESTARTS="2") as one:
        _die(one)
        code, lines = one.ends()
        refused = "tritonserver can't be started: [Errno 11] no process left"
        bound = "tritonserver has been started again 2 times within 10 minutes"
        assert (code, one.condition()["reason"]) == (1, refused)
        assert lines[1:] == [
            f"{refused}; tritonserver is started again in 1 s (2 of 2)",
            f"{refused}, and {bound}; the server ends with code 1",
        ]
