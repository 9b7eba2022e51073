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
from triton_supervisor.settings import RefusedError

# Every category of Triton's restricted features, 2.51 and the newest alike (src/restricted_features.h).
CATEGORIES = [
    *("health", "metadata", "inference", "shared-memory", "model-config"),
    *("model-repository", "statistics", "trace", "logging"),
]
LIMIT = (f"--http-max-input-size={BODY_BYTES}",)
STACK = """
import resource, subprocess
from triton_supervisor.hardening import set_stack_limit
_, hard = resource.getrlimit(resource.RLIMIT_STACK)
resource.setrlimit(resource.RLIMIT_STACK, ({before} or hard, hard))
print(set_stack_limit(), flush=True)
subprocess.run(["/bin/sh", "-c", "ulimit -s"], check=True)
"""


def _limit(folder: Path, script: str) -> tuple[str, ...]:
    """Ask a program that prints what a tritonserver might."""
    (folder / "tritonserver").write_text(script)
    return body_limit_arguments(["/bin/sh", str(folder / "tritonserver")], {"BOUND": "--http-max-input-size"})


def test_every_api_category_is_open_or_restricted_over_both_protocols_with_a_key_of_each_start() -> None:
    assert sorted([*RESTRICTED, *OPEN]) == sorted(CATEGORIES)
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    for key in keys:
        value = f"model-repository,shared-memory,trace,logging:triton-llama-key={key}"
        assert restricted_arguments(key) == (f"--http-restricted-api={value}", f"--grpc-restricted-protocol={value}")


@pytest.mark.parametrize("key", ["", "short", "a" * 31, "a" * 40 + ":", "a" * 40 + "\n", "a" * 40 + "ä"])
def test_a_short_or_ambiguous_key_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(ValueError, match=rf"^the key has {len(key)} characters; it must be at least 32 of ") as refused:
        restricted_arguments(key)
    assert not key or key not in str(refused.value)


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ('echo "Usage: tritonserver [options]\n  --model-repository <string>" >&2; exit 1', ()),
        ('echo "  --model-repository <string>"; echo "  --http-max-input-size <integer>"', LIMIT),
        # In the environment of the server.
        ('echo "--model-repository $1 $BOUND"', LIMIT),
    ],
)
def test_only_a_tritonserver_with_the_option_gets_the_body_limit(
    tmp_path: Path, script: str, arguments: tuple[str, ...]
) -> None:
    assert _limit(tmp_path, script) == arguments


def test_a_tritonserver_without_help_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"--help ended with code 3 and printed oops$"):
        _limit(tmp_path, "echo oops; exit 3")
    with pytest.raises(RefusedError, match=r"--help ended with code 0 and printed nothing$"):
        _limit(tmp_path, "exit 0")
    with pytest.raises(RefusedError, match=r"tritonserver --help: .*No such file"):
        body_limit_arguments([str(tmp_path / "no" / "tritonserver")], {})


@pytest.mark.parametrize("before", [2**20, STACK_BYTES * 2, None])
def test_processes_inherit_the_stack_limit(before: int | None) -> None:
    """before: None is the hard limit, which is usually unlimited."""
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if before is not None and hard != resource.RLIM_INFINITY and hard < before:
        pytest.skip(f"this machine allows stacks of at most {hard} bytes")
    command = [sys.executable, "-c", STACK.format(before=before)]
    returned, inherited = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout.split()
    expected = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    assert (int(returned), int(inherited)) == (expected, expected // 1024)
