"""The command line's options, each checked against its bound before anything is started."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llama_engine.settings import ENVIRONMENT_PREFIX
from triton_local.repository import DEFAULT_VARIANT

from perf.load.arrivals import Closed, Poisson
from perf.tune.demand import Demand
from perf.tune.search import MOST
from perf.workload import LONGEST_OUTPUT, MEAN_OUTPUT, MIXES

_CONCURRENCY = 32
_ROUNDS_OF_REQUESTS = 4
_OPEN_REQUESTS = 128
_OPEN_WARMUP = 16


@dataclass(frozen=True)
class Options:
    """What is to be tuned, under which load, how long, and where it goes. model: None is the benchmark's checkpoint."""

    slo_p95_ms: float
    demand: Demand
    variant: str
    model: str | None
    threads: int
    budget_s: float
    measurements: int
    resume: bool
    output: Path
    config_out: Path | None


def read(arguments: Sequence[str] | None, environment: Mapping[str, str]) -> Options:
    """Parse and check; a mistake is one line on stderr and exit code 2."""
    parser = _parser()
    given = parser.parse_args(arguments)
    for name in sorted(environment):
        if name.startswith(ENVIRONMENT_PREFIX):
            # It would beat the config in every server, and be missing from the one that is recommended.
            parser.error(
                f"the environment variable {name} is set; unset it: what is tuned is the config (--model for one)"
            )
    arrivals = Closed(given.concurrency) if given.rate is None else Poisson(given.rate, seed=0)
    closed = isinstance(arrivals, Closed)
    requests = given.requests or (_ROUNDS_OF_REQUESTS * given.concurrency if closed else _OPEN_REQUESTS)
    return Options(
        slo_p95_ms=given.slo_p95_ms,
        demand=Demand(
            mix=given.mix,
            arrivals=arrivals,
            requests=requests,
            warmup=given.concurrency if closed else _OPEN_WARMUP,
            output_tokens=given.output_tokens,
            timeout=given.timeout,
        ),
        variant=given.variant,
        model=given.model,
        threads=given.threads or _threads(parser, environment),
        budget_s=60 * given.budget,
        measurements=given.measurements,
        resume=given.resume,
        output=given.output,
        config_out=given.config_out,
    )


def _threads(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> int:
    try:
        return _whole(1, 1024)(environment.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0)))))
    except argparse.ArgumentTypeError as error:
        parser.error(f"the environment variable OMP_NUM_THREADS {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perf.tune",
        # Shortened, they would be another way to say what `make tune` has variables for.
        allow_abbrev=False,
        description="Recommend batching settings: the most tokens a second whose p95 latency meets the bound.",
        epilog="Exit code: 0 with a recommendation, 1 if nothing meets the bound, 2 if something can't be used or run.",
    )
    add = parser.add_argument
    add("--slo-p95-ms", type=_number(1, 3_600_000), required=True, metavar="MS", help="bound on the p95 latency")
    add("--mix", choices=MIXES, default="uniform", help="of output lengths (uniform)")
    when = parser.add_mutually_exclusive_group()
    when.add_argument(
        "--concurrency", type=_whole(1, 1024), default=_CONCURRENCY, metavar="N", help="closed loop: at a time (32)"
    )
    when.add_argument("--rate", type=_number(0.001, 10_000), metavar="R", help="open loop: so many a second, Poisson")
    add("--requests", type=_whole(1, 100_000), metavar="N", help="measured ones of a point (4 x concurrency, or 128)")
    add("--output-tokens", type=_whole(1, LONGEST_OUTPUT), default=MEAN_OUTPUT, metavar="N", help="their mean (200)")
    add("--timeout", type=_number(1, 86_400), default=1800.0, metavar="S", help="for all requests of a point (1800)")
    add("--variant", default=DEFAULT_VARIANT, metavar="NAME", help="the config to start from (default)")
    add("--model", help="checkpoint, a folder or a hub id (the benchmarks' own, of random weights)")
    add("--threads", type=_whole(1, 1024), metavar="N", help="of a server on a CPU (OMP_NUM_THREADS, else all cores)")
    add("--budget", type=_number(0.1, 1440), default=30.0, metavar="MINUTES", help="for everything (30)")
    add("--measurements", type=_whole(1, MOST), default=MOST, metavar="N", help=f"at most so many ({MOST})")
    add("--resume", action="store_true", help="go on with the measurements in the output")
    add("--output", type=Path, default=Path("perf/results/tune.json"), metavar="FILE", help="(perf/results/tune.json)")
    add("--config-out", type=Path, metavar="FILE", help="write the recommended config here too")
    return parser


def _number(low: float, high: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be a number from {low:.10g} to {high:.10g}, got {text!r}")
        return value

    return number


def _whole(low: int, high: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
            raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {high}, got {text!r}")
        return int(text)

    return whole
