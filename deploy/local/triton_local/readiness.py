"""Whether a starting server is ready: it listens on every port it was given, and it and the model say so.

Who listens is looked up rather than assumed: with a port taken by another Triton, that one would answer in our name.
One question a call; waiting is the caller's.
"""

import http.client
from collections.abc import Iterable
from pathlib import Path

from triton_local.repository import MODEL_NAME

_QUESTIONS = ("/v2/health/ready", f"/v2/models/{MODEL_NAME}/ready")
_ANSWER_TIMEOUT_S = 2.0
_LISTENING = "0A"


def is_ready(pid: int, host: str, http_port: int, all_ports: Iterable[int]) -> bool:
    """Whether process `pid` listens on `all_ports`, and server and model answer on `http_port` that they are ready."""
    return _listening_ports(pid).issuperset(all_ports) and all(
        _answers_ok(host, http_port, question) for question in _QUESTIONS
    )


def _listening_ports(pid: int) -> set[int]:
    process = Path(f"/proc/{pid}")
    try:
        own = {str(descriptor.readlink()) for descriptor in (process / "fd").iterdir()}
        # gRPC listens on every address through IPv6, also for IPv4.
        tables = [(process / "net" / name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    except OSError:
        return set()  # the process has ended, or a descriptor was closed under our eyes: the next question will tell
    ports = set()
    for line in (line for table in tables for line in table):
        _, local, _, state, _, _, _, _, _, inode = line.split()[:10]
        if state == _LISTENING and f"socket:[{inode}]" in own:
            ports.add(int(local.rpartition(":")[2], 16))
    return ports


def _answers_ok(host: str, port: int, path: str) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=_ANSWER_TIMEOUT_S)
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
