"""Whether a starting server is ready: it listens on every port it was given, and it and the model say so.

Who listens is looked up rather than assumed: with a port taken by another Triton, that one would answer in our name.
One question a call; waiting is the caller's.
"""

from collections.abc import Iterable

from triton_llama.health import Address, NoAnswerError, exchange
from triton_supervisor.sockets import listening_ports

from triton_local.repository import MODEL_NAME

_QUESTIONS = ("/v2/health/ready", f"/v2/models/{MODEL_NAME}/ready")
_ANSWER_TIMEOUT_S = 2.0


def is_ready(pid: int, host: str, http_port: int, all_ports: Iterable[int]) -> bool:
    """Whether process `pid` listens on `all_ports`, and server and model answer on `http_port` that they are ready."""
    return listening_ports(pid).issuperset(all_ports) and all(
        _answers_ok(Address(host, http_port), question) for question in _QUESTIONS
    )


def _answers_ok(http: Address, path: str) -> bool:
    try:
        return exchange(http, "GET", path, _ANSWER_TIMEOUT_S).status == 200
    except NoAnswerError:
        return False
