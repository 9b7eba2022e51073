"""The command: serve, soak, say what it came to, and write it down with its picture."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from triton_local.errors import LauncherError
from triton_local.repository import resolve_model
from triton_local.server import LocalTriton
from triton_local.supervised import Supervised

from perf import environment
from perf.command import make_command, model_name
from perf.results import Results
from perf.soak.course import Course
from perf.soak.observations import Soaked, rows
from perf.soak.picture import picture
from perf.soak.soaking import SoakError, soak
from perf.soak.verdict import FIGURES, Finding, Outcome, judge, passed

PASSED, FAILED, NOT_RUN, INTERRUPTED = 0, 1, 2, 130
MINUTES = 30.0

_READY_TIMEOUT_S = 900.0
_EMBEDDED = "models/pydoc-llama"


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak; return the exit code. What goes wrong is one line on stderr."""
    options = _parse(arguments)
    try:
        return _run(options)
    except KeyboardInterrupt:
        print("\nsoak: interrupted, nothing is written", file=sys.stderr)
        return INTERRUPTED
    except SoakError as error:
        print(f"soak: FAILED: {error}", file=sys.stderr)
        return FAILED
    except (LauncherError, OSError, ValueError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return NOT_RUN


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make soak",
        description=__doc__,
        epilog="Exit code: 0 passed, 1 failed or could not be told, 2 if it could not be run.",
    )
    parser.add_argument("--minutes", type=_positive, default=MINUTES, help=f"of load (default {MINUTES:g})")
    parser.add_argument("--model", help="folder or hub id (default: the embedded checkpoint)")
    parser.add_argument("--variant", default="streaming", help="config to serve (default streaming)")
    parser.add_argument("--users", type=_count, default=Course(1.0).users, metavar="N", help="(default %(default)s)")
    parser.add_argument("--threads", type=_count, default=1, metavar="N", help="that compute (default %(default)s)")
    parser.add_argument("--seed", type=_count, default=Course(1.0).seed, metavar="N", help="(default %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("perf/results/soak.json"), help="the picture goes beside it"
    )
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> int:
    course = Course(60 * options.minutes, users=options.users, seed=options.seed)
    settings = _settings(options, course)
    # Before the server, because it may be refused.
    results = Results(options.output, "soak", settings, resume=False)
    results.section("command", _command(options))
    server = LocalTriton(
        variant=options.variant,
        model=None if options.model is None else resolve_model(options.model),
        environment={"OMP_NUM_THREADS": str(options.threads)},
        ready_timeout=_READY_TIMEOUT_S,
        # Nobody but the users may ask the model: requests and tokens are counted.
        supervised=Supervised(stuck_after=None),
    )
    with server:
        print(f"soaking for {options.minutes:g} minutes: {options.users} users, config {options.variant}", flush=True)
        soaked = _soaked(server, course)
    findings = judge(soaked)
    for name, content in sections(soaked, findings).items():
        results.section(name, content)
    results.finish()
    print(f"\n{said(findings)}\nwritten to {_written(soaked, options, course)}")
    return PASSED if passed(findings) else FAILED


def _soaked(server: LocalTriton, course: Course) -> Soaked:
    """Return what was observed, even if the server didn't live to the end; raises SoakError if that is nothing."""
    try:
        return soak(server, course, lambda line: print(line, flush=True))
    except SoakError as error:
        if error.soaked is None:
            raise
        print(f"soak: {error}", file=sys.stderr)
        return error.soaked


def _written(soaked: Soaked, options: argparse.Namespace, course: Course) -> str:
    """Draw the picture beside the result's file, and return where everything is."""
    drawn = options.output.with_suffix(".svg")
    try:
        drawn.write_text(picture(rows(soaked.samples), _subtitle(options, course)))
    except ValueError as error:
        # An older one would pass for this soak's.
        drawn.unlink(missing_ok=True)
        return f"{options.output}; no picture: {error}"
    return f"{options.output} and {drawn}"


def said(findings: Sequence[Finding]) -> str:
    """Return the verdict as lines: each finding, and what they come to."""
    width = max(len(finding.name) for finding in findings)
    marks: Mapping[Outcome, str] = {"ok": "ok  ", "failed": "FAIL", "can't be told": "?   ", "left out": "-   "}
    lines = [f"{marks[one.outcome]} {one.name:<{width}}  {_said(one)}" for one in findings]
    return "\n".join([*lines, verdict(findings)])


def verdict(findings: Sequence[Finding]) -> str:
    """Return what they come to, in a line: how many failed, and how many don't count and why."""
    number = Counter(finding.outcome for finding in findings)
    open_ones, of_all = number["can't be told"], len(findings)
    if number["failed"]:
        line = f"FAILED: {number['failed']} of {of_all}"
        return f"{line}; {open_ones} can't be told and aren't counted" if open_ones else line
    if open_ones:
        return f"NOT PASSED: {open_ones} of {of_all} can't be told and aren't counted, none of the others failed"
    return "passed"


def _said(finding: Finding) -> str:
    return f"{finding.outcome}: {finding.said}" if finding.outcome in ("can't be told", "left out") else finding.said


def sections(soaked: Soaked, findings: Sequence[Finding]) -> Mapping[str, Any]:
    """Return what a soak adds to its result's file."""
    tally = soaked.tally
    trends = {}
    for figure in FIGURES:
        try:
            trend = figure.trend(soaked.second_half)
        except ValueError:
            continue  # the finding says so
        trends[figure.name] = {name: round(value, 3) for name, value in asdict(trend).items()}
    return {
        "passed": passed(findings),
        "verdict": verdict(findings),
        "findings": [asdict(finding) for finding in findings],
        "trends_per_hour": trends,
        "counts": {
            "seconds": round(soaked.seconds, 1),
            "done": dict(tally.done),
            "completed": dict(tally.completed),
            "output_tokens": tally.output_tokens,
            "left": tally.left,
            "refused": tally.refused,
            "errors": dict(tally.errors),
        },
        "looks": rows(soaked.samples),
    }


def _settings(options: argparse.Namespace, course: Course) -> dict[str, Any]:
    return {
        # Without the folders before it, which are this machine's own.
        "model": _EMBEDDED if options.model is None else model_name(options.model),
        "variant": options.variant,
        "threads": options.threads,
        "course": asdict(course),
    }


def _subtitle(options: argparse.Namespace, course: Course) -> str:
    cores = len(os.sched_getaffinity(0))
    model = _EMBEDDED if options.model is None else model_name(options.model)
    return (
        f"{environment.device()}, {cores} cores; {model}, config {options.variant}; {course.users} users; grey: rests"
    )


def _command(options: argparse.Namespace) -> str:
    """Return how to do it again, as the Makefile has it."""
    variables = {"MINUTES": f"{options.minutes:g}"}
    if options.model is not None:
        variables["MODEL"] = model_name(options.model)
    defaults = {"variant": "streaming", "users": Course(1.0).users, "threads": 1, "seed": Course(1.0).seed}
    rest = [f"--{name}={value}" for name, default in defaults.items() if (value := getattr(options, name)) != default]
    return make_command("soak", variables, rest)


def _positive(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value
