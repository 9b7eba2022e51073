"""What tritonserver is started with so that it is locked down: the key, the bound of a body, the size of stacks."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from triton_supervisor.body_limit import MOST_BYTES, NoHelpError, body_limit_arguments
from triton_supervisor.restricted import OPEN, RESTRICTED, new_key, restricted_arguments
from triton_supervisor.stack_limit import STACK_BYTES

SUPERVISOR = Path(__file__).resolve().parents[2] / "deploy" / "supervisor"
KEY = "k3y-" * 8

# Every category of Triton's restricted features, 2.51 and the newest alike (src/restricted_features.h).
CATEGORIES = {
    *("health", "metadata", "inference", "shared-memory", "model-config"),
    *("model-repository", "statistics", "trace", "logging"),
}


def _tritonserver(folder: Path, script: str) -> str:
    """Put a program there that says what a tritonserver might."""
    program = folder / "tritonserver"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


def test_a_category_is_neither_open_nor_closed() -> None:
    assert set(RESTRICTED) | set(OPEN) == CATEGORIES
    assert not set(RESTRICTED) & set(OPEN)


def test_the_options_have_another_form_than_tritonserver_reads() -> None:
    assert restricted_arguments(KEY) == (
        f"--http-restricted-api=model-repository,shared-memory,trace,logging:triton-llama-key={KEY}",
        f"--grpc-restricted-protocol=model-repository,shared-memory,trace,logging:triton-llama-key={KEY}",
    )


def test_two_starts_have_the_same_key() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    for key in keys:
        restricted_arguments(key)


@pytest.mark.parametrize("key", ["", "short", "a" * 31, "a" * 40 + ":", "a" * 40 + "\n", "a" * 40 + "ä"])
def test_a_key_that_is_guessed_or_taken_apart_is_used_or_shown(key: str) -> None:
    with pytest.raises(ValueError, match=rf"^the key has {len(key)} characters; it must be at least 32 of ") as refused:
        restricted_arguments(key)
    assert not key or key not in str(refused.value)


def test_a_body_is_bounded_where_tritonserver_can_not(tmp_path: Path) -> None:
    old = _tritonserver(tmp_path, 'echo "Usage: tritonserver [options]\n  --model-repository <string>" >&2; exit 1')
    assert body_limit_arguments([old], {}) == ()


def test_a_body_is_not_bounded_where_tritonserver_can(tmp_path: Path) -> None:
    new = _tritonserver(tmp_path, 'echo "  --model-repository <string>"; echo "  --http-max-input-size <integer>"')
    assert body_limit_arguments([new], {}) == (f"--http-max-input-size={MOST_BYTES}",)
    # As an interpreter's argument, and asked in the environment that the server is to have.
    asked = _tritonserver(tmp_path, 'echo "--model-repository $1 $BOUND"')
    assert body_limit_arguments(["/bin/sh", asked], {"BOUND": "--http-max-input-size"}) != ()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo oops; exit 3", "--help ended with code 3 and said oops"),
        ("exit 0", "--help ended with code 0 and said nothing"),
    ],
)
def test_a_tritonserver_that_says_nothing_is_taken_for_an_old_one(tmp_path: Path, script: str, said: str) -> None:
    with pytest.raises(NoHelpError, match=f"{said}$"):
        body_limit_arguments([_tritonserver(tmp_path, script)], {})


def test_a_tritonserver_that_is_not_there_ends_in_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(NoHelpError, match=r"tritonserver --help: .*No such file"):
        body_limit_arguments([str(tmp_path / "tritonserver")], {})


@pytest.mark.parametrize("soft", [2**20, STACK_BYTES * 2, None])
def test_a_server_s_threads_get_other_stacks_than_meant(soft: int | None) -> None:
    """soft: the limit before; None is whatever the hard one is, which is mostly no limit at all."""
    program = (
        "import resource, subprocess, sys\n"
        "from triton_supervisor.stack_limit import set_stack_limit\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_STACK)\n"
        f"resource.setrlimit(resource.RLIMIT_STACK, ({soft} or hard, hard))\n"
        "print(set_stack_limit(), flush=True)\n"
        "subprocess.run(['/bin/sh', '-c', 'ulimit -s'], check=True)\n"
    )
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if soft is not None and hard not in (resource.RLIM_INFINITY,) and hard < soft:
        pytest.skip(f"this machine allows stacks of at most {hard} bytes")
    told, inherited = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(SUPERVISOR)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.split()
    expected = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    assert int(told) == expected
    assert int(inherited) == expected // 1024
