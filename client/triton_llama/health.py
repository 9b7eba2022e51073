#!/usr/bin/env -S python3 -I -S
"""Health probe: whether a server is healthy, alive or ready, and why, in one line.

A server is healthy if its model computes. The probe looks for the cheapest evidence first:

    1. a recent step of the engine, read from Triton's metrics page: costs the model nothing
    2. one token from /generate: costs a forward pass
    3. a step that the engine made while the probe waited for that token: the model is slow or overloaded, not dead

Triton 2.51 doesn't notice a plain HTTP client that disconnects: a stuck model keeps its request, and computes it when
it goes on. So while requests wait for the model, such as that of an earlier probe, the probe sends none and waits for
their step. However many probes there are, a stuck model keeps one request of theirs.

With several instances of the model (one per GPU, say), each must have made a recent step; otherwise one token must come
from the instance that Triton picks (or a step, where requests wait), and no instance may hang with slots in use. An
instance that died while idle goes unnoticed as long as another one answers.

Standard library only, and no import from the rest of the package: the Docker image installs this file as `bin/health`,
where orchestrators start it every few seconds. `triton-llama health` and `python -m triton_llama.health` run it too.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from email.utils import mktime_tz, parsedate_tz
from enum import Enum
from pathlib import Path
from typing import NamedTuple, NoReturn
from urllib.parse import quote

HTTP_PORT = 8000
METRICS_PORT = 8002
MODEL = "llama"

DEFAULT_TIMEOUT = 20.0
DEFAULT_STEP_AGE = 30.0
METRICS_SECONDS = 2.0
"""Timeout of the metrics page; a thread of tritonserver that does nothing else serves it."""
PAUSE_SECONDS = 1.0
"""Between two requests that a full queue refuses (Triton counts each), or between two looks at the metrics."""
CLOCK_SECONDS = 1.0
"""How far in the future a step may lie. Beyond that the clocks disagree, and the step has no usable age."""
_SHORTEST_TIMEOUT = 0.05
"""A socket timeout of 0 would make the socket non-blocking."""


class Address(NamedTuple):
    """A host name or address (IPv6 without brackets) and a TCP port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, default_port: int) -> Address:
        """Parse `HOST`, `HOST:PORT` or `http://HOST:PORT`; an IPv6 address needs brackets.

        Raises:
            ValueError: another form, or a port outside 1 ... 65535.
        """
        match = re.fullmatch(r"(?:http://)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?/?", text)
        if match is None:
            raise ValueError(f"{text!r} is no address; it must be HOST:PORT, of the server itself, in plain HTTP")
        host, port = match[1].strip("[]"), int(match[2] or default_port)
        if not 1 <= port <= 65535:
            raise ValueError(f"{text!r} has the port {port}; it must be from 1 to 65535")
        return cls(host, port)

    @property
    def metrics(self) -> Address:
        """Triton's default address for metrics: the same host, two ports above the HTTP endpoint."""
        return Address(self.host, self.port + METRICS_PORT - HTTP_PORT)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


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


# --- HTTP


class Response(NamedTuple):
    """clock: the server's time from its Date header, seconds since 1970, rounded up; None without that header."""

    status: int
    clock: float | None
    body: str


class NoAnswerError(Exception):
    """No complete HTTP response; the message is one line and names the address."""


class AnswerTimeoutError(NoAnswerError):
    """The response took longer than the timeout."""


class NoListenerError(NoAnswerError):
    """The connection was refused: no process listens at the address."""


