"""A soak: a server under mixed load for minutes to hours (`make soak MINUTES=30`).

Users of many kinds keep the server busy while its memory, descriptors, threads and metrics are sampled. A server
without leaks stays flat: at 10 requests per second a leak of one kilobyte per request shows as 35 MiB per hour. All
requests must be answered, and the server's counts must match the users'. Ends with a verdict, one JSON file and a plot.
"""

from __future__ import annotations

import argparse
import asyncio
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
from perf.command import count, given, make_command, model_name, positive
from perf.results_file import Results
from perf.servers.triton import local_triton
from perf.soak.libraries import LIBRARIES, installed
from perf.soak.observed import Course, Soaked
from perf.soak.picture import columns, picture
from perf.soak.soaking import SoakError, soak
from perf.soak.stack import Stack
from perf.soak.verdict import Finding, judge, lines, passed, verdict

PASSED, FAILED, NOT_RUN, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak; return the exit code. An error is one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="make soak",
        description=__doc__,
        epilog="Exit code: 0 passed, 1 failed or could not be told, 2 if it could not be run.",
    )
    add, default = parser.add_argument, Course(1.0)
    add("--minutes", type=positive, default=30.0, help="of load (default 30)")
    add("--model", help="folder or hub id (default: the embedded checkpoint)")
    add("--variant", default="streaming", help="config to serve (default %(default)s)")
    add("--users", type=count, default=default.users, metavar="N", help="(default %(default)s)")
    add("--threads", type=count, default=1, metavar="N", help="that compute (default %(default)s)")
    add("--thinking", type=positive, default=default.thinking_seconds, help="mean seconds of pause (%(default)s)")
    add("--burst", type=positive, default=default.burst_seconds, help="seconds without pauses a round (%(default)s)")
    add("--restarts", type=positive, help="minutes between two, of the server and of the endpoint in turn (none)")
    add("--output", type=Path, default=Path("perf/results/soak.json"), help="the picture goes beside it")
    options = parser.parse_args(arguments)
    variables = {"MINUTES": f"{options.minutes:g}"}
    if options.model is not None:
        variables["MODEL"] = model_name(options.model)
    others = given(parser, options, ["variant", "users", "threads", "thinking", "burst", "restarts"])
    try:
        return _run(options, make_command("soak", variables, others))
    except KeyboardInterrupt:
        print("\nsoak: interrupted, nothing is written", file=sys.stderr)
        return INTERRUPTED
    except SoakError as error:
        print(f"soak: FAILED: {error}", file=sys.stderr)
        return FAILED
    except (LauncherError, OSError, ValueError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return NOT_RUN


def _run(options: argparse.Namespace, command: str) -> int:
    course = Course(
        60 * options.minutes,
        users=options.users,
        thinking_seconds=options.thinking,
        burst_seconds=options.burst,
        restart_seconds=None if options.restarts is None else 60 * options.restarts,
    )
    # A folder's name without its parents, which are this machine's own.
    model = "models/pydoc-llama" if options.model is None else model_name(options.model)
    settings = {"model": model, "variant": options.variant, "threads": options.threads, "course": asdict(course)}
    results = Results(options.output, "soak", settings, resume=False)
    results.section("command", command)
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
    with Stack(make, model_path) as stack:
        print(f"soaking for {options.minutes:g} minutes: {options.users} users, config {options.variant}", flush=True)
        soaked = asyncio.run(soak(stack, course, lambda line: print(line, flush=True)))
    if soaked.cut_short:
        print(f"soak: {soaked.cut_short}", file=sys.stderr)
    findings = judge(soaked)
    for name, content in sections(soaked, findings).items():
        results.section(name, content)
    results.finish()
    subtitle = f"{environment.device()}; {model}, config {options.variant}; {course.users} users"
    drawn = options.output.with_suffix(".svg")
    if len(soaked.samples) > 1:
        drawn.write_text(picture(soaked.samples, f"{subtitle}; grey: rests, dashed: restarts"))
    else:
        # An older one would pass for this soak's.
        drawn.unlink(missing_ok=True)
    print(f"\n{lines(findings)}\nwritten to {options.output}, with the picture beside it")
    return PASSED if passed(findings) else FAILED


def sections(soaked: Soaked, findings: Sequence[Finding]) -> Mapping[str, Any]:
    """Return the sections that a soak adds to its result file."""
    tally = soaked.tally
    return {
        "passed": passed(findings),
        "verdict": verdict(findings),
        "findings": [finding._asdict() for finding in findings],
        "counts": {**tally.counts, "done": dict(tally.done), "errors": dict(tally.errors)},
        "restarts": soaked.restarts,
        "looks": columns(soaked.samples),
    }


if __name__ == "__main__":
    sys.exit(main())
