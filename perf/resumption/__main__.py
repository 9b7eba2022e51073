"""Kill processes under load: is every answer the quiet run's, byte for byte?

Parts, each with a quiet run before it and one endpoint in front:

    two      two Tritons; seconds after one began to serve, SIGKILL to its tritonserver or a model's process, at random
    one      the same with one Triton, which its supervisor starts again
    rolling  two Tritons; SIGTERM to one supervisor, a new server at its ports, then the other one

A disturbed run sends every request once, and goes on from the beginning while the disturbance lasts. Answers are
compared with those of the first quiet run: a request's bits depend on nothing else.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from triton_local.openai_endpoint import OpenAIEndpoint

from perf.checkpoint import EMBEDDED
from perf.command import count, existing_checkpoint, make_command, positive
from perf.environment import StealTime
from perf.results_file import Results
from perf.resumption.answers import Answer, drive
from perf.resumption.mix import Request, mixed
from perf.resumption.tritons import ENVIRONMENT, Tritons, kill_at_random, restart_all

USERS = 32
GRACE_S = 30
"""Seconds that accepted requests have at the end of the endpoint."""
_RESUMPTIONS = re.compile(r'^llama_openai_resumptions_total\{outcome="(\w+)"\} (\S+)$', re.MULTILINE)
MAX_EXAMPLES = 10
"""Errors, and differences, that a result shows."""
_CONTEXT = 60
"""Characters shown on either side of a difference."""

PARTS = {"two": 2, "one": 1, "rolling": 2}
"""Tritons of each."""

Disturbance = Callable[[Tritons, threading.Event], Counter[str]]
"""Counts what it did. The event ends kills early."""


def main() -> int:
    """Run the campaign, write the result and print it. Returns 0 without an error and a difference, else 1."""
    parser = argparse.ArgumentParser(
        prog="make resumption", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART", help="default: all")
    parser.add_argument("--requests", type=count, default=1000, help="different ones; default 1000")
    parser.add_argument("--pause", type=positive, default=6.0, help="mean seconds from start to kill; default 6")
    parser.add_argument("--minutes", type=positive, default=3.0, help="of kills in a part; default 3")
    parser.add_argument("--model", type=existing_checkpoint, default=EMBEDDED, help="a checkpoint, context 512 or more")
    parser.add_argument("--output", type=Path, default=Path("perf/results/resumption.json"), metavar="FILE")
    options = parser.parse_args()
    settings = {"model": options.model.name, "users": USERS, "pause": options.pause, "environment": ENVIRONMENT}
    results = Results(options.output, "resumption", settings, make_command("resumption"))
    os.environ["TRITON_LLAMA_OPENAI_LOG_REQUESTS"] = "none"
    requests = mixed(options.model.name, options.model, options.requests)
    reference: list[Answer] = []
    failed = False
    for name in options.only:
        kills = partial(kill_at_random, pause=options.pause, seconds=60 * options.minutes)
        disturb: Disturbance = restart_all if name == "rolling" else kills
        with (
            Tritons(PARTS[name], options.model) as tritons,
            OpenAIEndpoint("127.0.0.1", 0, GRACE_S, str(options.model)) as endpoint,
        ):
            endpoint.start(tritons.addresses)
            for run, action in (("quiet", _quiet), ("disturbed", disturb)):
                answers, measured = measure(tritons, f"http://{endpoint.address}", requests, action)
                reference = reference or answers
                measured |= compare(reference, answers)
                failed |= bool(measured["errors"] or measured["different"])
                results.add(f"{name}/{run}", measured)
                print(f"{name}/{run}: {measured}", flush=True)
    results.finish()
    print(f"{'FAILED' if failed else 'passed'}; {options.output}")
    return 1 if failed else 0


def measure(
    tritons: Tritons, url: str, requests: Sequence[Request], disturb: Disturbance
) -> tuple[list[Answer], dict[str, object]]:
    """Put the load on an endpoint, and disturb its Tritons meanwhile; return the answers and the run's figures."""
    before, steal, began = resumptions(url), StealTime(), time.monotonic()
    over = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        disturbing = thread.submit(disturb, tritons, over)
        try:
            answers = drive(url, requests, USERS, lambda: not disturbing.done())
        finally:
            over.set()
        disturbances = disturbing.result()
    seconds = time.monotonic() - began
    streams = [answer for answer in answers if requests[answer.number % len(requests)].streamed]
    return answers, {
        "requests": len(answers),
        "seconds": round(seconds, 1),
        "tokens_per_second": round(sum(answer.tokens for answer in answers) / seconds, 1),
        "longest_pause_s": round(max(answer.pause for answer in streams), 2),
        "disturbances": dict(disturbances),
        "resumptions": dict(resumptions(url) - before),
        "steal": round(steal.share(), 3),
    }


def compare(reference: Sequence[Answer], answers: Sequence[Answer]) -> dict[str, object]:
    """Return how many answers failed or differ from the reference's of the same request, and examples."""
    errors = [f"{answer.number}: {answer.error}" for answer in answers if answer.error]
    pairs = [(reference[answer.number % len(reference)], answer) for answer in answers if not answer.error]
    different = [first_difference(*pair) for pair in pairs if pair[0].content != pair[1].content]
    examples = [*errors[:MAX_EXAMPLES], *different[:MAX_EXAMPLES]]
    return {"errors": len(errors), "different": len(different), "examples": examples}


def first_difference(reference: Answer, answer: Answer) -> str:
    """Return where an answer first differs, with what is there and what should be."""
    pairs = enumerate(zip(answer.content, reference.content, strict=False))
    same = next((index for index, (one, other) in pairs if one != other), len(reference.content))
    begin = max(same - _CONTEXT, 0)
    excerpts = (each.content[begin : same + _CONTEXT] for each in (answer, reference))
    return f"{answer.number}: at {same}: {' instead of '.join(excerpts)}"


def resumptions(url: str) -> Counter[str]:
    """Return the endpoint's count of resumptions by outcome."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
        found = _RESUMPTIONS.findall(page.read().decode())
    return Counter({outcome: int(float(value)) for outcome, value in found})


def _quiet(tritons: Tritons, over: threading.Event) -> Counter[str]:
    return Counter()


if __name__ == "__main__":
    sys.exit(main())
