"""The client's command line as a process."""

from __future__ import annotations

import subprocess
import sys

from triton_local.server import LocalTriton

CODE = "from triton_llama.cli import main; main()"
COMMAND = (sys.executable, "-W", "error", "-c")


def url(server: LocalTriton, protocol: str) -> str:
    return f"{protocol}://{server.http_url if protocol == 'http' else server.grpc_url}"


def run(server: LocalTriton, protocol: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command of `triton-llama` against this server to its end."""
    command = [*COMMAND, CODE, *arguments, "--url", url(server, protocol)]
    return subprocess.run(command, input=stdin, capture_output=True, encoding="utf-8", timeout=120, check=False)
