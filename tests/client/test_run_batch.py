"""`triton-llama run-batch` against the endpoint, and against servers that are busy, lost or refuse the key."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from client.batch_files import BODIES, line, read, write
from client.peers import HOST, receive_request, server
from frontend.endpoints import Endpoint, endpoint
from frontend.fake_triton import FakeTriton
from frontend.fake_triton_grpc import fake_triton
from triton_llama.cli import main

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeTriton, Endpoint]]:
    with fake_triton() as triton, endpoint(triton.port) as at:
        yield triton, at


@pytest.fixture
def triton(served: tuple[FakeTriton, Endpoint]) -> FakeTriton:
    served[0].requests.clear()
    return served[0]


@pytest.fixture
def run(served: tuple[FakeTriton, Endpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command in an empty folder, with IN.jsonl and OUT.jsonl unless other files are named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def run(*options: str, files: tuple[str, ...] = ("IN.jsonl", "OUT.jsonl"), url: str = served[1].base_url) -> Result:
        return CliRunner().invoke(main, ["run-batch", *files, "--url", url, *options])

    return run


def test_each_line_is_answered_in_openais_form(triton: FakeTriton, run: Run) -> None:
    write(*(line(url, url) for url in BODIES))
    result = run()
    assert (result.exit_code, result.stderr) == (0, "")
    assert "4 of 4 lines are answered in OUT.jsonl, 13 tokens" in result.stdout
    objects = ("chat.completion", "text_completion", "response", "list")
    for url, name in zip(BODIES, objects, strict=True):
        answer = read()[url]
        assert (answer["error"], answer["response"]["status_code"], answer["response"]["body"]["object"]) == (
            None,
            200,
            name,
        )
        assert answer["id"].startswith("batch_req_")
        assert answer["response"]["request_id"]
    assert read("OUT.errors.jsonl") == {}


def test_a_line_has_the_lowest_priority_unless_it_has_its_own(triton: FakeTriton, run: Run) -> None:
    write(line("a"), line("b", priority=3))
    run("--concurrency", "1")
    assert [request.value("priority") for request in triton.requests] == [2**31 - 1, 3]


def test_seed_gives_each_line_one_that_stays_in_another_run(triton: FakeTriton, run: Run) -> None:
    write(line("a"), line("b"), line("c", seed=5))
    run("--concurrency", "1", "--seed", "1")
    write(line("b"), path="IN2.jsonl")
    run("--seed", "1", files=("IN2.jsonl", "OUT2.jsonl"))
    a, b, c, again = (request.value("seed") for request in triton.requests)
    assert c == 5
    assert b == again != a


def test_a_refused_line_is_in_the_errors_and_the_others_are_answered(run: Run) -> None:
    """The command line has vLLM's options."""
    write(line("a", temperature=9), line("b", model="x"))
    result = run("-i", "IN.jsonl", "-o", "OUT.jsonl", "--model", "pydoc-llama", files=())
    assert (result.exit_code, [*read()]) == (5, ["b"])
    assert "1 lines are without an answer, see OUT.errors.jsonl" in result.stderr
    assert "temperature is 9" in json.dumps(read("OUT.errors.jsonl")["a"])


@pytest.mark.parametrize(
    ("malformed", "message"),
    [
        ("{", "IN.jsonl:2 is not JSON"),
        ("[]", "IN.jsonl:2: the line is []; it must be an object"),
        (line(""), "custom_id is ''; it must be text, not empty"),
        (line("a"), "custom_id is 'a'; it must be unique"),
        (line() | {"custom_id": "b", "method": "GET"}, "method is 'GET'; it must be POST"),
        (line() | {"custom_id": "b", "url": "/v1/score"}, "url is '/v1/score'; it must be one of /v1/chat/comp"),
        (line("b", stream=True), "body.stream is True; it must be false"),
        ("x" * (2**24 + 1), "IN.jsonl:2 is longer than 16777216 bytes"),
    ],
)
def test_a_malformed_line_is_refused_before_any_is_sent(
    triton: FakeTriton, run: Run, malformed: object, message: str
) -> None:
    write(line("a"), malformed)
    result = run()
    assert (result.exit_code, triton.requests) == (2, [])
    assert message in result.stderr
    assert not Path("OUT.jsonl").exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("IN.jsonl",), "the files are 1; they must be two"),
        (("none", "OUT.jsonl"), "none is not a file"),
        (("IN.jsonl", "IN.jsonl"), "must be three files"),
        (("IN.jsonl", "none/OUT.jsonl"), "No such file or directory: 'none/OUT.jsonl'"),
        (("IN.jsonl", "old.jsonl"), "old.jsonl exists; --resume continues it"),
    ],
)
def test_wrong_files_are_refused(run: Run, files: tuple[str, ...], message: str) -> None:
    write(line())
    write(path="old.jsonl")
    result = run(files=files)
    assert result.exit_code == 2
    assert message in result.stderr


