"""Judges what an attack got: an error's words are the model's, about a field, or stand in Triton's binaries.

An answer by the model is never a server error, and whatever HTTP allows is answered.
"""

from __future__ import annotations

import re
import site
from functools import cache
from pathlib import Path

from server.clients import DTYPES
from server.fuzzing.attacks import CLOSED, CONTROL, GONE, HUNG, Attack, Outcome, RawBytes
from triton_local.installation import find_wheel

# Python shows a name that contains a ' between ".
_NAME = r"""(?:'.*'|".*")"""
_MODELS = re.compile(
    rf"(?:{'|'.join(DTYPES)})\b|{_NAME} is no input of this model, and so no request parameter"
    rf"|{_NAME} is no parameter that sampling_parameters may have|the request has parameters that are not UTF-8$",
    re.DOTALL,
)

_OF_A_BATCH = re.compile("incomplete string (?:data|length indicator) for inference input '[^']*', expecting")
"""Words of Triton's Python backend, sent to every request of a batch; tritonserver's own name the model, too."""

# Sent with 500 or INTERNAL: Triton's statuses for what is the client's fault.
_BROKEN = (
    "failed to parse the request JSON buffer: ",
    "Unable to parse ",
    "attempt to get members for non-object",
    "failed to get request params.: attempt to get members for non-object",
    # A name with a NUL in it.
    "parameter key '",
)
# What is put into an error, and what stands around another error within it.
_BETWEEN = re.compile(r"'[^']*'|\"[^\"]*\"|\d+|[][():;,.<>]")
_SHORTEST, _SHORTEST_BEGINNING = 9, 16
"""Letters of an error, or of its beginning, in the binaries; fewer may be there by chance. "Not Found" has 9."""

_COMPILED_AWAY = ("Request timeout expired",)
"""Words that the compiler has turned into instructions."""

_FAULTS = re.compile(r"5\d\d|INTERNAL|UNKNOWN|ABORTED|DATA_LOSS")
"""Statuses for a server's faults."""

_DECLINED = ("501", "503")
"""Not implemented (a decoupled model, a compression); the queue is full."""


def fault(attack: Attack, outcome: Outcome) -> str | None:
    """Return what is wrong with an outcome; None if nothing is."""
    status = outcome.status
    if status in (HUNG, GONE):
        return status
    if status == CLOSED:
        answered = isinstance(attack, RawBytes) and attack.form != "request"
        return None if answered else "closed without an answer"
    if attack.route.startswith(CONTROL) and status in ("200", "OK"):
        return "a control endpoint answers without the key"
    for said in outcome.said:
        if _OF_A_BATCH.match(said):
            return f"{status} for one request of the batch, this one or another: {said}"
        if _MODELS.match(said):
            if _FAULTS.fullmatch(status):
                return f"{status} from the model: {said}"
        elif said and not _is_tritons(said):
            return f"{status} in unknown words: {said}"
    clients = status in _DECLINED or any(said.startswith(_BROKEN) for said in outcome.said)
    if _FAULTS.fullmatch(status) and not clients:
        return f"{status}: {outcome.said}"
    return f"{status}: {outcome.undocumented}" if outcome.undocumented else None


def _is_tritons(said: str) -> bool:
    return said in _COMPILED_AWAY or any(map(_is_there, _BETWEEN.split(said)))


def _is_there(part: str) -> bool:
    """Whether the beginning of a part of an error stands in Triton's binaries; a name may follow it."""
    words = part.split(" ")
    whole, *beginnings = (
        " ".join(words[:count]).encode("utf-8", "surrogatepass") for count in range(len(words), 0, -1)
    )
    long = [whole] * (len(whole) >= _SHORTEST) + [one for one in beginnings if len(one) >= _SHORTEST_BEGINNING]
    return any(one in _binaries() for one in long)


@cache
def _binaries() -> bytes:
    """Return tritonserver and its library, which contain the constant parts of its errors."""
    wheel = find_wheel([Path(path) for path in site.getsitepackages()])
    return b"".join(file.read_bytes() for file in (wheel.tritonserver, *wheel.libraries.glob("libtritonserver*")))
