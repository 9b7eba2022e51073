"""Health probe: whether a server is healthy, alive or ready, and why, in one line.

A server is healthy if its model computes. The probe looks for the cheapest evidence first:

    1. a recent step of the engine, read from Triton's metrics page: costs the model nothing
    2. one token from /generate: costs a forward pass
    3. a step that the engine made while the probe waited for that token: the model is slow or overloaded, not dead

Triton 2.51 doesn't notice a plain HTTP client that disconnects: a stuck model keeps its request. So while requests wait
for the model, an earlier probe's perhaps, the probe sends none and waits for their step. The image has this program as
`bin/health`. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple, NoReturn

from triton_supervisor.state import read_state
from triton_supervisor.triton import MODEL, Address, AnswerTimeoutError, ApiError, Steps, exchange, read_steps

PAUSE_S = 1.0
"""Seconds between two reads of the metrics, or between two requests while the queue is full."""

# min_tokens: without it a checkpoint that generates an end token first would count as dead. The other fields are there
# because Triton batches only requests with the same set of inputs, and the client library sends all of these. `stream`
# is absent, hence false: one response, so that /generate works under the streaming config.
REQUEST: dict[str, object] = {"text_input": "Python is", "max_tokens": 1, "min_tokens": 1, "temperature": 0.0}
REQUEST |= {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
REQUEST |= {"seed": 0, "stop_words": [""], "bad_words": [""], "exclude_input_in_output": True}
REQUEST_ID = "health"  # in the server's log

# Triton's words, and the model's own while it is being unloaded.
NOT_LOADED = re.compile(r"^Request for unknown model|is not at ready state|[Ss]erver is stopping")
# Prefix of the message for a request that reached the queue.
_REQUEST_PREFIX = re.compile(r"^\[request id: [^\]]*\] ")
_QUEUE_IS_FULL = re.compile(r"^Exceeds maximum queue size")
_MAX_MESSAGE = 300


class Limits(NamedTuple):
    """timeout: seconds to wait for a token. step_age: maximum age in seconds of a step that counts as evidence.

    Choose a timeout above the duration of the longest step (on a CPU, the prefill of a long prompt can take many
    seconds); a shorter one declares a slow server dead.
    """

    timeout: float = 20.0
    step_age: float = 30.0


class Verdict(NamedTuple):
    """A probe's result. reason: one line. loaded: False if Triton says that it doesn't have the model."""

    ok: bool
    reason: str
    loaded: bool = True


# --- One token


class Outcome(Enum):
    """The outcome of a request for one token."""

    TOKEN = "a token"
    WAITING = "other requests wait for the model, or the queue is full"
    NOT_LOADED = "the model isn't loaded"
    FAILURE = "any other error, or no response within the timeout"


class Attempt(NamedTuple):
    """reason: one line."""

    outcome: Outcome
    reason: str


def generate_token(endpoint: Address, limits: Limits, deadline: float) -> Attempt:
    """Generate one token over HTTP, by `deadline` on the monotonic clock."""
    began = time.monotonic()
    body = json.dumps({"id": REQUEST_ID, **REQUEST}).encode()
    try:
        response = exchange(endpoint, "POST", f"/v2/models/{MODEL}/generate", deadline - began, body)
    except AnswerTimeoutError:
        return Attempt(Outcome.FAILURE, f"no token within {limits.timeout:g} s")
    except ApiError as error:
        return Attempt(Outcome.FAILURE, str(error))
    try:
        answer = json.loads(response.body)
        if response.status == 200 and answer["num_output_tokens"] == 1:
            return Attempt(Outcome.TOKEN, f"one token in {time.monotonic() - began:.2f} s")
        message = _REQUEST_PREFIX.sub("", str(answer["error"]))
    except (ValueError, KeyError, TypeError):
        # Not Triton's answer; a proxy's, say.
        message = response.body
    # JSON can hold a lone surrogate, which can't be printed.
    line = " ".join(message.encode(errors="replace").decode().split()).rstrip(".")[:_MAX_MESSAGE]
    reason = f"HTTP {response.status}: {line}"
    # The words first: over /generate, Triton 2.51 answers 400 to nearly everything that a model refuses.
    if NOT_LOADED.search(message):
        return Attempt(Outcome.NOT_LOADED, reason)
    full = response.status == 503 or _QUEUE_IS_FULL.search(message) is not None
    return Attempt(Outcome.WAITING if full else Outcome.FAILURE, reason)


# --- The three probes


def prove(endpoint: Address, metrics: Address | None, limits: Limits, deadline: float) -> Verdict:
    """Look for evidence that the model computes until `deadline` on the monotonic clock, plus one look at the metrics.

    metrics: None for a server without them; then only a token counts.
    """

    def attempt(steps: Steps) -> Attempt:
        if steps.requests_wait():
            return Attempt(Outcome.WAITING, "requests wait")
        return generate_token(endpoint, limits, deadline)

    steps = before = read_steps(metrics)
    if before.recent(limits.step_age):
        return Verdict(True, before.describe_youngest())
    while True:
        outcome, reason = attempt(steps)
        if outcome is Outcome.TOKEN:
            return Verdict(True, reason if before.instances else f"{reason} ({before.describe_oldest()})")
        steps = read_steps(metrics)
        if steps.recent(limits.step_age) or steps.advanced(before):
            # Slow or overloaded, but alive.
            return Verdict(True, f"{reason}, but {steps.describe_youngest()}")
        if outcome is not Outcome.WAITING or time.monotonic() >= deadline:
            return Verdict(False, f"{reason}, {steps.describe_oldest()}", loaded=outcome is not Outcome.NOT_LOADED)
        time.sleep(max(0.0, min(PAUSE_S, deadline - time.monotonic())))


def healthy(endpoint: Address, metrics: Address | None, limits: Limits, state_file: Path | None = None) -> Verdict:
    """Return whether the engine made a step recently, or else a token comes out of the model in time.

    endpoint: Triton's HTTP endpoint. metrics: its metrics; None if it has none. state_file: the supervisor's; None, or
    a missing file, means that there is no supervisor. Takes at most `limits.timeout` and 2 s. A server's misbehaviour
    never raises.
    """
    deadline = time.monotonic() + limits.timeout
    state = read_state(state_file)
    if state is not None and state.state == "failed":
        return Verdict(False, str(state))
    verdict = prove(endpoint, metrics, limits, deadline)
    known = f" ({state})" if state is not None and state.state != "serving" and not verdict.ok else ""
    return verdict._replace(reason=verdict.reason + known)


def live(endpoint: Address, metrics: Address | None, limits: Limits, state_file: Path | None = None) -> Verdict:
    """Return False only if the server needs a restart: its model is dead, stuck, or fails every step.

    A server that listens without a model (loading or unloaded) is alive. One that doesn't listen is alive only if the
    state file says that it starts or drains: Triton listens once its models are loaded. Arguments as for `healthy`.
    """
    deadline = time.monotonic() + limits.timeout
    state = read_state(state_file)
    if state is not None and state.state in ("failed", "starting", "draining"):
        return Verdict(state.state != "failed", str(state))
    verdict = prove(endpoint, metrics, limits, deadline)
    return verdict._replace(ok=verdict.ok or not verdict.loaded)


def ready(endpoint: Address, metrics: Address | None, limits: Limits, state_file: Path | None = None) -> Verdict:
    """Return whether to send requests: Triton says that the model is ready, the server doesn't drain, and is healthy.

    Arguments as for `healthy`.
    """
    deadline = time.monotonic() + limits.timeout
    state = read_state(state_file)
    if state is not None and state.state != "serving":
        return Verdict(False, str(state))
    for path in ("/v2/health/ready", f"/v2/models/{MODEL}/ready"):
        try:
            status = exchange(endpoint, "GET", path, deadline - time.monotonic()).status
        except ApiError as error:
            return Verdict(False, str(error))
        if status != 200:
            return Verdict(False, f"{endpoint}{path} says HTTP {status}")
    return prove(endpoint, metrics, limits, deadline)


# --- The command line

UNHEALTHY = 1
USAGE = 2

_ANSWERS = {healthy: ("healthy", "unhealthy"), live: ("alive", "not alive"), ready: ("ready", "not ready")}

_DESCRIPTION = """\
Tell whether the model computes: it made a step recently, as Triton's metrics show; or else it generates one token in
time, or makes a step meanwhile. The probe adds no load to a busy server, and makes an idle one compute."""
_EPILOG = """\
Exit codes: 0 yes, 1 no, 2 wrong use of the command line. Standard output has one line with the reason. The probe takes
at most the timeout and 2 s: give it 5 s more than the timeout before you kill it. TRITON_STATE_FILE names the
supervisor's state of the server."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Write the error in one line, without the usage."""
        sys.stderr.write(f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)\n")
        sys.exit(USAGE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a probe, print one line and return the exit code; `arguments` defaults to `sys.argv[1:]`."""
    parser = _Parser(prog="health", description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False)
    parser.set_defaults(probe=healthy)
    probes = parser.add_mutually_exclusive_group()
    live_help = "no only if the model is dead, stuck or failing; yes while it loads or drains"
    probes.add_argument("--live", dest="probe", action="store_const", const=live, help=live_help)
    ready_help = "no also while it loads or drains, and when Triton says that the model isn't ready"
    probes.add_argument("--ready", dest="probe", action="store_const", const=ready, help=ready_help)
    url_help = "Triton's HTTP endpoint, with its metrics two ports above (default: %(default)s)"
    parser.add_argument("--url", metavar="HOST:PORT", type=_address, default="127.0.0.1:8000", help=url_help)
    for option, default, text in (
        ("--timeout", Limits().timeout, "time for a token to come; more than the longest step takes"),
        ("--step-age", Limits().step_age, "maximum age of the last step that counts as evidence"),
    ):
        text = f"{text} (default: %(default)g)"
        parser.add_argument(option, metavar="SECONDS", type=_seconds, default=default, help=text)
    options = parser.parse_args(arguments)
    state_file = os.environ.get("TRITON_STATE_FILE")
    metrics = Address(options.url.host, options.url.port + 2)
    limits = Limits(options.timeout, options.step_age)
    verdict = options.probe(options.url, metrics, limits, Path(state_file) if state_file else None)
    yes, no = _ANSWERS[options.probe]
    print(f"{yes if verdict.ok else no}: {verdict.reason}")
    return 0 if verdict.ok else UNHEALTHY


def _address(text: str) -> Address:
    try:
        return Address.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
