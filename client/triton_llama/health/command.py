"""The probe's command line: what to ask, one line that says why, and an exit code.

The same for `triton-llama health`, for `python -m triton_llama.health`, and for the image's `health`, which is started
every few seconds: standard library alone, and little of it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from triton_llama.health.address import HTTP_PORT, METRICS_PORT, Address
from triton_llama.health.limits import DEFAULT_STEP_AGE, DEFAULT_TIMEOUT, Limits
from triton_llama.health.probes import MODEL, healthy, live, ready

UNHEALTHY = 1
USAGE = 2

_QUESTIONS = {"healthy": healthy, "live": live, "ready": ready}
_ANSWERS = {"healthy": ("healthy", "unhealthy"), "live": ("alive", "not alive"), "ready": ("ready", "not ready")}

_DESCRIPTION = """\
Tell whether the model computes. It does if it has made a step lately, as Triton's metrics say; else if one token comes
out of it in time, or steps come while we wait. So a busy server isn't burdened, and an idle one really computes."""
_EPILOG = """\
Exit codes: 0 yes, 1 no, 2 wrong use of the command line. Standard output has one line that says why. It takes at most
the timeout and 2 s: let whoever runs it wait 5 s longer than the timeout."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line, and no usage text before it."""
        sys.stderr.write(f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)\n")
        sys.exit(USAGE)


def main(arguments: Sequence[str] | None = None, prog: str = "health") -> int:
    """Ask, print one line, and return the exit code; `arguments` defaults to the process's own."""
    options = _parser(prog).parse_args(arguments)
    # Two ports above a server without metrics somebody else's may answer.
    metrics = None if options.no_metrics else options.metrics_url or options.url.metrics
    verdict = _QUESTIONS[options.question](
        options.url,
        metrics,
        Limits(options.timeout, options.step_age),
        model=options.model,
        state_file=options.state_file,
    )
    yes, no = _ANSWERS[options.question]
    print(f"{yes if verdict.ok else no}: {verdict.reason}")
    return 0 if verdict.ok else UNHEALTHY


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=prog, description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False)
    question = parser.add_mutually_exclusive_group()
    question.add_argument(
        "--live",
        dest="question",
        action="store_const",
        const="live",
        help="no only if the model is dead, stuck or failing; yes while it loads or drains",
    )
    question.add_argument(
        "--ready",
        dest="question",
        action="store_const",
        const="ready",
        help="no also while it loads or drains, and when Triton says that the model isn't ready",
    )
    parser.add_argument(
        "--url",
        metavar="HOST:PORT",
        type=_address(HTTP_PORT),
        default=os.environ.get("TRITON_LLAMA_URL") or f"127.0.0.1:{HTTP_PORT}",
        help=f"Triton's HTTP endpoint (default: TRITON_LLAMA_URL, else 127.0.0.1:{HTTP_PORT})",
    )
    metrics = parser.add_mutually_exclusive_group()
    metrics.add_argument(
        "--metrics-url",
        metavar="HOST:PORT",
        type=_address(METRICS_PORT),
        help="Triton's metrics (default: the same host, two ports above; a server without them is asked for a token)",
    )
    metrics.add_argument(
        "--no-metrics",
        action="store_true",
        help="the server has none (--allow-metrics=false), so nobody else's two ports above are taken for its own",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=_seconds,
        default=DEFAULT_TIMEOUT,
        help="by when a token must have come; longer than the longest step takes (default: %(default)g)",
    )
    parser.add_argument(
        "--step-age",
        metavar="SECONDS",
        type=_seconds,
        default=DEFAULT_STEP_AGE,
        help="how old the last step may be to prove anything (default: %(default)g)",
    )
    parser.add_argument(
        "--state-file",
        metavar="FILE",
        type=Path,
        default=os.environ.get("TRITON_STATE_FILE") or None,
        help="what the server's supervisor says of it (default: TRITON_STATE_FILE)",
    )
    parser.add_argument("--model", default=MODEL, help="the model's name in the repository (default: %(default)s)")
    parser.set_defaults(question="healthy")
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
        return Limits(timeout=float(text)).timeout
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0") from None
