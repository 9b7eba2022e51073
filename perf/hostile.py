"""Hostile requests on a server of each config, both at the same time (`make hostile REQUESTS=100000`).

Hypothesis draws them for every route, in batches of a seed each: inference over HTTP and gRPC, repository and
statistics APIs, raw bytes on both ports, and, by schemathesis, what the Open Inference Protocol describes. One request
in 20 is a good one, whose answer must be the same to the last bit as alone. The server must keep its processes, answer
each attack with the client's fault or in Triton's own words, and take as much as after the warm-up.

Ends with counts by route and status, a verdict, and one JSON file, which has the resources after each batch, too.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from server.fuzzing.drawing import all_attacks, drawn
from server.fuzzing.siege import Siege, unary_of
from triton_local.errors import LauncherError

from perf.command import count, given, make_command
from perf.results_file import Results
from perf.servers.triton import local_triton

PASSED, FAILED, NOT_RUN, INTERRUPTED = 0, 1, 2, 130
VARIANTS = ["default", "streaming"]
SEEDS = 1_000_000
"""Between the configs."""

BATCH = 2_500
MOST_FAILURES = 10

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "LLAMA_MAX_MODEL_LEN": "64"}
"""Few positions, so that no hostile request runs long."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack; return the exit code. An error is one line on stderr."""
    parser = argparse.ArgumentParser(prog="make hostile", description=__doc__)
    add = parser.add_argument
    add("--requests", type=count, default=100_000, help="of all configs together (default %(default)s)")
    add("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="configs to serve (default: both)")
    add("--seed", type=count, default=20261122, metavar="N", help="of the first batch (default %(default)s)")
    add("--output", type=Path, default=Path("perf/results/hostile.json"))
    options = parser.parse_args(arguments)
    words = given(parser, options, ("seed", "variants"))
    command = make_command("hostile", {"REQUESTS": str(options.requests)}, words)
    try:
        return _run(options, command)
    except KeyboardInterrupt:
        print("\nhostile: interrupted, nothing is written", file=sys.stderr)
        return INTERRUPTED
    except (LauncherError, OSError) as error:
        print(f"hostile: {error}", file=sys.stderr)
        return NOT_RUN


def _run(options: argparse.Namespace, command: str) -> int:
    settings = {name: getattr(options, name) for name in ("requests", "variants", "seed")}
    results = Results(options.output, "hostile", {"model": "models/pydoc-llama", **settings}, resume=False)
    results.section("command", command)
    attacking = partial(attack, math.ceil(options.requests / len(options.variants)))
    # Of other seeds on each. A process each: Hypothesis takes most of the time.
    seeds = [options.seed + number * SEEDS for number, _ in enumerate(options.variants)]
    with ProcessPoolExecutor(len(options.variants), get_context("spawn")) as pool:
        for variant, survived in zip(options.variants, pool.map(attacking, options.variants, seeds), strict=True):
            results.add(variant, survived)
            print(f"{variant}: {survived['attacks']:,} attacks, {survived['good_requests']:,} good requests")
            for route, statuses in survived["outcomes"].items():
                print(f"  {route}: {', '.join(f'{count:,} {status}' for status, count in statuses.items())}")
            for line in survived["failures"]:
                print(f"  FAILED: {line}")
    passed = not any(one["failures"] for one in results.measurements.values())
    results.section("passed", passed)
    results.finish()
    print(f"\nhostile: {'passed' if passed else 'FAILED'}; written to {options.output}")
    return PASSED if passed else FAILED


def attack(requests: int, variant: str, seed: int) -> dict[str, Any]:
    """Attack a server of a config; return counts, resources and failures."""
    began = time.monotonic()
    with local_triton(variant=variant, environment=ENVIRONMENT) as server:
        siege = Siege(server)
        attacks = all_attacks(unary_of(server))
        # More attacks would show nothing new, or reach no server.
        while siege.sent < requests and not (siege.gone or siege.ended or len(siege.failures) >= MOST_FAILURES):
            known = len(siege.failures)
            try:
                siege.run(drawn(attacks, min(BATCH, requests - siege.sent), seed + len(siege.figures)))
            except AssertionError as error:
                # The server never becomes idle: the next batch would find the same.
                siege.failures.append(f"after {siege.sent} attacks: {error}")
                break
            wrong = "".join(f"\n  {line}" for line in siege.failures[known:])
            print(f"{variant}: {siege.sent:,} sent, {time.monotonic() - began:,.0f} s{wrong}", flush=True)
        siege.finish()
    return {
        "attacks": siege.sent,
        "good_requests": siege.asked,
        "computed": siege.computed,
        "refused": siege.refused,
        "seconds": round(time.monotonic() - began, 1),
        "failures": siege.failures,
        "outcomes": siege.by_route(),
        "resources": {str(after): figures for after, figures in siege.figures.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
