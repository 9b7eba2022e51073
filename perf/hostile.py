"""Hostile requests on a server of each config, both at the same time (`make hostile REQUESTS=100000`).

Hypothesis draws them for every route, in batches of a seed each: inference over HTTP and gRPC, repository and
statistics APIs, raw bytes on both ports, and, by schemathesis, what the Open Inference Protocol describes. One request
in 20 is a good one, whose answer must be the same to the last bit as alone. The server must keep its processes, answer
each attack with the client's fault or in Triton's own words, and take as much as after the warm-up.

Ends with counts by route and status, resources before and after, a verdict, and one JSON file.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from server.fuzzing.drawing import all_attacks, drawn
from server.fuzzing.siege import Siege, unary_of
from triton_local.errors import LauncherError

from perf.command import count, make_command
from perf.results_file import Results
from perf.servers.triton import local_triton

PASSED, FAILED, NOT_RUN, INTERRUPTED = 0, 1, 2, 130
VARIANTS = ("default", "streaming")
SEED = 20261122
SEEDS = 1_000_000
"""Between the configs."""

BATCH = 2_500
MOST_FAILURES = 10

POSITIONS = 64
"""Few, so that no hostile request runs long."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack; return the exit code. An error is one line on stderr."""
    parser = argparse.ArgumentParser(prog="make hostile", description=__doc__)
    parser.add_argument("--requests", type=count, default=100_000, help="of all configs together (default %(default)s)")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS], help="configs to serve (default: both)"
    )
    parser.add_argument("--threads", type=count, default=1, metavar="N", help="that compute (default %(default)s)")
    parser.add_argument(
        "--seed", type=count, default=SEED, metavar="N", help="of the first batch (default %(default)s)"
    )
    parser.add_argument("--output", type=Path, default=Path("perf/results/hostile.json"))
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except KeyboardInterrupt:
        print("\nhostile: interrupted, nothing is written", file=sys.stderr)
        return INTERRUPTED
    except (LauncherError, OSError) as error:
        print(f"hostile: {error}", file=sys.stderr)
        return NOT_RUN


def _run(options: argparse.Namespace) -> int:
    settings = {name: getattr(options, name) for name in ("requests", "variants", "threads", "seed")}
    results = Results(options.output, "hostile", {"model": "models/pydoc-llama", **settings}, resume=False)
    rest = [] if options.seed == SEED else [f"--seed={options.seed}"]
    rest += [] if options.variants == [*VARIANTS] else ["--variants", *options.variants]
    results.section("command", make_command("hostile", {"REQUESTS": str(options.requests)}, rest))
    each = math.ceil(options.requests / len(options.variants))
    attacking = partial(attack, each, options.threads)
    # Of other seeds on each. A process each: Hypothesis takes most of the time.
    seeds = [options.seed + number * SEEDS for number, _ in enumerate(options.variants)]
    with ProcessPoolExecutor(len(options.variants), get_context("spawn")) as pool:
        for variant, survived in zip(options.variants, pool.map(attacking, options.variants, seeds), strict=True):
            results.add(variant, survived)
            print(_lines(variant, survived), flush=True)
    failures = [line for one in results.measurements.values() for line in one["failures"]]
    results.section("passed", not failures)
    results.finish()
    print(f"\nhostile: {'FAILED' if failures else 'passed'}; written to {options.output}")
    return FAILED if failures else PASSED


def attack(requests: int, threads: int, variant: str, seed: int) -> dict[str, Any]:
    """Attack a server of a config; return counts, resources and failures."""
    environment = {"OMP_NUM_THREADS": str(threads), "LLAMA_MAX_MODEL_LEN": str(POSITIONS)}
    began = time.monotonic()
    with local_triton(variant=variant, environment=environment) as server:
        siege = Siege(server)
        attacks = all_attacks(unary_of(server))
        while siege.campaign.sent < requests and not _over(siege):
            known = len(siege.failures)
            size = min(BATCH, requests - siege.campaign.sent)
            try:
                siege.run(drawn(attacks, size, seed + len(siege.figures)))
            except AssertionError as error:
                # The server never becomes idle: the next batch would find the same.
                siege.failures.append(f"after {siege.campaign.sent} attacks: {error}")
                break
            wrong = "".join(f"\n  {line}" for line in siege.failures[known:])
            print(f"{variant}: {siege.campaign.sent:,} sent, {time.monotonic() - began:,.0f} s{wrong}", flush=True)
        siege.finish()
        sent, asked = siege.campaign.sent, siege.campaign.asked
        counted = {} if siege.gone else {"computed": siege.computed(), "refused": siege.refused()}
    return {
        "attacks": sent,
        "good_requests": asked,
        **counted,
        "seconds": round(time.monotonic() - began, 1),
        "failures": siege.failures,
        "outcomes": siege.campaign.by_route(),
        "resources": {str(after): figures for after, figures in siege.figures.items()},
    }


def _over(siege: Siege) -> bool:
    """Whether more attacks would show nothing new, or reach no server."""
    return siege.gone or siege.campaign.ended or len(siege.failures) >= MOST_FAILURES


def _lines(variant: str, survived: Mapping[str, Any]) -> str:
    """Return the outcome on one config as text."""
    head = f"{variant}: {survived['attacks']:,} attacks, {survived['good_requests']:,} good requests"
    routes = [
        f"  {route}: {', '.join(f'{count:,} {status}' for status, count in statuses.items())}"
        for route, statuses in survived["outcomes"].items()
    ]
    readings = list(survived["resources"].items())
    ends = [readings[0], readings[-1]] if readings else []
    taken = [f"  after {after}: {', '.join(f'{name} {value:.1f}' for name, value in at.items())}" for after, at in ends]
    return "\n".join([head, *routes, *taken, *(f"  FAILED: {line}" for line in survived["failures"])])


if __name__ == "__main__":
    sys.exit(main())
