"""The probe's command line: exit codes, one line, what it needs, and that it is the same wherever it is called."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from triton_llama.health import Address
from unit.tritons import DEAD, FakeTriton, fake_triton, refusal

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}

MODULE = (sys.executable, "-W", "error", "-m", "triton_llama.health")
COMMAND = (sys.executable, "-W", "error", "-c", "from triton_llama.cli import main; main()", "health")


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with fake_triton() as one:
        yield one


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The folder that the image has at /srv/triton-llama, what of it matters here."""
    (tmp_path / "bin").mkdir()
    shutil.copy(ROOT / "deploy" / "docker" / "health.py", tmp_path / "bin" / "health")
    (tmp_path / "python").symlink_to(ROOT / "client")
    return tmp_path


def _run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env={**SETTINGS, **environment}, capture_output=True, encoding="utf-8", timeout=60, check=False
    )


def _assert_says(result: subprocess.CompletedProcess[str], code: int, beginning: str) -> None:
    assert (result.returncode, result.stderr) == (code, "")
    assert result.stdout.startswith(beginning)
    assert len(result.stdout.splitlines()) == 1


def test_yes_and_no_are_more_than_a_line_or_have_another_exit_code(triton: FakeTriton) -> None:
    """The metrics are found beside the endpoint: with them nobody is asked for a token."""
    triton.step()
    for flags, word in (((), "healthy"), (("--live",), "alive"), (("--ready",), "ready")):
        _assert_says(_run(*MODULE, "--url", str(triton.endpoint), *flags), 0, f"{word}: a step ")
    assert triton.asked == []
    triton.step(ago=95)
    triton.generate = lambda _: refusal(*DEAD)
    for flags, word in (((), "unhealthy"), (("--live",), "not alive"), (("--ready",), "not ready")):
        _assert_says(_run(*MODULE, "--url", str(triton.endpoint), *flags), 1, f"{word}: HTTP 400: ")


def test_a_strangers_metrics_can_not_be_left_out(triton: FakeTriton) -> None:
    triton.step()
    _assert_says(_run(*MODULE, "--url", str(triton.endpoint), "--no-metrics"), 0, "healthy: one token ")
    triton.generate = lambda _: refusal(*DEAD)
    _assert_says(_run(*MODULE, "--url", str(triton.endpoint), "--no-metrics"), 1, "unhealthy: HTTP 400: ")


def test_triton_llama_health_is_another_program(triton: FakeTriton) -> None:
    """Options, exit codes, complaints and help come through click unharmed."""
    elsewhere = ("--url", str(triton.endpoint), f"--metrics-url={triton.metrics}")
    triton.step(ago=95)
    _assert_says(_run(*COMMAND, *elsewhere, "--step-age", "1000", "--ready"), 0, "ready: a step ")
    triton.generate = lambda _: refusal(*DEAD)
    _assert_says(_run(*COMMAND, *elsewhere), 1, "unhealthy: HTTP 400: ")
    wrong = _run(*COMMAND, "--live", "--ready")
    assert (wrong.returncode, wrong.stdout, len(wrong.stderr.splitlines())) == (2, "", 1)
    assert wrong.stderr.startswith("triton-llama health: error: ")
    assert "--step-age SECONDS" in _run(*COMMAND, "-h").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--url", "https://llama"), "--url: 'https://llama' is no address; it must be HOST:PORT"),
        (("--url", "llama:0"), "--url: 'llama:0' has the port 0; it must be from 1 to 65535"),
        (("--metrics-url", "a b"), "--metrics-url: 'a b' is no address"),
        (("--timeout", "0"), "--timeout: '0' is no number of seconds above 0"),
        (("--step-age", "inf"), "--step-age: 'inf' is no number of seconds above 0"),
        (("--live", "--ready"), "--ready: not allowed with argument --live"),
        (("--metrics-url=a", "--no-metrics"), "--no-metrics: not allowed with argument --metrics-url"),
        (("--liv",), "unrecognized arguments: --liv"),
        (("llama:8000",), "unrecognized arguments: llama:8000"),
    ],
)
def test_wrong_use_is_asked_of_a_server_or_more_than_a_line(arguments: tuple[str, ...], message: str) -> None:
    result = _run(*MODULE, *arguments)
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert message in result.stderr


def test_the_environment_is_not_asked_or_beats_the_command_line(triton: FakeTriton, tmp_path: Path) -> None:
    triton.step()
    state_file = tmp_path / "state.json"
    state_file.write_text('{"state": "failed", "reason": "no GPU", "since": 1}')
    result = _run(*MODULE, TRITON_LLAMA_URL=str(triton.endpoint), TRITON_STATE_FILE=str(state_file))
    assert result.returncode == 1
    assert "no GPU" in result.stdout
    assert _run(*MODULE, TRITON_LLAMA_URL=str(triton.endpoint), TRITON_STATE_FILE="").returncode == 0
    elsewhere = ("--url", str(triton.endpoint), "--state-file", str(tmp_path / "none"))
    assert _run(*MODULE, *elsewhere, TRITON_LLAMA_URL="grpc://x", TRITON_STATE_FILE=str(state_file)).returncode == 0


def test_the_images_probe_needs_what_the_image_has_not_or_another_folder(triton: FakeTriton, image: Path) -> None:
    triton.step()
    probe = image / "bin" / "health"
    assert os.access(probe, os.X_OK)
    first_line = probe.read_text().splitlines()[0]
    assert first_line == "#!/usr/bin/env -S python3 -I -S"
    result = _run(sys.executable, "-I", "-S", "-W", "error", str(probe), "--url", str(triton.endpoint))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("healthy: a step ")


def test_the_probe_imports_more_than_the_standard_library() -> None:
    """Or the client library, which orchestrators would load every few seconds."""
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'client')!r}); import triton_llama.health.command; "
        "print(*{name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)); "
        "print(*[name for name in sys.modules if name.startswith('triton_llama.')])"
    )
    outside, inside = _run(sys.executable, "-I", "-S", "-c", program).stdout.splitlines()
    assert set(outside.split()) <= {"triton_llama", "__main__"}
    assert all(name.startswith("triton_llama.health") for name in inside.split())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("llama", Address("llama", 8000)),
        ("llama:9000", Address("llama", 9000)),
        ("http://llama:9000/", Address("llama", 9000)),
        ("127.0.0.1:80", Address("127.0.0.1", 80)),
        ("[::1]:80", Address("::1", 80)),
        ("[::1]", Address("::1", 8000)),
    ],
)
def test_an_address_is_taken_apart_at_another_place(text: str, expected: Address) -> None:
    assert Address.parse(text, 8000) == expected
    assert Address.parse(str(expected), 1) == expected


@pytest.mark.parametrize("text", ["", ":80", "http://", "a:b", "a:99999", "::1", "a/b:80", "grpc://a", "a:1:2", "a:-1"])
def test_what_is_no_address_is_taken_for_one(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        Address.parse(text, 8000)


def test_the_metrics_are_elsewhere_by_default() -> None:
    assert Address("a", 8000).metrics == Address("a", 8002)
