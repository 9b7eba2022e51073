"""A benchmark's command line, the command that repeats a run, and the beginning of a long one."""

from __future__ import annotations

import argparse
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from perf.course import Budget, Course
from perf.results_file import Results
from perf.roofline.device import measure_rates
from perf.roofline.rates import DeviceRates

CORES = len(os.sched_getaffinity(0))


def positive(text: str) -> float:
    """Parse a number above 0, for argparse."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is out of bounds: more than 0")
    return value


def count(text: str) -> int:
    """Parse an integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is out of bounds: at least 1")
    return value


def existing_checkpoint(text: str) -> Path:
    """Parse the folder of a checkpoint, for argparse."""
    if not (Path(text) / "config.json").is_file():
        raise argparse.ArgumentTypeError(
            f"{text} is not a folder with a config.json (download a checkpoint of the hub first)"
        )
    return Path(text)


def run_parser(prog: str, description: str | None, minutes: int, output: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every long run."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    add = parser.add_argument
    add("--budget", type=positive, default=minutes, metavar="MINUTES", help=f"for all of it (default {minutes})")
    add("--model", type=existing_checkpoint, metavar="FOLDER", help="a Llama in safetensors (default: random weights)")
    add("--output", type=Path, default=Path(output), metavar="FILE", help=f"default {output}")
    return parser


def begin(
    kind: str, options: argparse.Namespace, settings: Mapping[str, object], command: str
) -> tuple[Course, DeviceRates]:
    """Return the course of a long run and the device's rates. command: repeats the run."""
    course = Course(Results(options.output, kind, settings, command), Budget(60 * options.budget))
    course.budget.say(f"{course.results.device}; {settings['model']}; {CORES} threads")
    rates = measure_rates(CORES)
    course.results.section("rates", rates.to_json())
    course.budget.say(rates.describe())
    return course, rates


def typed_options(parser: argparse.ArgumentParser, options: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Return those of the options of these names that differ from their default, as typed."""
    words: list[str] = []
    for name in names:
        value = getattr(options, name)
        if value != parser.get_default(name):
            values = [] if value is True else value if isinstance(value, list) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return words


def run_command(target: str, options: argparse.Namespace, words: Sequence[str]) -> str:
    """Return the `make` command that repeats a long run. words: options that change what is measured, as typed."""
    return make_command(target, {} if options.model is None else {"MODEL": options.model.name}, words)


def make_command(target: str, variables: Mapping[str, str], options: Sequence[str] = ()) -> str:
    """Return the `make` command that repeats a run, without paths of this machine.

    options: those without a variable of their own, passed in the variable named after the target's last word.
    """
    words = [f"{name}={value}" for name, value in variables.items()]
    rest = [f"{target.rpartition('-')[2].upper()}={shlex.join(options)}"] if options else []
    return shlex.join(["make", target, *words, *rest])