def exchange(
    address: Address,
    method: str,
    path: str,
    seconds: float,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Send one request (`body` as JSON) and read the whole response within `seconds`.

    Each exchange opens and closes its own connection: Triton waits for idle connections when it shuts down.

    Raises:
        AnswerTimeoutError: it took longer.
        NoListenerError: the connection was refused.
        NoAnswerError: the address is unreachable or doesn't speak HTTP.
    """
    deadline = time.monotonic() + seconds
    # Not urllib, which would use a container's HTTP_PROXY.
    connection = http.client.HTTPConnection(address.host, address.port, timeout=max(seconds, _SHORTEST_TIMEOUT))
    own = {"Connection": "close"} | ({"Content-Type": "application/json"} if body is not None else {})
    try:
        connection.request(method, path, body, {**(headers or {}), **own})
        # The time left after connecting. A server that sends its response byte by byte could exceed it.
        connection.sock.settimeout(max(deadline - time.monotonic(), _SHORTEST_TIMEOUT))
        response = connection.getresponse()
        date = parsedate_tz(response.getheader("Date") or "")
        # The header has whole seconds; the current one may be nearly over.
        clock = None if date is None else mktime_tz(date) + 1.0
        return Response(response.status, clock, response.read().decode(errors="replace"))
    except TimeoutError:
        raise AnswerTimeoutError(f"{address} doesn't answer within {seconds:.3g} s") from None
    except (OSError, OverflowError, UnicodeError, http.client.HTTPException) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        kind = NoListenerError if isinstance(error, ConnectionRefusedError) else NoAnswerError
        reason = " ".join(text.split()) or type(error).__name__
        raise kind(f"{address} can't be asked: {reason}") from error
    finally:
        connection.close()


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


# --- The engine's last step, from the metrics page

LAST_STEP = "llama_last_step_timestamp_seconds"
SLOTS_IN_USE = "llama_slots_in_use"
PENDING = "nv_inference_pending_request_count"
"""Triton's own: requests in its queue."""

_SERIES = re.compile(r"^(\w+)\{(.*)\} ([-+]?[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Instance(NamedTuple):
    """One process of the model. last_step: seconds since 1970, 0 before the first one. busy: it has slots in use."""

    name: str
    last_step: float
    busy: bool


class Steps(NamedTuple):
    """The last step of each instance at one moment.

    A process that died leaves its last values on the page, so a step is evidence only while it is recent or if it came
    since an earlier look.

    instances: by their labels; empty if the page has none, and `trouble` then says why. now: the server's time if the
    page states it, else ours. queued: whether requests are in Triton's queue.
    """

    instances: Mapping[str, Instance]
    now: float
    trouble: str = ""
    queued: bool = False

    def requests_wait(self) -> bool:
        """Return whether requests are in Triton's queue or in slots: a model that works makes a step for them."""
        return self.queued or any(one.busy for one in self.instances.values())

    def recent(self, step_age: float) -> bool:
        """Return whether every instance made a step in the last `step_age` seconds."""
        ages = [self.now - one.last_step for one in self.instances.values()]
        return bool(ages) and all(-CLOCK_SECONDS <= age <= step_age for age in ages)

    def advanced(self, before: Steps) -> bool:
        """Return whether any instance made a step since an earlier look; independent of clocks."""
        return any(
            one.last_step > 0 and name in before.instances and one.last_step != before.instances[name].last_step
            for name, one in self.instances.items()
        )

    def hanging(self, before: Steps, step_age: float) -> list[Instance]:
        """Return the instances that had slots in use at both looks, and no step recently or between them.

        Empty for a model with one instance: the other evidence is about that instance.
        """
        old = before.instances if len(self.instances) > 1 else {}
        return [
            one
            for name, one in self.instances.items()
            # The same last step, and slots in use, at both looks.
            if one.busy and one == old.get(name) and self.now - one.last_step > step_age
        ]

    def describe_oldest(self) -> str:
        """Return the age of the last step, of the instance where it is oldest."""
        if not self.instances:
            return f"no metrics ({self.trouble})"
        oldest = min(one.last_step for one in self.instances.values())
        return f"the last step was {self._age(oldest)} ago" if oldest > 0 else "no step yet"

    def describe_youngest(self) -> str:
        """Return the age of the most recent step of any instance."""
        return f"a step {self._age(max(one.last_step for one in self.instances.values()))} ago"

    def _age(self, last_step: float) -> str:
        age = max(self.now - last_step, 0.0)
        return f"{age:.1f} s" if age < 10 else f"{age:.0f} s"


def series(page: str, model: str) -> Iterator[tuple[str, dict[str, str], str, float]]:
    """Yield each series of a model on a metrics page: all labels as they stand, by name, the metric and its value."""
    for metric, labels, value in _SERIES.findall(page):
        named = dict(_LABEL.findall(labels))
        if named.get("model") == model:
            yield labels, named, metric, float(value)


def pending_requests(page: str, model: str) -> float | None:
    """Return how many requests are in Triton's queues of a model, by its metrics page; None if the page has none."""
    counts = [value for _, _, metric, value in series(page, model) if metric == PENDING]
    return sum(counts) if counts else None


def read_steps(page: Address | None, model: str) -> Steps:
    """Read the metrics page; without one (None), or if it isn't this model's, the result has no instances."""
    if page is None:
        return Steps({}, time.time(), "switched off")
    try:
        response = exchange(page, "GET", "/metrics", METRICS_SECONDS)
    except NoAnswerError as error:
        return Steps({}, time.time(), str(error))
    now = time.time() if response.clock is None else response.clock
    found = list(series(response.body, model))
    busy = {labels for labels, _, metric, value in found if metric == SLOTS_IN_USE and value > 0}
    instances = {
        labels: Instance(named.get("model_instance", model), value, labels in busy)
        for labels, named, metric, value in found
        if metric == LAST_STEP
    }
    if response.status != 200 or not instances:
        return Steps({}, now, f"{page} has no {LAST_STEP} of the model {model}")
    # Where Triton doesn't say how many, only a request for a token can tell.
    return Steps(instances, now, queued=(pending_requests(response.body, model) or 0) > 0)


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
_LONGEST_MESSAGE = 300


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
    return " ".join(printable.split()).rstrip(".")[:_LONGEST_MESSAGE]


# --- The three probes


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
    if attempt.outcome is Outcome.TOKEN and len(before.instances) < 2:
        # Sufficient; the metrics may not show this step yet.
        return Verdict(True, attempt.reason + _no_metrics(before))
    while True:
        now = read_steps(metrics, model)
        hanging = now.hanging(before, limits.step_age)
        if not hanging and attempt.outcome is Outcome.TOKEN:
            return Verdict(True, attempt.reason + _no_metrics(now))
        if not hanging and (now.recent(limits.step_age) or now.advanced(before)):
            # Slow or overloaded, but alive.
            return Verdict(True, f"{attempt.reason}, but {now.describe_youngest()}")
        if attempt.outcome not in _INCONCLUSIVE or time.monotonic() >= deadline:
            break
        time.sleep(max(0.0, min(PAUSE_SECONDS, deadline - time.monotonic())))
        if attempt.outcome is not Outcome.TOKEN:
            again = ask_unless_requests_wait(now)
            # A late attempt had only the rest of the timeout and says less than the refusal before it.
            attempt = attempt if again.outcome is Outcome.LATE else again
    names = f", and rows hang in {' '.join(one.name for one in hanging)}" if hanging else ""
    reason = f"{attempt.reason}{names}, {now.describe_oldest()}"
    return Verdict(False, reason, loaded=attempt.outcome is not Outcome.NOT_LOADED)


_INCONCLUSIVE = (Outcome.TOKEN, Outcome.REFUSED, Outcome.NOT_ASKED)


def _no_metrics(steps: Steps) -> str:
    return "" if steps.instances else f" ({steps.describe_oldest()})"


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
    # `python -m` runs it as part of the package; a script, under its own name.
    sys.exit(main(prog="python -m triton_llama.health" if __package__ else "health"))
