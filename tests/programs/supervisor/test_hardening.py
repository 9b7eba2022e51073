"""tritonserver's hardening: restricted APIs, the body limit, thread stacks."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from triton_supervisor.hardening import (
    BODY_BYTES,
    OPEN,
    RESTRICTED,
    STACK_BYTES,
    body_limit_arguments,
    new_key,
    restricted_arguments,
)

KEY = "k3y-" * 8

# Every category of Triton's restricted features, 2.51 and the newest alike (src/restricted_features.h).
CATEGORIES = [
    *("health", "metadata", "inference", "shared-memory", "model-config"),
    *("model-repository", "statistics", "trace", "logging"),
]


def _limit(folder: Path, script: str, **environment: str) -> tuple[str, ...]:
    """Ask a program that prints what a tritonserver might."""
    (folder / "tritonserver").write_text(script)
    return body_limit_arguments(["/bin/sh", str(folder / "tritonserver")], environment)


def test_every_api_category_is_either_open_or_restricted() -> None:
    assert sorted([*RESTRICTED, *OPEN]) == sorted(CATEGORIES)


def test_restricted_apis_are_options_over_http_and_grpc() -> None:
    value = f"model-repository,shared-memory,trace,logging:triton-llama-key={KEY}"
    assert restricted_arguments(KEY) == (f"--http-restricted-api={value}", f"--grpc-restricted-protocol={value}")


def test_every_start_has_its_own_key() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    for key in keys:
        restricted_arguments(key)


@pytest.mark.parametrize("key", ["", "short", "a" * 31, "a" * 40 + ":", "a" * 40 + "\n", "a" * 40 + "ä"])
def test_a_short_or_ambiguous_key_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(ValueError, match=rf"^the key has {len(key)} characters; it must be at least 32 of ") as refused:
        restricted_arguments(key)
    assert not key or key not in str(refused.value)


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ('echo "Usage: tritonserver [options]\n  --model-repository <string>" >&2; exit 1', ()),
        (
            'echo "  --model-repository <string>"; echo "  --http-max-input-size <integer>"',
            (f"--http-max-input-size={BODY_BYTES}",),
        ),
        # In the environment of the server.
        ('echo "--model-repository $1 $BOUND"', (f"--http-max-input-size={BODY_BYTES}",)),
    ],
)
def test_only_a_tritonserver_with_the_option_gets_the_body_limit(
    tmp_path: Path, script: str, arguments: tuple[str, ...]
) -> None:
    assert _limit(tmp_path, script, BOUND="--http-max-input-size") == arguments


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo oops; exit 3", "--help ended with code 3 and printed oops"),
        ("exit 0", "--help ended with code 0 and printed nothing"),
    ],
)
def test_a_tritonserver_without_help_is_refused(tmp_path: Path, script: str, message: str) -> None:
    with pytest.raises(match=f"{message}$"):
        _limit(tmp_path, script)


def test_a_missing_tritonserver_is_refused(tmp_path: Path) -> None:
    with pytest.raises(match=r"tritonserver --help: .*No such file"):
        body_limit_arguments([str(tmp_path / "tritonserver")], {})


@pytest.mark.parametrize("soft", [2**20, STACK_BYTES * 2, None])
def test_processes_inherit_the_stack_limit(soft: int | None) -> None:
    """soft: the limit before; None is the hard limit, which is usually unlimited."""
    program = (
        "import resource, subprocess, sys\n"
        "from triton_supervisor.hardening import set_stack_limit\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_STACK)\n"
        f"resource.setrlimit(resource.RLIMIT_STACK, ({soft} or hard, hard))\n"
        "print(set_stack_limit(), flush=True)\n"
        "subprocess.run(['/bin/sh', '-c', 'ulimit -s'], check=True)\n"
    )
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if soft is not None and hard != resource.RLIM_INFINITY and hard < soft:
        pytest.skip(f"this machine allows stacks of at most {hard} bytes")
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=60)
    returned, inherited = run.stdout.split()
    expected = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    assert int(returned) == expected
    assert int(inherited) == expected // 1024
