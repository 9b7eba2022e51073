"""The launcher with a real tritonserver and a model of a few lines: this is about processes, not about the Llama."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from triton_local.errors import StartFailedError
from triton_local.server import LocalTriton

CONFIG = """
name: "llama"
backend: "python"
max_batch_size: 8
input [ { name: "text_input" data_type: TYPE_STRING dims: [1] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [1] } ]
dynamic_batching { }
"""

MODEL = """
import os
import sys
import time
from pathlib import Path
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        pb_utils.Logger.log_info("model says LLAMA_MODEL is " + os.environ.get("LLAMA_MODEL", "unset"))
        print("model runs in " + sys.prefix, flush=True)
        if "REFUSE" in os.environ:
            raise ValueError("slots is 9000: must be in 1 ... 64")
        while "LOAD_WHEN" in os.environ and not Path(os.environ["LOAD_WHEN"]).exists():
            time.sleep(0.05)

    def execute(self, requests):
        if "TELL_WHEN_RUNNING" in os.environ:
            Path(os.environ["TELL_WHEN_RUNNING"]).touch()
            time.sleep(3)
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("text_output", pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy())]
            )
            for request in requests
        ]

    def finalize(self):
        time.sleep(float(os.environ.get("FINALIZE_S", "0")))
"""

FREE_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
SOON_S = 20.0


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    (root / "llama" / "1").mkdir(parents=True)
    (root / "llama" / "configs").mkdir()
    (root / "llama" / "config.pbtxt").write_text(CONFIG)
    (root / "llama" / "configs" / "small.pbtxt").write_text(CONFIG.replace("max_batch_size: 8", "max_batch_size: 2"))
    (root / "llama" / "1" / "model.py").write_text(MODEL)
    return root


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of the tests' own, so that the first start is a first start."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_LLAMA_CACHE", str(folder))
        yield folder


@dataclass
class Launcher:
    """A launcher in a process of its own; `facts` is what its ready file says."""

    process: subprocess.Popen[str]
    ready_file: Path

    def facts(self) -> dict[str, str]:
        until(lambda: self.ready_file.exists() or self.process.poll() is not None)
        assert self.ready_file.exists(), self.process.communicate()
        facts: dict[str, str] = json.loads(self.ready_file.read_text())
        return facts


Launch = Callable[..., Launcher]


@pytest.fixture
def launch(repository: Path, tmp_path: Path) -> Iterator[Launch]:
    started: list[Launcher] = []

    def launch(*arguments: str, **environment: str) -> Launcher:
        ready_file = tmp_path / "ready.json"
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "triton_local", f"--model-repository={repository}"),
                *(f"--ready-file={ready_file}", *arguments),
            ],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(Launcher(process, ready_file))
        return started[-1]

    yield launch
    for launcher in started:
        launcher.process.kill()
        launcher.process.communicate()


def until(condition: Callable[[], bool], seconds: float = SOON_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it didn't happen"
        time.sleep(0.05)


def get(url: str) -> str:
    with urllib.request.urlopen(f"http://{url}", timeout=10) as response:
        return str(response.read().decode())


def generate(address: str, text: str) -> str:
    body = json.dumps({"text_input": text}).encode()
    request = urllib.request.Request(f"http://{address}/v2/models/llama/generate", body)
    with urllib.request.urlopen(request, timeout=20) as response:
        return str(json.load(response)["text_output"])


def session_of(pid: int) -> set[int]:
    """Every living process of the session that tritonserver `pid` is in: the guard, tritonserver, the stub."""
    session = os.getsid(pid)
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue  # gone meanwhile
        if int(its_session) == session and state != "Z":
            found.add(int(stat.parent.name))
    return found


def loading_tritonserver(launcher: Launcher) -> int:
    """The pid of the tritonserver below `launcher`, once its model is being loaded in the stub."""
    found: list[int] = []

    def stub_runs() -> bool:
        assert launcher.process.poll() is None, launcher.process.communicate()
        for command in Path("/proc").glob("[0-9]*/comm"):
            try:
                # The kernel keeps 15 characters of a name.
                if command.read_text().strip() == "triton_python_b" and guard_of(int(command.parent.name), launcher):
                    found.append(parent_of(int(command.parent.name)))
            except (OSError, IndexError):
                continue  # gone meanwhile
        return bool(found)

    until(stub_runs)
    return found[0]


def guard_of(stub: int, launcher: Launcher) -> bool:
    return parent_of(parent_of(parent_of(stub))) == launcher.process.pid


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def shared_memory_of(pid: int) -> set[Path]:
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line.split()[-1]) for line in maps if "/dev/shm/triton_python_backend_shm_region_" in line}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_sigterm_answers_what_was_accepted_and_leaves_nothing_behind(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    running = tmp_path / "running"
    launcher = launch(
        *(*FREE_PORTS, "--variant=small", "--model=some/checkpoint"),
        TMPDIR=str(tmp_path / "tmp"),
        TELL_WHEN_RUNNING=str(running),
    )
    facts = launcher.facts()
    pid = int(facts["pid"])
    assert facts["variant"] == "small"
    assert json.loads(get(f"{facts['http']}/v2/models/llama/config"))["max_batch_size"] == 2
    assert "nv_inference_count" in get(f"{facts['metrics']}/metrics")
    grpc_host, grpc_port = facts["grpc"].split(":")
    socket.create_connection((grpc_host, int(grpc_port)), timeout=5).close()

    processes, regions = session_of(pid), shared_memory_of(pid)
    assert len(processes) == 3, "guard, tritonserver, stub"
    assert regions
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(generate, facts["http"], "accepted")
        until(running.exists)
        launcher.process.send_signal(signal.SIGTERM)
        assert answer.result() == "accepted"
    output, errors = launcher.process.communicate(timeout=60)

    assert launcher.process.returncode == 0
    for service in ("http", "grpc", "metrics"):
        assert facts[service] in output
    assert "model says LLAMA_MODEL is some/checkpoint" in errors
    assert f"model runs in {sys.prefix}" in errors, "the stub runs in this virtual environment"
    assert not any(alive(process) for process in processes)
    assert not any(region.exists() for region in regions)
    assert not launcher.ready_file.exists()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_killing_the_launcher_ends_tritonserver_and_its_stub(launch: Launch) -> None:
    launcher = launch(*FREE_PORTS)
    pid = int(launcher.facts()["pid"])
    processes, regions = session_of(pid), shared_memory_of(pid)
    assert len(processes) == 3
    launcher.process.kill()
    until(lambda: not any(alive(process) for process in processes))
    assert not any(region.exists() for region in regions)


def test_a_killed_tritonserver_takes_its_stub_along_and_its_code_is_passed_on(launch: Launch) -> None:
    before = set(Path("/tmp").glob("python_env_*"))
    launcher = launch(*FREE_PORTS)
    pid = int(launcher.facts()["pid"])
    processes, regions = session_of(pid), shared_memory_of(pid)
    time.sleep(0.5)
    folders = set(Path("/tmp").glob("python_env_*")) - before
    os.kill(pid, signal.SIGKILL)
    _, errors = launcher.process.communicate(timeout=SOON_S)
    assert launcher.process.returncode == 128 + signal.SIGKILL
    assert "tritonserver has ended with code 137" in errors
    assert not any(alive(process) for process in processes)
    assert not any(region.exists() for region in regions)
    # The backend's folder has no mark of its owner: with another Triton starting beside this test there may be several.
    assert len(folders) != 1 or not any(folder.exists() for folder in folders)


def test_a_second_signal_ends_a_server_that_is_still_waiting_for_a_request(launch: Launch) -> None:
    launcher = launch(*FREE_PORTS)
    facts = launcher.facts()
    processes = session_of(int(facts["pid"]))
    host, port = facts["http"].split(":")
    with socket.create_connection((host, int(port))) as open_connection:  # tritonserver waits 30 s for it
        open_connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: here\r\n\r\n")
        assert b"200" in open_connection.recv(1000)
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.process.stdout is not None
        while "again: at once" not in launcher.process.stdout.readline():
            pass
        launcher.process.send_signal(signal.SIGINT)
        launcher.process.communicate(timeout=SOON_S)
    assert launcher.process.returncode == 128 + signal.SIGKILL
    assert not any(alive(process) for process in processes)


def test_a_signal_while_the_model_loads_ends_the_start(launch: Launch, tmp_path: Path) -> None:
    launcher = launch(*FREE_PORTS, LOAD_WHEN=str(tmp_path / "never"))
    pid = loading_tritonserver(launcher)
    processes, regions = session_of(pid), shared_memory_of(pid)
    launcher.process.send_signal(signal.SIGTERM)
    _, errors = launcher.process.communicate(timeout=SOON_S)
    assert launcher.process.returncode == 128 + signal.SIGTERM
    assert errors.endswith("triton_local: stopped by signal 15 before the server was ready\n")
    assert not any(alive(process) for process in processes)
    assert not any(region.exists() for region in regions)


def test_a_model_that_does_not_get_ready_in_time_is_given_up(launch: Launch, tmp_path: Path) -> None:
    launcher = launch(*FREE_PORTS, "--ready-timeout=2", LOAD_WHEN=str(tmp_path / "never"))
    processes = session_of(loading_tritonserver(launcher))
    _, errors = launcher.process.communicate(timeout=SOON_S)
    assert launcher.process.returncode == 1
    assert "not ready within 2 s" in errors
    assert not any(alive(process) for process in processes)


def test_a_free_port_that_is_taken_while_the_model_loads_is_chosen_again(launch: Launch, tmp_path: Path) -> None:
    launcher = launch(*FREE_PORTS, LOAD_WHEN=str(tmp_path / "go"))
    command = Path(f"/proc/{loading_tritonserver(launcher)}/cmdline").read_text().split("\0")
    chosen = next(int(option.split("=")[1]) for option in command if option.startswith("--metrics-port="))
    with socket.create_server(("127.0.0.1", chosen)):
        (tmp_path / "go").touch()
        facts = launcher.facts()
        assert int(facts["metrics"].split(":")[1]) != chosen
        assert generate(facts["http"], "answered") == "answered"


def test_a_model_that_does_not_end_is_killed_after_the_time_it_was_given(launch: Launch) -> None:
    launcher = launch(*FREE_PORTS, "--", "--exit-timeout-secs=1", FINALIZE_S="600")
    processes = session_of(int(launcher.facts()["pid"]))
    launcher.process.send_signal(signal.SIGTERM)
    launcher.process.communicate(timeout=60)
    assert launcher.process.returncode != 0
    assert not any(alive(process) for process in processes)


def test_a_model_that_refuses_to_load_ends_the_start_with_its_reason_and_not_with_the_log(launch: Launch) -> None:
    launcher = launch(*FREE_PORTS, REFUSE="1")
    output, errors = launcher.process.communicate(timeout=SOON_S)
    assert launcher.process.returncode == 1
    message = errors[errors.index("triton_local: ") :]
    assert "ValueError: slots is 9000: must be in 1 ... 64" in message
    assert len(message.splitlines()) <= 4
    assert "ready" not in output


def test_what_tritonserver_refuses_is_one_line(launch: Launch) -> None:
    launcher = launch(*FREE_PORTS, "--", "--no-such-option")
    _, errors = launcher.process.communicate(timeout=SOON_S)
    assert launcher.process.returncode == 1
    assert "unrecognized option '--no-such-option'" in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variant=huge"], "unknown variant 'huge': known are default, small"),
        (["--model=./nowhere"], "model './nowhere' is neither an existing folder nor a hub id"),
        (["--", "--http-port=1"], "--http-port can't go to tritonserver directly"),
    ],
)
def test_a_refusal_is_one_line_and_starts_nothing(launch: Launch, arguments: list[str], message: str) -> None:
    launcher = launch(*FREE_PORTS, *arguments)
    output, errors = launcher.process.communicate(timeout=SOON_S)
    assert launcher.process.returncode == 2
    assert message in errors
    assert len(errors.splitlines()) == 1
    assert output == ""


def test_a_taken_port_is_told_before_anything_is_started(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launcher = launch("--http-port=0", f"--grpc-port={port}", "--metrics-port=0")
        output, errors = launcher.process.communicate(timeout=SOON_S)
    assert launcher.process.returncode == 2
    assert errors == (
        f"triton_local: port {port} (grpc) on 127.0.0.1 is in use: "
        "choose another with --grpc-port, 0 for any free one\n"
    )
    assert output == ""


def test_a_second_server_beside_the_first_shares_the_runtime_and_takes_its_own_arguments(
    repository: Path, cache: Path, tmp_path: Path
) -> None:
    with LocalTriton(model_repository=repository) as first:
        before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in cache.iterdir()}
        with LocalTriton(
            model_repository=repository,
            model=str(tmp_path),
            environment={"SOMETHING": "else"},
            extra_args=("--id=the-second",),
            log_file=tmp_path / "log.txt",
        ) as second:
            assert before == {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in cache.iterdir()}
            assert len(before) == 1
            ports = {first.http_url, first.grpc_url, first.metrics_url}
            ports |= {second.http_url, second.grpc_url, second.metrics_url}
            assert len(ports) == 6
            assert json.loads(get(f"{second.http_url}/v2"))["name"] == "the-second"
            assert json.loads(get(f"{first.http_url}/v2"))["name"] == "triton"
            assert generate(first.http_url, "über") == "über"
            assert generate(second.http_url, "two") == "two"
        assert f"LLAMA_MODEL is {tmp_path}" in (tmp_path / "log.txt").read_text()
        assert second.log_text() + "\n" == (tmp_path / "log.txt").read_text()
        assert second.exit_code == 0
        assert generate(first.http_url, "still there") == "still there"
    assert first.exit_code == 0


def test_a_failed_start_in_a_program_is_an_error_with_the_reason(repository: Path) -> None:
    server = LocalTriton(model_repository=repository, environment={"REFUSE": "1"})
    with pytest.raises(StartFailedError, match="slots is 9000"):
        server.start()
    assert server.exit_code == 1
