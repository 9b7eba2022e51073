"""How many bytes an HTTP request's body may have, and the option that tells a Triton that knows it.

2.51 (24.10) knows none, and there a proxy's limit is the only one. Newer ones have --http-max-input-size, 64 MiB where
it isn't set, checked against the JSON, each input, and what a body is when it has been decompressed. gRPC has nothing
like it: a message may have 2 GiB. Knows nothing about proxies.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

MOST_BYTES = 2 * 2**20
"""32 rows of 64 KiB each, where a prompt of 4,096 tokens is about 16 KiB of text."""

OPTION = "--http-max-input-size"

# Printed by every tritonserver, so that the help's absence isn't taken for the option's.
_ALWAYS = "--model-repository"
_TIMEOUT_S = 60.0


class NoHelpError(Exception):
    """tritonserver didn't say which options it has; the message is one line."""


def body_limit_arguments(tritonserver: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return tritonserver's option that bounds a body to MOST_BYTES; none if this tritonserver doesn't know it.

    tritonserver: the command, without options; it is run with --help. Raises NoHelpError if it doesn't print its help.
    """
    command = [*tritonserver, "--help"]
    try:
        # Its exit code and the stream it prints on have changed between versions.
        run = subprocess.run(
            command, env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoHelpError(f"{tritonserver[0]} --help: {error}") from error
    printed = run.stdout + run.stderr
    if _ALWAYS not in printed:
        said = " ".join(printed.split())[:200] or "nothing"
        raise NoHelpError(f"{tritonserver[0]} --help ended with code {run.returncode} and said {said}")
    return (f"{OPTION}={MOST_BYTES}",) if OPTION in printed else ()
