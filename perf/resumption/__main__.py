"""Kill processes under load: is every answer the quiet run's, byte for byte?

Parts, each with a quiet run before it and one endpoint in front; of two Tritons Envoy is between them and the endpoint,
and between that and the load:

    two      two Tritons; seconds after one began to serve, SIGKILL to its tritonserver or a model's process, at random
    one      the same with one Triton
    rolling  two Tritons; SIGTERM to one, a new one at its ports, then the other one

A server that has ended is started again at once, as a container of compose would be; "server_pauses_s" are the seconds
until it was ready. A disturbed run sends every request once, and all of them again while the disturbance lasts. Answers
are compared with those of the first quiet run: a request's bits depend on nothing else.
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

from triton_local.openai_endpoint import OpenAIEndpoint

from perf.checkpoint import EMBEDDED
from perf.command import count, existing_checkpoint, make_command, positive
from perf.environment import StealTime
from perf.load.generator import generate
from perf.load.protocols import Protocol, Request, Target
from perf.load.records import Record
from perf.results_file import RESULTS, Results
from perf.resumption.answers import Answers, compare
from perf.resumption.tritons import ENVIRONMENT, in_front_of, kill_at_random, restart_all, running_tritons
from perf.resumption.workload import mixed

USERS = 16
"""Of chats, and as many of completions."""
GRACE_S = 30
"""Seconds that accepted requests have at the end of the endpoint."""
ROUND_S = 900.0
"""Seconds for all requests once; what has no whole answer then is an error."""
MAX_EXAMPLES = 10
"""Errors, and differences, that a result shows."""
_RESUMPTIONS = re.compile(r'^llama_openai_resumptions_total\{outcome="(\w+)"\} (\S+)$', re.MULTILINE)

PARTS = {"two": 2, "one": 1, "rolling": 2}
"""Tritons of each."""

Requests = Mapping[Protocol, Sequence[Request]]
Disturbance = Callable[[threading.Event], Counter[str]]
"""Counts what it did. The event ends kills early."""


def main() -> int:
    """Run the campaign, write the result and print it. Returns 0 without an error and a difference, else 1."""
    parser = argparse.ArgumentParser(
        prog="make resumption", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART", help="default: all")
    parser.add_argument("--requests", type=count, default=500, help="of each protocol; default 500")
    parser.add_argument("--pause", type=positive, default=6.0, help="mean seconds from start to kill; default 6")
    parser.add_argument("--minutes", type=positive, default=3.0, help="of kills in a part; default 3")
    parser.add_argument("--model", type=existing_checkpoint, default=EMBEDDED, help="a checkpoint, context 512 or more")
    options = parser.parse_args()
    settings = {"model": options.model.name, "users": 2 * USERS, "pause": options.pause, "environment": ENVIRONMENT}
    results = Results(RESULTS / "resumption.json", "resumption", settings, make_command("resumption"))
    os.environ["TRITON_LLAMA_OPENAI_LOG_REQUESTS"] = "none"
    requests: Requests = mixed(options.model, options.requests)
    reference: Answers = {}
    failed = False
    for name in options.only:
        with (
            running_tritons(PARTS[name], options.model) as servers,
            OpenAIEndpoint("127.0.0.1", 0, GRACE_S) as endpoint,
            in_front_of(servers, endpoint) as url,
        ):
            kill = partial(kill_at_random, servers, pause=options.pause, seconds=60 * options.minutes)
            disturb: Disturbance = partial(restart_all, servers) if name == "rolling" else kill
            for run, action in (("quiet", lambda _: Counter[str]()), ("disturbed", disturb)):
                answers, measured = measure(url, endpoint, requests, action)
                reference = reference or answers
                errors, different = compare(reference, answers)
                failed |= bool(errors or different)
                measured |= {
                    "server_pauses_s": [round(pause, 1) for server in servers for pause in server.pauses],
                    "errors": len(errors),
                    "different": len(different),
                    "examples": [*errors[:MAX_EXAMPLES], *different[:MAX_EXAMPLES]],
                }
                results.add(f"{name}/{run}", measured)
                print(f"{name}/{run}: {measured}", flush=True)
    results.finish()
    print(f"{'FAILED' if failed else 'passed'}; perf/results/resumption.json")
    return 1 if failed else 0


def measure(
    url: str, endpoint: OpenAIEndpoint, requests: Requests, disturb: Disturbance
) -> tuple[Answers, dict[str, object]]:
    """Put the load on a URL in front of an endpoint, and disturb its Tritons meanwhile.

    Returns the answers and the run's figures.
    """
    before, steal, began = resumptions(endpoint), StealTime(), time.monotonic()
    over = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        disturbing = thread.submit(disturb, over)
        try:
            answers = load(url, endpoint.served_name, requests, lambda: not disturbing.done())
        finally:
            over.set()
        disturbances = disturbing.result()
    seconds = time.monotonic() - began
    records = [record for each in answers.values() for record in each]
    return answers, {
        "requests": len(records),
        "seconds": round(seconds, 1),
        "tokens_per_second": round(sum(record.output_tokens for record in records) / seconds, 1),
        "longest_pause_s": round(max(map(longest_pause, records)), 2),
        "disturbances": dict(disturbances),
        "resumptions": dict(resumptions(endpoint) - before),
        "steal": round(steal.share(), 3),
    }


def load(url: str, model: str, requests: Requests, goes_on: Callable[[], bool]) -> Answers:
    """Send each request once, of both protocols at the same time, and all again while `goes_on`; return the answers."""

    def send(protocol: Protocol) -> list[Record]:
        target = Target("endpoint", protocol, url, model, keep_answers=True)
        records = generate(target, requests[protocol], USERS, ROUND_S)
        while goes_on():
            records += generate(target, requests[protocol], USERS, ROUND_S)
        return records

    with ThreadPoolExecutor() as threads:
        return dict(zip(requests, threads.map(send, requests), strict=True))


def longest_pause(record: Record) -> float:
    """Return the longest time in seconds that a stream stood still; 0 of an answer that is no stream."""
    if record.sent is None or not record.token_times:
        return 0.0
    return max(then - now for now, then in pairwise([record.sent, *record.token_times, record.ended]))


def resumptions(endpoint: OpenAIEndpoint) -> Counter[str]:
    """Return an endpoint's count of resumptions by outcome."""
    with urllib.request.urlopen(f"http://{endpoint.address}/metrics", timeout=10) as page:
        found = _RESUMPTIONS.findall(page.read().decode())
    return Counter({outcome: int(float(value)) for outcome, value in found})


if __name__ == "__main__":
    sys.exit(main())
