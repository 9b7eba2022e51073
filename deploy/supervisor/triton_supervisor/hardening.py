"""What closes tritonserver to hostile requests: restricted APIs, a body limit, and large thread stacks.

Triton's control APIs have no authentication: a client that reaches the port may unload the model, load another one from
the request itself (remote code execution), map the server's shared memory, or turn its logs off. Over HTTP and gRPC
alike they are restricted to requests with a key. What clients, probes, metrics and benchmarks use stays open; a proxy
controls who reaches that.

The key keeps out remote clients. It is on tritonserver's command line, the only place from which Triton takes it, so
anyone who can list the container's processes can read it.
"""

from __future__ import annotations

import re
import resource
import secrets
import subprocess
from collections.abc import Mapping, Sequence

from triton_supervisor.settings import RefusedError

RESTRICTED = ("model-repository", "shared-memory", "trace", "logging")
"""Triton's names of the API categories that need the key: every one that isn't in OPEN."""

OPEN = ("health", "metadata", "inference", "model-config", "statistics")
"""Categories without a key: inference, probes, and the read-only ones for `triton-llama status` and benchmarks."""

HTTP_HEADER = "triton-llama-key"
"""HTTP header with the key as its value."""

GRPC_HEADER = f"triton-grpc-protocol-{HTTP_HEADER}"
"""The same in a gRPC call's metadata: Triton adds the prefix."""

BODY_BYTES = 2 * 2**20
"""32 rows of 64 KiB each, where a prompt of 4,096 tokens is about 16 KiB of text."""

BODY_LIMIT_OPTION = "--http-max-input-size"

STACK_BYTES = 512 * 2**20
"""More than a body of BODY_BYTES can take: 288 MB, for a million lists in lists of 275 bytes each (2.51, measured)."""

_KEY = re.compile(r"[A-Za-z0-9_-]{32,}")
# In every tritonserver's help: its absence means that this is no help.
_ALWAYS_IN_HELP = "--model-repository"
_HELP_TIMEOUT_S = 60.0


def new_key() -> str:
    """Return a random key; each server start has its own."""
    return secrets.token_urlsafe(32)


def restricted_arguments(key: str) -> tuple[str, ...]:
    """Return tritonserver's options that restrict RESTRICTED, over HTTP and gRPC, to requests with the key.

    Raises ValueError for a key that is short enough to guess, or that tritonserver would parse differently.
    """
    if not _KEY.fullmatch(key):
        # Without the key itself: it may be a real one with a typo.
        raise ValueError(f"the key has {len(key)} characters; it must be at least 32 of A-Z, a-z, 0-9, - and _")
    setting = f"{','.join(RESTRICTED)}:{HTTP_HEADER}={key}"
    return (f"--http-restricted-api={setting}", f"--grpc-restricted-protocol={setting}")


def body_limit_arguments(tritonserver: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return tritonserver's option that limits an HTTP body to BODY_BYTES; none if this version doesn't have it.

    2.51 (24.10) doesn't, and only a proxy can limit there. Later ones default to 64 MiB, and check the JSON, each input
    and the decompressed body. gRPC has no such option: a message may have 2 GiB. tritonserver: the command without
    options; it is run with --help. Raises RefusedError if it doesn't print its help.
    """
    command = [*tritonserver, "--help"]
    try:
        # The exit code and the stream of --help differ between versions.
        run = subprocess.run(
            command, env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=_HELP_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RefusedError(f"{tritonserver[0]} --help: {error}") from error
    printed = run.stdout + run.stderr
    if _ALWAYS_IN_HELP not in printed:
        output = " ".join(printed.split())[:200] or "nothing"
        raise RefusedError(f"{tritonserver[0]} --help ended with code {run.returncode} and printed {output}")
    return (f"{BODY_LIMIT_OPTION}={BODY_BYTES}",) if BODY_LIMIT_OPTION in printed else ()


def set_stack_limit() -> int:
    """Set the thread stack size of processes started from now on to STACK_BYTES, or the hard limit; return it.

    Triton puts three things onto a thread's stack, and dies (signal 11) if one is too large:

    - Nested JSON: 81 bytes a level in the parser, recursive up to 26.04, and 275 where it is a tensor's data, in 2.51.
      With the usual 8 MiB that is a body of 62 kB.
    - A form (application/x-www-form-urlencoded, curl's default): its HTTP library, libevhtp, parses it as a query, in
      two buffers of its size.
    - Before 25.07 the chunks of a chunked body, 16 bytes each (CVE-2025-23310).

    Stacks are virtual memory: untouched pages cost nothing.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    # "Unlimited" is replaced too: the C library would make stacks of 2 MiB.
    size = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (size, hard))
    return size
