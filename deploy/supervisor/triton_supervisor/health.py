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
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import NamedTuple, NoReturn
from urllib.parse import quote

from triton_supervisor.metrics_page import Steps, read_steps
from triton_supervisor.triton_http import HTTP_PORT, METRICS_PORT, Address, AnswerTimeoutError, NoAnswerError, exchange

MODEL = "llama"

DEFAULT_TIMEOUT = 20.0
DEFAULT_STEP_AGE = 30.0
PAUSE_SECONDS = 1.0
"""Between two requests that a full queue refuses (Triton counts each), or between two looks at the metrics."""


class Limits(NamedTuple):
    """timeout: seconds to wait for a token. step_age: maximum age in seconds of a step that counts as evidence.

    Choose a timeout above the duration of the longest step (on a CPU, the prefill of a long prompt can take many
    seconds); a shorter one declares a slow server dead.
    """

    timeout: float = DEFAULT_TIMEOUT
    step_age: float = DEFAULT_STEP_AGE


class Verdict(NamedTuple):
    """A probe's result. reason: one line. loaded: False if Triton says that it doesn't have the model."""

    ok: bool
    reason: str
    loaded: bool = True


# --- The supervisor's state file

STARTING = "starting"
SERVING = "serving"
DRAINING = "draining"
FAILED = "failed"
UNREADABLE = "unreadable"
_STATES = {name: name for name in (STARTING, SERVING, DRAINING, FAILED)}


class State(NamedTuple):
    """name: one of the constants above. reason: one line. since: seconds since 1970."""

    name: str
    reason: str
    since: float

    def describe(self) -> str:
        """Return name, duration and reason in one line."""
        text = f"{self.name} for {max(time.time() - self.since, 0.0):.0f} s"
        return f"{text}: {self.reason}" if self.reason else text


def read_state(file: Path | None) -> State | None:
    """Return the supervisor's state of the server; None if no supervisor has written one (yet).

    A file `<name>.announced` beside it announces the server's shutdown and turns any state but `failed` into
    `draining`.
    """
    if file is None:
        return None
    state = None
    try:
        # Without one of the files: no supervisor has written a state, or announced the end.
        with suppress(FileNotFoundError):
            state = _parse_state(file, file.read_bytes())
        with suppress(FileNotFoundError):
            announced = file.with_name(f"{file.name}.announced").stat().st_mtime
            if state is None or state.name not in (DRAINING, FAILED):
                return State(DRAINING, "its end is announced", announced)
    except OSError as error:
        return State(UNREADABLE, f"{file}: {error.strerror}", time.time())
    return state