def test_resume_sends_what_is_missing_or_cut_off(triton: FakeTriton, run: Run) -> None:
    write(line("a"), line("b", temperature=9))
    run()
    done = Path("OUT.jsonl").read_text()
    Path("OUT.jsonl").write_text(done + done[:40])
    write(line("a"), line("b", temperature=9), line("c"))
    triton.requests.clear()
    assert run("--resume").exit_code == 5
    assert len(triton.requests) == 1
    assert Path("OUT.jsonl").read_text().startswith(done)
    assert read().keys() == {"a", "c"}
    assert read("OUT.errors.jsonl").keys() == {"b"}


def test_resume_begins_a_line_after_another_programs_unended_one(run: Run) -> None:
    write(line("a"), line("b"))
    write(json.dumps({"custom_id": "a"}), path="OUT.jsonl")
    assert run("--resume").exit_code == 0
    assert [*read()] == ["a", "b"]


def test_resume_refuses_the_file_of_another_batch_and_leaves_it(run: Run) -> None:
    write(line("a"))
    write({"custom_id": "other"}, path="OUT.jsonl")
    result = run("--resume")
    assert (result.exit_code, [*read()]) == (2, ["other"])
    assert "OUT.jsonl:1: custom_id is 'other'; no line of the batch has it" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_with_one_line_on_how_to_continue(
    triton: FakeTriton, run: Run, served: tuple[FakeTriton, Endpoint], number: signal.Signals
) -> None:
    write(line("a"))
    triton.hold_after = 1
    command = [sys.executable, "-c", "from triton_llama.cli import main; main()", "run-batch", "IN.jsonl", "OUT.jsonl"]
    try:
        with subprocess.Popen([*command, "--url", served[1].base_url], stderr=subprocess.PIPE, text=True) as process:
            triton.wait_for(lambda fake: bool(fake.requests))
            result = run("--resume")
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
    finally:
        triton.hold_after = None
    assert (process.returncode, len(errors.splitlines())) == (1, 1)
    assert errors.startswith("Error: stopped, with 0 of 1 lines")
    assert (result.exit_code, "another run-batch writes OUT.jsonl" in result.stderr) == (2, True)
    assert run("--resume").exit_code == 0


def _response(status: str, body: str = "{}", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{headers}\r\n{body}".encode()


@pytest.fixture
def failing(run: Run) -> Run:
    """Run a batch of one line against a server that gives these answers, one a connection, the last one for ever."""

    def failing(*answers: bytes, options: tuple[str, ...] = ()) -> Result:
        left = list(answers)

        def behave(connection: socket.socket) -> None:
            receive_request(connection)
            connection.sendall(left.pop(0) if len(left) > 1 else left[0])
            connection.shutdown(socket.SHUT_RDWR)

        write(line())
        with server(behave) as port:
            return run(*options, url=f"{HOST}:{port}")

    return failing


@pytest.mark.parametrize("failure", [b"", _response("429 Too Many Requests", headers="Retry-After: 1\r\n")])
def test_a_lost_connection_and_a_busy_server_are_retried(failing: Run, failure: bytes) -> None:
    assert failing(failure, _response("200 OK", '{"a": 1}')).exit_code == 0
    assert read()["a"]["response"]["body"] == {"a": 1}


def test_a_line_without_an_answer_in_time_is_an_error(failing: Run) -> None:
    assert failing(_response("503 Service Unavailable", "full"), options=("--timeout", "2")).exit_code == 5
    assert read("OUT.errors.jsonl")["a"]["error"] == {
        "code": "batch_expired",
        "message": "no answer within 2 s: 503 full",
    }


def test_a_wrong_key_ends_the_command_and_no_line_is_an_error(failing: Run) -> None:
    result = failing(_response("401 Unauthorized", "key"), options=("--api-key", "x"))
    assert result.exit_code == 8
    assert "answers 401 key" in result.stderr
    assert read("OUT.errors.jsonl") == {}


def test_a_url_without_a_scheme_has_the_endpoints_port(failing: Run) -> None:
    failing(b"", options=("--url", "127.0.0.9", "--timeout", "2"))
    assert "127.0.0.9:9000" in read("OUT.errors.jsonl")["a"]["error"]["message"]


@pytest.mark.long
def test_an_endpoint_that_never_responds_ends_the_command(failing: Run) -> None:
    result = failing(b"")
    assert result.exit_code == 3
    assert "has not responded; --url names the endpoint" in result.stderr
    assert read("OUT.errors.jsonl") == {}
