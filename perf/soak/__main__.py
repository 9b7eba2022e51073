"""A soak: a server under mixed load for minutes to hours (`make soak MINUTES=30`).

Users of many kinds keep the server busy while its memory, descriptors, threads and metrics are sampled. A server
without leaks stays flat: at 10 requests per second a leak of one kilobyte per request shows as 35 MiB per hour. All
requests must be answered, and the server's counts must match the users'. Ends with a verdict, one JSON file and a plot.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from triton_local.errors import LauncherError
from triton_local.ports import Service
from triton_local.repository import resolve_model
from triton_local.server import LocalTriton

from perf import environment
from perf.command import count, make_command, model_name, positive
from perf.results_file import Results
from perf.servers.triton import local_triton
from perf.soak.libraries import LIBRARIES, installed
from perf.soak.observed import Course, Soaked
from perf.soak.picture import columns, picture
from perf.soak.soaking import SoakError, soak
from perf.soak.stack import Stack
from perf.soak.verdict import Finding, judge, lines, passed, verdict

PASSED, FAILED, NOT_RUN, INTERRUPTED = 0, 1, 2, 130
_DEFAULTS = {
    "variant": "streaming",
    "users": Course(1.0).users,
    "threads": 1,
    "seed": Course(1.0).seed,
    "thinking": Course(1.0).thinking_seconds,
    "burst": Course(1.0).burst_seconds,
    "restarts": None,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak; return the exit code. An error is one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="make soak",
        description=__doc__,
        epilog="Exit code: 0 passed, 1 failed or could not be told, 2 if it could not be run.",
    )
    parser.add_argument("--minutes", type=positive, default=30.0, help="of load (default 30)")
    parser.add_argument("--model", help="folder or hub id (default: the embedded checkpoint)")
    parser.add_argument("--variant", help="config to serve (default %(default)s)")
    parser.add_argument("--users", type=count, metavar="N", help="(default %(default)s)")
    parser.add_argument("--threads", type=count, metavar="N", help="that compute (default %(default)s)")
    parser.add_argument("--seed", type=count, metavar="N", help="(default %(default)s)")
    parser.add_argument(
        "--thinking", type=positive, metavar="SECONDS", help="mean pause of a user (default %(default)s)"
    )
    parser.add_argument(
        "--burst", type=positive, metavar="SECONDS", help="without pauses, in each round (default %(default)s)"
    )
    parser.add_argument(
        "--restarts",
        type=positive,
        metavar="MINUTES",
        help="between two restarts, of the server and of the OpenAI endpoint in turn (default: none)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("perf/results/soak.json"), help="the picture goes beside it"
    )
    parser.set_defaults(**_DEFAULTS)
    try:
        return _run(parser.parse_args(arguments))
    except KeyboardInterrupt:
        print("\nsoak: interrupted, nothing is written", file=sys.stderr)
        return INTERRUPTED
    except SoakError as error:
        print(f"soak: FAILED: {error}", file=sys.stderr)
        return FAILED
    except (LauncherError, OSError, ValueError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return NOT_RUN


def _run(options: argparse.Namespace) -> int:
    course = Course(
        60 * options.minutes,
        users=options.users,
        seed=options.seed,
        thinking_seconds=options.thinking,
        burst_seconds=options.burst,
        restart_seconds=None if options.restarts is None else 60 * options.restarts,
    )
    # A folder's name without its parents, which are this machine's own.
    model = "models/pydoc-llama" if options.model is None else model_name(options.model)
    settings = {"model": model, "variant": options.variant, "threads": options.threads, "course": asdict(course)}
    results = Results(options.output, "soak", settings, resume=False)
    results.section("command", _command(options))

    model_path = None if options.model is None else resolve_model(options.model)

    def make(ports: Mapping[Service, int]) -> LocalTriton:
        return local_triton(
            variant=options.variant,
            model=model_path,
            environment={"OMP_NUM_THREADS": str(options.threads)},
            http_port=ports["http"],
            grpc_port=ports["grpc"],
            metrics_port=ports["metrics"],
        )

    missing = [name for name in LIBRARIES if name not in installed()]
    if missing:
        print(f"left out, not installed (make test-clients does it): {', '.join(missing)}", flush=True)
    # A line for each request on the terminal hides the soak's own.
    os.environ.setdefault("TRITON_LLAMA_OPENAI_LOG_REQUESTS", "none")
    with Stack.of(make, model_path) as stack:
        print(f"soaking for {options.minutes:g} minutes: {options.users} users, config {options.variant}", flush=True)
        soaked = soak(stack, course, lambda line: print(line, flush=True))
    if soaked.cut_short:
        print(f"soak: {soaked.cut_short}", file=sys.stderr)
    findings = judge(soaked)
    for name, content in sections(soaked, findings).items():
        results.section(name, content)
    results.finish()
    cores = len(os.sched_getaffinity(0))
    subtitle = f"{environment.device()}, {cores} cores; {model}, config {options.variant}; {course.users} users"
    drawn = options.output.with_suffix(".svg")
    try:
        drawn.write_text(picture(columns(soaked.samples), f"{subtitle}; grey: rests, dashed: restarts"))
        written = f"{options.output} and {drawn}"
    except ValueError as error:
        # An older one would pass for this soak's.
        drawn.unlink(missing_ok=True)
        written = f"{options.output}; no picture: {error}"
    print(f"\n{lines(findings)}\nwritten to {written}")
    return PASSED if passed(findings) else FAILED


def sections(soaked: Soaked, findings: Sequence[Finding]) -> Mapping[str, Any]:
    """Return the sections that a soak adds to its result file."""
    tally = soaked.tally
    trends = {finding.name: asdict(finding.trend) for finding in findings if finding.trend is not None}
    return {
        "passed": passed(findings),
        "verdict": verdict(findings),
        "findings": [{"name": one.name, "outcome": one.outcome, "said": one.said} for one in findings],
        "trends_per_hour": {name: {of: round(value, 3) for of, value in one.items()} for name, one in trends.items()},
        "counts": {
            "seconds": round(soaked.seconds, 1),
            "done": dict(tally.done),
            "completed": dict(tally.completed),
            "output_tokens": tally.output_tokens,
            "left": tally.left,
            "refused": tally.refused,
            "errors": dict(tally.errors),
        },
        "restarts": [asdict(restart) for restart in soaked.restarts],
        "looks": columns(soaked.samples),
    }


def _command(options: argparse.Namespace) -> str:
    """Return the `make` command that repeats the soak."""
    model = {} if options.model is None else {"MODEL": model_name(options.model)}
    rest = [f"--{name}={value}" for name, default in _DEFAULTS.items() if (value := getattr(options, name)) != default]
    return make_command("soak", {"MINUTES": f"{options.minutes:g}", **model}, rest)


if __name__ == "__main__":
    sys.exit(main())
