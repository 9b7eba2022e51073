"""A benchmark's command line: common options, and the command that repeats a run."""

from __future__ import annotations

import argparse
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

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


def checkpoint_folder(text: str) -> Path:
    """Parse the path of a checkpoint's folder, for argparse."""
    folder = Path(text)
    if not (folder / "config.json").is_file():
        raise argparse.ArgumentTypeError(
            f"{folder} is not a folder with a config.json (download a checkpoint of the hub first)"
        )
    return folder


def run_parser(prog: str, description: str | None, minutes: int, output: Path) -> argparse.ArgumentParser:
    """Return a parser with the options of every long run: budget, model, threads, resume, output."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    add = parser.add_argument
    add("--budget", type=positive, default=minutes, metavar="MINUTES", help=f"for all of it (default {minutes})")
    add("--model", type=checkpoint_folder, metavar="FOLDER", help="a Llama in safetensors (default: random weights)")
    add("--threads", type=count, default=CORES, metavar="N", help=f"for computing in each server (default {CORES})")
    add("--resume", action="store_true", help="measure only what the output file lacks")
    add("--output", type=Path, default=output, metavar="FILE", help=f"default {output}")
    return parser


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
