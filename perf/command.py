"""A benchmark's command line, the command that repeats a run, and the beginning of a long one."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from perf.course import Budget, Course
from perf.results_file import PARTIAL, Results
from perf.roofline.device import SECONDS, measured_once
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


def _checkpoint(text: str) -> Path:
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
    add("--model", type=_checkpoint, metavar="FOLDER", help="a Llama in safetensors (default: random weights)")
    add("--resume", action="store_true", help="measure only what the output file lacks")
    add("--output", type=Path, default=Path(output), metavar="FILE", help=f"default {output}")
    return parser


def begin(
    kind: str,
    options: argparse.Namespace,
    settings: Mapping[str, object],
    command: str,
    folder: Path = PARTIAL,
    rates_s: float = SECONDS,
) -> tuple[Course, DeviceRates]:
    """Return the course of a long run and the device's rates; a file that can't be resumed ends the program.

    settings: a run is resumed under the same ones; the model and the threads are among them. command: repeats the run.
    folder: for the file written during the run. rates_s: seconds for each of the rates.
    """
    try:
        results = Results(options.output, kind, settings, options.resume, folder)
    except ValueError as error:
        sys.exit(f"{kind}: {error}")
    # The commands that made the file, resumed ones first.
    before = results.get("command") or ""
    if command not in before.split("; "):
        results.section("command", f"{before}; {command}".removeprefix("; "))
    course = Course(results, Budget(60 * options.budget))
    course.budget.say(f"{results.device}; {settings['model']}; {CORES} threads")
    rates = measured_once(results, CORES, rates_s)
    course.budget.say(rates.describe())
    return course, rates


def given(parser: argparse.ArgumentParser, options: argparse.Namespace, names: Sequence[str]) -> list[str]:
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


def model_name(model: str | Path) -> str:
    """Return a folder's own name without its parents; a hub id unchanged."""
    return Path(model).resolve().name if Path(model).expanduser().is_dir() else str(model)
