"""Numbers of a command line, and their bounds, for argparse."""

from __future__ import annotations

import argparse
import math


def positive(text: str) -> float:
    """Return a number above 0; another one is an error of the command line."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is out of bounds: more than 0")
    return value


def count(text: str) -> int:
    """Return a whole number of at least 1; another one is an error of the command line."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is out of bounds: at least 1")
    return value


def complain_about_model(parser: argparse.ArgumentParser, folder: object) -> None:
    """End the program: what --model names is no checkpoint's folder."""
    parser.error(f"--model is {folder}: no folder with a config.json (a hub id must be downloaded first)")
