"""The command `triton-llama-openai` and its health probe."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import httpx
import pytest
from frontend.endpoints import HOST, endpoint
from frontend.fake_triton import FakeTriton
from python_process import run_python
from triton_llama_openai import health
from triton_llama_openai.__main__ import main

COMMAND = [sys.executable, "-m", "triton_llama_openai"]
WITHOUT_OTHER_EXTRAS = """
import sys
for package in ("httpx", "httpx_sse", "opentelemetry.sdk", "opentelemetry.exporter"):
    sys.modules[package] = None
import triton_llama_openai.__main__
from triton_llama_openai.app import create_app
from triton_llama_openai.served.models import Models
from triton_llama_openai.settings import Settings
create_app(Settings(), Models.of_settings(Settings()))
"""
BODY = {"model": "pydoc-llama", "prompt": "a", "stream": True}


@contextmanager
def _running(triton: FakeTriton, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield the process and its base URL, as it prints it."""
    command = [*COMMAND, "--port", "0", "--triton", f"{HOST}:{triton.port}", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "listening on http://" in line, process.communicate()[1]
            yield process, line.rpartition(" ")[2].strip()
        finally:
            process.kill()


def test_sigterm_ends_it_with_0_once_accepted_requests_are_answered(triton: FakeTriton) -> None:
    triton.hold_after = 2
    answers: list[str] = []
    with _running(triton, "--request-timeout", "3") as (process, url):
        ask = partial(httpx.post, f"{url}/completions", json=BODY, timeout=30)
        asking = threading.Thread(target=lambda: answers.append(ask().text))
        asking.start()
        triton.wait_for(lambda fake: fake.running == 1)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
        asking.join()
    assert process.returncode == 0, errors
    # The model hangs: its own time ends the request, not the endpoint's end.
    assert '"code":"timeout"' in answers[0]
    assert "Traceback" not in errors


def test_a_sigterm_right_after_it_says_where_it_listens_ends_it_with_0(triton: FakeTriton) -> None:
    # uvicorn handles signals a moment later.
    with _running(triton) as (process, _):
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


def test_the_health_probe_tells_the_model_from_the_process(
    own: FakeTriton, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def probe(*options: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["health", "--port", str(served.port), *options])
        return health.main(), capsys.readouterr().out

    with endpoint(own.port) as served:
        assert probe() == (0, "ready\n")
        own.ready = False
        reason = f'{{"not_ready":{{"pydoc-llama":"the model llama of grpc://{HOST}:{own.port} is not ready"}}}}'
        assert probe() == (1, f"not ready: {reason}\n")
        assert probe("--live") == (0, "alive\n")
    code, reason = probe()
    assert code == 1
    assert reason.startswith("no answer from http://127.0.0.1:")


def test_an_address_that_cannot_be_used_ends_it_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["triton-llama-openai", "--host", "192.0.2.1"])
    assert main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("triton-llama-openai: can't listen on 192.0.2.1:9000: ")


def test_it_needs_the_packages_of_its_extra_alone() -> None:
    """The image has no others."""
    done = run_python(WITHOUT_OTHER_EXTRAS)
    assert done.returncode == 0, done.stderr


def test_without_its_packages_it_names_the_extra_in_one_line() -> None:
    done = run_python("import sys; sys.modules['fastapi'] = None; import triton_llama_openai.__main__")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert done.stderr.endswith("fastapi is missing; install it with pip install 'triton-llama[openai]'\n")
