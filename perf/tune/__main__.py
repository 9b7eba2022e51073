"""The batching settings with the highest throughput whose p95 latency meets a bound (`make tune SLO_P95_MS=2000`).

More slots raise throughput, because a decode step reads the weights once for all rows, and raise latency, because a
step of more rows takes longer; preferred sizes and queue delay decide how full batches start, the prefill bound how
long a prompt may hold up the running rows. Where the best trade lies depends on the machine and the load, so points
around the present config are measured, each on a server of its own. Prints the recommended config, ready to save;
writes one JSON file with every measurement.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_engine.errors import EngineError
from llama_engine.settings import ENVIRONMENT_PREFIX
from triton_local.errors import LauncherError
from triton_local.repository import DEFAULT_VARIANT, resolve_model

from perf import environment
from perf.checkpoint import default_checkpoint
from perf.command import CORES, make_command, model_name
from perf.course import Budget
from perf.load.arrivals import Closed, Poisson
from perf.load.generator import LoadError
from perf.report.results import read
from perf.report.tables import tune
from perf.report.text import terminal
from perf.results_file import Results
from perf.tune.config import ConfigError, Subject
from perf.tune.findings import TUNED, Findings, conclusion
from perf.tune.measuring import Demand, ReadBackError, measure
from perf.tune.points import Knobs
from perf.tune.search import MOST, Search
from perf.workload import LONGEST_OUTPUT, MEAN_OUTPUT, MIXES

MET, NOT_MET, FAILED, INTERRUPTED = 0, 1, 2, 130

_OPEN_REQUESTS, _OPEN_WARMUP = 128, 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune; return the exit code. An error is one line on stderr."""
    options = parse(arguments, os.environ)
    try:
        return _tune(options)
    except KeyboardInterrupt:
        print("\ntune: interrupted; --resume continues with what was measured", file=sys.stderr)
        return INTERRUPTED
    except (ConfigError, EngineError, LauncherError, LoadError, ReadBackError, OSError, ValueError) as error:
        print(f"tune: {error}", file=sys.stderr)
        return FAILED


def parse(arguments: Sequence[str] | None, environ: Mapping[str, str]) -> argparse.Namespace:
    """Parse the command line, with the load as `demand`; an error is one line on stderr and exit code 2."""
    parser = _parser()
    options = parser.parse_args(arguments)
    for name in sorted(environ):
        if name.startswith(ENVIRONMENT_PREFIX):
            # It would override the config in every server, and be missing from the recommended one.
            parser.error(f"the environment variable {name} is set; unset it: the config is tuned (--model for one)")
    options.command = _command(options, parser)
    if options.threads is None:
        try:
            options.threads = _within(int, 1, 1024)(environ.get("OMP_NUM_THREADS", str(CORES)))
        except argparse.ArgumentTypeError as error:
            parser.error(f"the environment variable OMP_NUM_THREADS {error}")
    closed = options.rate is None
    options.demand = Demand(
        mix=options.mix,
        arrivals=Closed(options.concurrency) if closed else Poisson(options.rate, seed=0),
        requests=options.requests or (4 * options.concurrency if closed else _OPEN_REQUESTS),
        warmup=options.concurrency if closed else _OPEN_WARMUP,
        output_tokens=options.output_tokens,
        timeout=options.timeout,
    )
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perf.tune",
        description="Recommend batching settings: the highest throughput whose p95 latency meets the bound.",
        epilog="Exit code: 0 with a recommendation, 1 if nothing meets the bound, 2 if something can't be used or run.",
    )
    add = parser.add_argument
    add("--slo-p95-ms", type=_within(float, 1, 3_600_000), required=True, metavar="MS", help="bound on p95 latency")
    add("--mix", choices=MIXES, default="uniform", help="of output lengths (uniform)")
    arrivals = parser.add_mutually_exclusive_group()
    arrivals.add_argument("--concurrency", type=_within(int, 1, 1024), default=32, metavar="N", help="closed loop (32)")
    arrivals.add_argument("--rate", type=_within(float, 0.001, 10_000), metavar="R", help="Poisson, requests/s")
    add("--requests", type=_within(int, 1, 100_000), metavar="N", help="measured per point (4 x concurrency, or 128)")
    add("--output-tokens", type=_within(int, 1, LONGEST_OUTPUT), default=MEAN_OUTPUT, metavar="N", help="mean (200)")
    add("--timeout", type=_within(float, 1, 86_400), default=1800.0, metavar="S", help="for a point's requests (1800)")
    add("--variant", default=DEFAULT_VARIANT, metavar="NAME", help="the config to start from (default)")
    add("--model", help="checkpoint, a folder or a hub id (the benchmarks' own, of random weights)")
    add("--threads", type=_within(int, 1, 1024), metavar="N", help="per server, on a CPU (OMP_NUM_THREADS, else all)")
    add("--budget", type=_within(float, 0.1, 1440), default=30.0, metavar="MINUTES", help="in all (30)")
    add("--measurements", type=_within(int, 1, MOST), default=MOST, metavar="N", help=f"at most ({MOST})")
    add("--resume", action="store_true", help="continue with the measurements in the output")
    add("--output", type=Path, default=Path("perf/results/tune.json"), metavar="FILE", help="(perf/results/tune.json)")
    add("--config-out", type=Path, metavar="FILE", help="also write the recommended config here")
    return parser


