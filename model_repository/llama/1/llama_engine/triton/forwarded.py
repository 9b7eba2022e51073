"""Requests that another model of the repository passes on: llama_unary, for clients of /infer and unary gRPC, or
vllm_model, for clients of vllm_backend.

They arrive like any others, and what Triton loses between two models comes in one request parameter. A client may send
that parameter itself, and gains nothing: it says whose parameters these are, and where to look for a cancellation
beside Triton's own.
model_repository/llama_unary/1/model.py and compatibility/vllm_model/1/model.py are the other ends.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

FORWARDED = "llama_unary"
"""Request parameter: JSON of [the cancellation's name, the client's own parameters], and true where the other end takes
a stream."""

CANCELLATIONS = "TRITON_LLAMA_CANCELLATIONS"
"""Environment variable: the beginning of a cancellation's path, set by the supervisor, which removes what a killed
server leaves. The file exists once the client has cancelled."""

UNSUPERVISED = "/dev/shm/llama_unary-cancelled-"
"""The beginning where the variable isn't set."""

_NAME = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class Forwarded:
    """What the client of a forwarded request has sent beside the inputs. cancellation: its path. streams: whether the
    other end takes more than one response."""

    parameters: dict[str, object]
    cancellation: Path
    streams: bool = False

    @classmethod
    def read(cls, parameters: dict[str, object]) -> Forwarded | None:
        """Return it from the parameters of a request; None if the request isn't forwarded, or its parameter forged."""
        try:
            name, own, *streams = json.loads(str(parameters[FORWARDED]))
        except (KeyError, ValueError, TypeError, RecursionError):
            return None
        if not (isinstance(own, dict) and isinstance(name, str) and _NAME.fullmatch(name)):
            return None
        return cls(own, Path(os.environ.get(CANCELLATIONS, UNSUPERVISED) + name), streams == [True])

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled the request. No round trip to Triton."""
        return self.cancellation.exists()
