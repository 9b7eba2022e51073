"""One token from the model: the proof that costs a forward pass.

It is one row of one token, and waits like any other. Knows the contract of `/generate` and how Triton words its
refusals; what follows from them is `proof.py`'s.
"""

from __future__ import annotations

import json
import re
import time
from enum import Enum
from typing import NamedTuple
from urllib.parse import quote

from triton_llama.health.address import Address
from triton_llama.health.exchange import NoAnswerError, TooLateError, exchange

# min_tokens keeps a checkpoint that would end at once from counting as dead. The rest is there because Triton batches
# only requests with the same set of inputs, and the client library sends all of them. One response, so that /generate
# answers under the streaming config, too: `stream` is false where it is missing.
REQUEST: dict[str, object] = {
    "text_input": "Python is",
    "max_tokens": 1,
    "min_tokens": 1,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "seed": 0,
    "stop_words": [""],
    "bad_words": [""],
    "exclude_input_in_output": True,
}
REQUEST_ID = "health"
"""What the server's log calls each such request."""

# In Triton's words, and in the model's own while it is being unloaded.
_NOT_LOADED = re.compile(r"^Request for unknown model|is not at ready state|[Ss]erver is stopping")
# Before the message of a request that got as far as the queue.
_WHOSE = re.compile(r"^\[request id: [^\]]*\] ")
_QUEUE_IS_FULL = re.compile(r"^Exceeds maximum queue size")
_LONGEST_MESSAGE = 300


class Came(Enum):
    """What became of asking."""

    TOKEN = "a token"
    LATE = "nothing, in time"
    REFUSED = "a refusal of the full queue, which may let the next one in"
    NOT_LOADED = "Triton's word that the model isn't there, or not any more"
    FAILURE = "an error"


class Asked(NamedTuple):
    """What came of it, and in one line how."""

    came: Came
    reason: str


def ask_for_a_token(endpoint: Address, model: str, seconds: float) -> Asked:
    """Generate one token, within `seconds`, through the HTTP endpoint."""
    began = time.monotonic()
    path = f"/v2/models/{quote(model, safe='')}/generate"
    body = json.dumps({"id": REQUEST_ID, **REQUEST}).encode()
    try:
        answer = exchange(endpoint, "POST", path, seconds, body)
    except TooLateError:
        return Asked(Came.LATE, "no token in time")
    except NoAnswerError as error:
        return Asked(Came.FAILURE, str(error))
    if answer.status != 200:
        return _refused(answer.status, answer.body)
    try:
        tokens = json.loads(answer.body)["num_output_tokens"]
    except (ValueError, KeyError, TypeError):
        return Asked(Came.FAILURE, f"the answer has no num_output_tokens: {_one_line(answer.body)}")
    if tokens != 1:
        return Asked(Came.FAILURE, f"num_output_tokens is {tokens!r}, where one token was asked for")
    return Asked(Came.TOKEN, f"one token in {time.monotonic() - began:.2f} s")


def _refused(status: int, body: str) -> Asked:
    try:
        message = _WHOSE.sub("", str(json.loads(body)["error"]))
    except (ValueError, KeyError, TypeError):
        # Not Triton's own answer; a proxy's, say.
        message = body
    reason = f"HTTP {status}: {_one_line(message)}"
    # By the words first: over /generate, Triton 2.51 makes nearly everything that a model refuses a 400.
    if _NOT_LOADED.search(message):
        return Asked(Came.NOT_LOADED, reason)
    refused = status == 503 or _QUEUE_IS_FULL.search(message) is not None
    return Asked(Came.REFUSED if refused else Came.FAILURE, reason)


def _one_line(text: str) -> str:
    # A lone surrogate, which JSON can hold, can't be printed.
    printable = text.encode(errors="replace").decode()
    return " ".join(printable.split()).rstrip(".")[:_LONGEST_MESSAGE]