def _within(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], float]:
    """Return a parser of numbers between bounds, for argparse."""

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            whole = "whole " if kind is int else ""
            raise argparse.ArgumentTypeError(f"must be a {whole}number from {low:.10g} to {high:.10g}, got {text!r}")
        return value

    return number


def _command(options: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """Return the `make` command that repeats the run; paths are reduced to their last part."""
    variables = {"SLO_P95_MS": f"{options.slo_p95_ms:g}", "BUDGET": f"{options.budget:g}"}
    if options.model is not None:
        variables["MODEL"] = model_name(options.model)
    others: list[str] = []
    for name, value in vars(options).items():
        if name not in ("slo_p95_ms", "budget", "model", "resume") and value != parser.get_default(name):
            others += [f"--{name.replace('_', '-')}", value.name if isinstance(value, Path) else str(value)]
    return make_command("tune", variables, others)


def _tune(options: argparse.Namespace) -> int:
    budget = Budget(60 * options.budget)
    budget.say("preparing the checkpoint and the load")
    demand: Demand = options.demand
    checkpoint = str(default_checkpoint()) if options.model is None else resolve_model(options.model)
    subject = Subject.of(options.variant, checkpoint, options.threads)
    requests = demand.sent(Path(checkpoint))
    results = Results(options.output, "tune", _settings(options, subject), options.resume)

    def add(knobs: Knobs, run: int) -> None:
        results.add(knobs.key(run), measure(subject, demand, requests, knobs))

    search = Search(
        default=subject.knobs,
        slo_p95_ms=options.slo_p95_ms,
        most_at_once=demand.most_at_once,
        measured=results.measurements,
        measure=add,
        seconds=budget.seconds,
        most=options.measurements,
        spent=lambda: budget.spent,
        say=budget.say,
    )
    budget.say(f"each point: {demand.in_words()}, after {demand.warmup} for the warm-up")
    search.run()
    findings = Findings(
        subject=subject,
        model=options.model,
        demand=demand,
        slo_p95_ms=options.slo_p95_ms,
        device=environment.device(),
        points=search.points,
        noise=search.noise,
    )
    for name, content in {"command": options.command, **findings.sections()}.items():
        results.section(name, content)
    results.finish()
    if (table := tune(read(options.output))) is not None:
        print(f"\n{terminal(table)}")
    print(f"\n{conclusion(findings)}\nWritten to {options.output}.")
    if findings.config is not None:
        print(f"\n{findings.config}")
        if options.config_out is not None:
            options.config_out.parent.mkdir(parents=True, exist_ok=True)
            options.config_out.write_text(findings.config)
            print(f"Written to {options.config_out}.")
        print(f"Save it as model_repository/llama/configs/{TUNED}.pbtxt and serve it: {findings.command}")
    return MET if findings.recommended is not None else NOT_MET


def _settings(options: argparse.Namespace, subject: Subject) -> dict[str, Any]:
    """Return what must be equal for a run to be resumed: all but the bound and the budget."""
    return {
        "variant": subject.variant,
        "config_sha256": hashlib.sha256(subject.text.encode()).hexdigest()[:12],
        "model": model_name(subject.model),
        "threads": subject.threads,
        "load": options.demand.to_json(),
        "timeout_s": options.demand.timeout,
    }


if __name__ == "__main__":
    sys.exit(main())