def _parse_state(file: Path, content: bytes) -> State:
    try:
        fields = json.loads(content)
        name, reason = _STATES[fields["state"]], " ".join(str(fields.get("reason", "")).split())
        return State(name, reason, float(fields["since"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return State(UNREADABLE, f"{file} holds no state: {content[:80]!r}", time.time())


# --- One token

# min_tokens: without it a checkpoint that generates an end token first would count as dead. The other fields are there
# because Triton batches only requests with the same set of inputs, and the client library sends all of these. `stream`
# is absent, hence false: one response, so that /generate works under the streaming config.
REQUEST: dict[str, object] = {"text_input": "Python is", "max_tokens": 1, "min_tokens": 1, "temperature": 0.0}
REQUEST |= {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
REQUEST |= {"seed": 0, "stop_words": [""], "bad_words": [""], "exclude_input_in_output": True}
REQUEST_ID = "health"  # in the server's log

# Triton's words, and the model's own while it is being unloaded.
_NOT_LOADED = re.compile(r"^Request for unknown model|is not at ready state|[Ss]erver is stopping")
# Prefix of the message for a request that reached the queue.
_REQUEST_PREFIX = re.compile(r"^\[request id: [^\]]*\] ")
_QUEUE_IS_FULL = re.compile(r"^Exceeds maximum queue size")
_MAX_MESSAGE = 300


class Outcome(Enum):
    """The outcome of a request for one token."""

    TOKEN = "a token"
    LATE = "no response within the timeout"
    REFUSED = "refused by a full queue, which may accept the next request"
    NOT_ASKED = "other requests wait for the model"
    NOT_LOADED = "the model isn't loaded"
    FAILURE = "any other error"


class TokenAttempt(NamedTuple):
    """reason: one line."""

    outcome: Outcome
    reason: str


def generate_token(endpoint: Address, model: str, limits: Limits, deadline: float) -> TokenAttempt:
    """Generate one token over HTTP, by `deadline` on the monotonic clock."""
    began = time.monotonic()
    path = f"/v2/models/{quote(model, safe='')}/generate"
    body = json.dumps({"id": REQUEST_ID, **REQUEST}).encode()
    try:
        response = exchange(endpoint, "POST", path, deadline - began, body)
    except AnswerTimeoutError:
        # The whole timeout, not the part of it that this request had.
        return TokenAttempt(Outcome.LATE, f"no token within {limits.timeout:g} s")
    except NoAnswerError as error:
        return TokenAttempt(Outcome.FAILURE, str(error))
    if response.status != 200:
        return _refusal(response.status, response.body)
    try:
        tokens = json.loads(response.body)["num_output_tokens"]
    except (ValueError, KeyError, TypeError):
        return TokenAttempt(Outcome.FAILURE, f"the answer has no num_output_tokens: {_one_line(response.body)}")
    if tokens != 1:
        return TokenAttempt(Outcome.FAILURE, f"num_output_tokens is {tokens!r}, where one token was asked for")
    return TokenAttempt(Outcome.TOKEN, f"one token in {time.monotonic() - began:.2f} s")


def _refusal(status: int, body: str) -> TokenAttempt:
    try:
        message = _REQUEST_PREFIX.sub("", str(json.loads(body)["error"]))
    except (ValueError, KeyError, TypeError):
        # Not Triton's answer; a proxy's, say.
        message = body
    reason = f"HTTP {status}: {_one_line(message)}"
    # The words first: over /generate, Triton 2.51 answers 400 to nearly everything that a model refuses.
    if _NOT_LOADED.search(message):
        return TokenAttempt(Outcome.NOT_LOADED, reason)
    refused = status == 503 or _QUEUE_IS_FULL.search(message) is not None
    return TokenAttempt(Outcome.REFUSED if refused else Outcome.FAILURE, reason)


def _one_line(text: str) -> str:
    # JSON can hold a lone surrogate, which can't be printed.
    printable = text.encode(errors="replace").decode()
    return " ".join(printable.split()).rstrip(".")[:_MAX_MESSAGE]


# --- The three probes

_INCONCLUSIVE = (Outcome.REFUSED, Outcome.NOT_ASKED)


def prove(endpoint: Address, metrics: Address | None, model: str, limits: Limits, deadline: float) -> Verdict:
    """Look for evidence that the model computes until `deadline` on the monotonic clock, plus one look at the metrics.

    metrics: None for a server without them, whatever listens two ports above; then only a token counts.
    """

    def ask_unless_requests_wait(steps: Steps) -> TokenAttempt:
        if steps.requests_wait():
            return TokenAttempt(Outcome.NOT_ASKED, "requests wait")
        return generate_token(endpoint, model, limits, deadline)

    before = read_steps(metrics, model)
    if before.recent(limits.step_age):
        return Verdict(True, before.describe_youngest())
    attempt = ask_unless_requests_wait(before)
    while True:
        if attempt.outcome is Outcome.TOKEN:
            without = "" if before.instances else f" ({before.describe_oldest()})"
            return Verdict(True, attempt.reason + without)
        now = read_steps(metrics, model)
        if now.recent(limits.step_age) or now.advanced(before):
            # Slow or overloaded, but alive.
            return Verdict(True, f"{attempt.reason}, but {now.describe_youngest()}")
        if attempt.outcome not in _INCONCLUSIVE or time.monotonic() >= deadline:
            loaded = attempt.outcome is not Outcome.NOT_LOADED
            return Verdict(False, f"{attempt.reason}, {now.describe_oldest()}", loaded=loaded)
        time.sleep(max(0.0, min(PAUSE_SECONDS, deadline - time.monotonic())))
        again = ask_unless_requests_wait(now)
        # A late attempt had only the rest of the timeout and says less than the refusal before it.
        attempt = attempt if again.outcome is Outcome.LATE else again


def healthy(
    endpoint: Address, metrics: Address | None, limits: Limits, *, model: str = MODEL, state_file: Path | None = None
) -> Verdict:
    """Return whether the engine made a step recently, or else a token comes out of the model in time.

    endpoint: Triton's HTTP endpoint. metrics: its metrics, by default at `endpoint.metrics`; None if it has none.
    state_file: the supervisor's; None, or a missing file, means that there is no supervisor. Takes at most
    `limits.timeout` and 2 s. A server's misbehaviour never raises.
    """
    deadline = time.monotonic() + limits.timeout
    state = read_state(state_file)
    if state is not None and state.name == FAILED:
        return Verdict(False, state.describe())
    verdict = prove(endpoint, metrics, model, limits, deadline)
    known = f" ({state.describe()})" if state is not None and state.name != SERVING and not verdict.ok else ""
    return verdict._replace(reason=verdict.reason + known)


def live(
    endpoint: Address, metrics: Address | None, limits: Limits, *, model: str = MODEL, state_file: Path | None = None
) -> Verdict:
    """Return False only if the server needs a restart: its model is dead, stuck, or fails every step.

    A server that listens without a model (loading or unloaded) is alive. One that doesn't listen is alive only if the
    state file says that it starts or drains: Triton listens once its models are loaded. Arguments as for `healthy`.
    """
    deadline = time.monotonic() + limits.timeout
    state = read_state(state_file)
    if state is not None and state.name in (FAILED, STARTING, DRAINING):
        return Verdict(state.name != FAILED, state.describe())
    verdict = prove(endpoint, metrics, model, limits, deadline)
    return verdict._replace(ok=verdict.ok or not verdict.loaded)


def ready(
    endpoint: Address, metrics: Address | None, limits: Limits, *, model: str = MODEL, state_file: Path | None = None
) -> Verdict:
    """Return whether to send requests: Triton says that the model is ready, the server doesn't drain, and is healthy.

    Arguments as for `healthy`.
    """
    deadline = time.monotonic() + limits.timeout
    state = read_state(state_file)
    if state is not None and state.name != SERVING:
        return Verdict(False, state.describe())
    for path in ("/v2/health/ready", f"/v2/models/{quote(model, safe='')}/ready"):
        try:
            status = exchange(endpoint, "GET", path, deadline - time.monotonic()).status
        except NoAnswerError as error:
            return Verdict(False, str(error))
        if status != 200:
            return Verdict(False, f"{endpoint}{path} says HTTP {status}")
    return prove(endpoint, metrics, model, limits, deadline)


# --- The command line

UNHEALTHY = 1
USAGE = 2

_ANSWERS = {healthy: ("healthy", "unhealthy"), live: ("alive", "not alive"), ready: ("ready", "not ready")}

_DESCRIPTION = """\
Tell whether the model computes: it made a step recently, as Triton's metrics show; or else it generates one token in
time, or makes a step meanwhile. The probe adds no load to a busy server, and makes an idle one compute."""
_EPILOG = """\
Exit codes: 0 yes, 1 no, 2 wrong use of the command line. Standard output has one line with the reason. The probe takes
at most the timeout and 2 s: give it 5 s more than the timeout before you kill it."""


_HELP = {
    "live": "no only if the model is dead, stuck or failing; yes while it loads or drains",
    "ready": "no also while it loads or drains, and when Triton says that the model isn't ready",
    "url": f"Triton's HTTP endpoint (default: TRITON_LLAMA_URL, else 127.0.0.1:{HTTP_PORT})",
    "metrics": "Triton's metrics (default: the same host, two ports above; if there are none, the probe needs a token)",
    "no metrics": "the server has no metrics (--allow-metrics=false); ignore another server's two ports above",
    "timeout": "time for a token to come; more than the longest step takes (default: %(default)g)",
    "step age": "maximum age of the last step that counts as evidence (default: %(default)g)",
    "state file": "the supervisor's state of the server (default: TRITON_STATE_FILE)",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Write the error in one line, without the usage."""
        sys.stderr.write(f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)\n")
        sys.exit(USAGE)


def main(arguments: Sequence[str] | None = None, prog: str = "health") -> int:
    """Run a probe, print one line and return the exit code; `arguments` defaults to `sys.argv[1:]`."""
    options = _parser(prog).parse_args(arguments)
    metrics = None if options.no_metrics else options.metrics_url or options.url.metrics
    limits = Limits(options.timeout, options.step_age)
    verdict = options.probe(options.url, metrics, limits, model=options.model, state_file=options.state_file)
    yes, no = _ANSWERS[options.probe]
    print(f"{yes if verdict.ok else no}: {verdict.reason}")
    return 0 if verdict.ok else UNHEALTHY


def _parser(prog: str) -> argparse.ArgumentParser:
    url, state_file = os.environ.get("TRITON_LLAMA_URL"), os.environ.get("TRITON_STATE_FILE")
    http, metrics = _address(HTTP_PORT), _address(METRICS_PORT)
    parser = _Parser(prog=prog, description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False)
    parser.set_defaults(probe=healthy)
    add = parser.add_argument
    one_probe = parser.add_mutually_exclusive_group().add_argument
    one_probe("--live", dest="probe", action="store_const", const=live, help=_HELP["live"])
    one_probe("--ready", dest="probe", action="store_const", const=ready, help=_HELP["ready"])
    add("--url", metavar="HOST:PORT", type=http, default=url or f"127.0.0.1:{HTTP_PORT}", help=_HELP["url"])
    one_page = parser.add_mutually_exclusive_group().add_argument
    one_page("--metrics-url", metavar="HOST:PORT", type=metrics, help=_HELP["metrics"])
    one_page("--no-metrics", action="store_true", help=_HELP["no metrics"])
    add("--timeout", metavar="SECONDS", type=_seconds, default=DEFAULT_TIMEOUT, help=_HELP["timeout"])
    add("--step-age", metavar="SECONDS", type=_seconds, default=DEFAULT_STEP_AGE, help=_HELP["step age"])
    add("--state-file", metavar="FILE", type=Path, default=state_file or None, help=_HELP["state file"])
    add("--model", default=MODEL, help="the model's name in the repository (default: %(default)s)")
    return parser


def _address(default_port: int) -> Callable[[str], Address]:
    def parse(text: str) -> Address:
        try:
            return Address.parse(text, default_port)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


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
