"""Health probe: whether a server's model computes, and why, in one line.

It does if every instance of the model made a step recently, as Triton's metrics page shows, which costs the model
nothing; else if it generates one token in time, or one embedding where it has no output head. The image has this
program as `bin/health`. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from triton_supervisor.triton import MODEL, Address, AnswerError, AnswerTimeoutError, exchange, last_steps

# min_tokens: without it a checkpoint that generates an end token first would count as dead. The other fields are there
# because Triton batches only requests with the same set of inputs, and the client library sends all of these. `stream`
# is absent, hence false: one response, so that /generate works under the streaming config.
REQUEST: dict[str, object] = {"text_input": "Python is", "max_tokens": 1, "min_tokens": 1, "temperature": 0.0}
REQUEST |= {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
REQUEST |= {"seed": 0, "stop_words": [""], "bad_words": [""], "exclude_input_in_output": True}
EMBEDDING_REQUEST = {"text_input": "Python is", "return_embedding": True, "lora_name": ""}
REQUEST_ID = "health"  # in the server's log

_EMBEDS_ALONE = "return_embedding is false or missing"
"""In the refusal of a completion by a model without an output head."""

# Prefix of the message for a request that reached the queue.
_REQUEST_PREFIX = re.compile(r"^\[request id: [^\]]*\] ")
_MAX_MESSAGE = 300
_CLOCK_SKEW_S = 1.0
"""Tolerated; the metrics page has the time of another process, perhaps of another machine."""


class Limits(NamedTuple):
    """step_age: maximum age in seconds of a step that counts. timeout: seconds to wait for a token.

    Both must exceed the duration of the longest step (on a CPU, the prefill of a long prompt can take many seconds): a
    shorter one declares a slow server dead.
    """

    timeout: float = 20.0
    step_age: float = 30.0


class Verdict(NamedTuple):
    """A probe's result. reason: one line."""

    ok: bool
    reason: str


def healthy(http: Address, metrics: Address | None, limits: Limits) -> Verdict:
    """Return whether the model computes: every instance made a step recently, or else one answer comes in time.

    http, metrics: Triton's; None for a server without metrics. Takes at most `limits.timeout` and METRICS_S. A server's
    misbehaviour never raises.
    """
    try:
        ages = [] if metrics is None else [time.time() - step for step in last_steps(metrics)]
    except AnswerError as error:
        ages, steps = [], f"no metrics: {error}"
    else:
        steps = _describe(ages)
    if ages and all(-_CLOCK_SKEW_S <= age <= limits.step_age for age in ages):
        return Verdict(True, f"a step {max(min(ages), 0.0):.1f} s ago")
    verdict = compute(http, limits.timeout)
    return verdict._replace(reason=f"{verdict.reason} ({steps})")


def _describe(ages: Sequence[float]) -> str:
    """Return the age of the instances' oldest last step; one without a step has the age of 1970."""
    if not ages:
        return "no metrics"
    return f"the last step was {max(ages):.0f} s ago" if max(ages) < time.time() - 1 else "no step yet"


def compute(http: Address, timeout: float) -> Verdict:
    """Return whether the model generates a token over HTTP in `timeout` seconds; without a head, an embedding."""
    began, done, late = time.monotonic(), "one token in", "no token within"
    try:
        failure = _ask(http, REQUEST, timeout)
        if _EMBEDS_ALONE in failure:
            done, late = "one embedding in", "no embedding within"
            failure = _ask(http, EMBEDDING_REQUEST, timeout - (time.monotonic() - began))
    except AnswerTimeoutError:
        failure = f"{late} {timeout:g} s"
    except AnswerError as error:
        failure = str(error)
    return Verdict(not failure, failure or f"{done} {time.monotonic() - began:.2f} s")


def _ask(http: Address, request: Mapping[str, object], timeout: float) -> str:
    """Return why the model doesn't answer a request, in one line; empty if it does. Raises as `exchange`."""
    body = json.dumps({"id": REQUEST_ID, **request}).encode()
    response = exchange(http, "POST", f"/v2/models/{MODEL}/generate", timeout, body)
    try:
        answer = json.loads(response.body)
        if response.status == 200 and (answer["num_output_tokens"] == 1 or answer.get("embedding")):
            return ""
        message = _REQUEST_PREFIX.sub("", str(answer["error"]))
    except (ValueError, KeyError, TypeError):
        # Not Triton's answer; a proxy's, say.
        message = response.body
    # JSON can hold a lone surrogate, which can't be printed.
    line = " ".join(message.encode(errors="replace").decode().split()).rstrip(".")[:_MAX_MESSAGE]
    return f"HTTP {response.status}: {line}"


# --- The command line

UNHEALTHY = 1
USAGE = 2

_DESCRIPTION = """\
Tell whether the model computes: it made a step recently, as Triton's metrics show; or else it generates one token in
time, or one embedding where it has no output head. The probe adds no load to a busy server, and makes an idle one
compute."""
_EPILOG = """\
Exit codes: 0 yes, 1 no, 2 wrong use of the command line. Standard output has one line with the reason. The probe takes
at most the timeout and 2 s: give it 5 s more than the timeout before you kill it."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Write the error in one line, without the usage."""
        sys.stderr.write(f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)\n")
        sys.exit(USAGE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the probe, print one line and return the exit code; `arguments` defaults to `sys.argv[1:]`."""
    parser = _Parser(prog="health", description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False)
    for option, default, text in (
        ("--url", "127.0.0.1:8000", "Triton's HTTP endpoint (default: %(default)s)"),
        ("--metrics", None, "Triton's metrics (default: two ports above the HTTP endpoint)"),
    ):
        parser.add_argument(option, metavar="HOST:PORT", type=_address, default=default, help=text)
    for option, limit, text in (
        ("--timeout", Limits().timeout, "time for a token to come"),
        ("--step-age", Limits().step_age, "maximum age of the last step that counts"),
    ):
        text = f"{text}; more than the longest step takes (default: %(default)g)"
        parser.add_argument(option, metavar="SECONDS", type=_seconds, default=limit, help=text)
    options = parser.parse_args(arguments)
    metrics = options.metrics or Address(options.url.host, options.url.port + 2)
    verdict = healthy(options.url, metrics, Limits(options.timeout, options.step_age))
    print(f"{'healthy' if verdict.ok else 'unhealthy'}: {verdict.reason}")
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
