"""Measure this repository against its own bounds: lines, functions, a request's files, words, seconds of the tests.

Prints one line for each number, with its bound and `ok` or `OVER`. Exit code 1 if a number is over its bound.
Needs git and the standard library; `--trace` (`trace_request.py`) needs the server's packages as well.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import words

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "model_repository" / "llama" / "1"
WAY = ROOT / "docs" / "architecture.md"
DURATIONS = ROOT / ".work" / "tests"

FOLDERS = {
    "model_repository": None,
    "client": 3_000,
    "frontend": None,
    "deploy/local": None,
    "deploy/supervisor": None,
    "deploy/prepare": 450,
    "perf": 7_500,
    "models": None,
    "scripts": None,
    "tests": 18_000,
}
"""Python lines of a folder at most."""

FUNCTION_LINES, CHAT_LINES, MODEL_LINES, README_LINES, WAY_FILES = 50, 150, 150, 150, 13
UNIT_AND_CONTRACT_SECONDS, TEST_SECONDS, TEST_ALL_SECONDS = 90, 6 * 60, 18 * 60


class Function(NamedTuple):
    """A function or method. A nested one counts as a part of the outer one, and by itself."""

    lines: int
    file: str
    name: str

    @property
    def is_kernel(self) -> bool:
        """Whether it is one of the GPU's kernels, which have no bound."""
        return "/kernels/" in self.file


def tracked(*patterns: str) -> list[str]:
    """Return the tracked files that match these patterns of git."""
    done = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).exists()]


def lines(files: Iterable[str]) -> int:
    """Return the lines of all files together."""
    return sum((ROOT / name).read_text().count("\n") for name in files)


def functions(files: Iterable[str]) -> Iterator[Function]:
    """Yield every function of these files, with its decorators."""
    for name in files:
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                yield Function((node.end_lineno or first) - first + 1, name, node.name)


def way_listed() -> list[Path]:
    """Return the files of the numbered list in docs/architecture.md: `1. `path` ...`, from the root or from 1/."""
    text = WAY.read_text() if WAY.exists() else ""
    named = re.findall(r"^\d+\. \[?`([\w/.]+\.py)`", text, re.MULTILINE)
    return [MODEL / name if (MODEL / name).exists() else ROOT / name for name in named]


class Report:
    """Prints numbers beside their bounds, and counts those that are over."""

    def __init__(self) -> None:
        self.over = 0

    def number(self, what: str, value: float | None, bound: float | None = None) -> None:
        """Print one line. value: None if it can't be known here; bound: None if there is none."""
        bad = value is not None and bound is not None and value > bound
        self.over += bad
        shown = "-" if value is None else f"{value:,.0f}"
        limit = "" if bound is None else f"{bound:8,.0f}  {'OVER' if bad else '-' if value is None else 'ok'}"
        print(f"{what:52} {shown:>8} {limit}".rstrip())

    def listing(self, title: str, rows: Iterable[str]) -> None:
        """Print details."""
        print(f"\n{title}", *(f"  {row}" for row in rows), sep="\n")


def sizes(report: Report) -> None:
    """Lines of folders, files and functions."""
    python = tracked("*.py")
    for folder, bound in FOLDERS.items():
        report.number(f"Python lines, {folder}", lines(tracked(f"{folder}/*.py")), bound)
    for room in sorted({name.split("/")[1] for name in tracked("tests/*/*.py")}):
        report.number(f"  tests/{room}", lines(tracked(f"tests/{room}/*.py")))
    report.number("Python lines, all", lines(python))
    report.number("lines, README.md", lines(["README.md"]), README_LINES)
    report.number("lines, model.py", lines(tracked("model_repository/llama/1/model.py")), MODEL_LINES)
    chat = [name for name in tracked("client/*.py") if re.search(r"chat|conversation|turns", name)]
    report.number("lines, the client's chat", lines(chat), CHAT_LINES)
    report.number("Python files", len(python))

    found = sorted(functions(name for name in python if not name.startswith("tests/")), reverse=True)
    long = [one for one in functions(python) if one.lines > FUNCTION_LINES]
    report.number("median function, without tests", statistics.median(one.lines for one in found))
    report.number("functions over 50 lines, without kernels", sum(not one.is_kernel for one in long), 0)
    shown = sorted({*found[:8], *long}, reverse=True)
    report.listing("Longest functions", [f"{one.lines:4} {one.file} {one.name}" for one in shown])
    longest = sorted(((lines([name]), name) for name in python), reverse=True)
    report.listing("Longest files", [f"{count:4} {name}" for count, name in longest[:12]])


def way(report: Report) -> None:
    """Files on a greedy request's way, as docs/architecture.md lists them."""
    listed = way_listed()
    print()
    report.number("files on a greedy request's way, as listed", len(listed) or None, WAY_FILES)
    report.number("  of them missing", sum(not file.exists() for file in listed), 0)


def phrases(report: Report) -> None:
    """Hits of scripts/words.py."""
    report.number("phrases of scripts/words.py", sum(1 for _ in words.hits()), 0)


class Room(NamedTuple):
    """The last run of a folder under tests/, from its junit file."""

    name: str
    tests: int
    start: datetime
    seconds: float
    slowest: list[tuple[float, str]]


def rooms() -> Iterator[Room]:
    """Yield the runs that scripts/run_tests.py has recorded."""
    for file in sorted(DURATIONS.glob("*.xml")):
        for suite in ElementTree.parse(file).getroot().iter("testsuite"):
            cases = [(float(case.get("time", 0)), f"{case.get('classname')}.{case.get('name')}") for case in suite]
            start = datetime.fromisoformat(suite.get("timestamp", ""))
            yield Room(file.stem, len(cases), start, float(suite.get("time", 0)), sorted(cases, reverse=True)[:8])


def durations(report: Report) -> None:
    """Seconds of the last run: of each room, and of all from the first one's start to the last one's end."""
    found = list(rooms())
    for room in found:
        report.number(f"seconds, {room.tests:,} tests of {room.name}", room.seconds)
    quick = sum(room.seconds for room in found if room.name in ("unit", "contract"))
    report.number("seconds, unit and contract together", quick or None, UNIT_AND_CONTRACT_SECONDS)
    default = [room for room in found if not room.name.endswith("-long") and room.name not in ("compose", "kernels")]
    for command, part, bound in (("make test", default, TEST_SECONDS), ("make test-all", found, TEST_ALL_SECONDS)):
        ends = [room.start + timedelta(seconds=room.seconds) for room in part]
        span = (max(ends) - min(room.start for room in part)).total_seconds() if part else None
        report.number(f"seconds, {command}, first start to last end", span, bound)
    slowest = sorted((case for room in found for case in room.slowest), reverse=True)[:12]
    report.listing("Slowest tests", [f"{seconds:6.1f} s {name}" for seconds, name in slowest])


def main() -> int:
    """Print everything; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--trace", action="store_true", help="also run one request and list the files that it runs through"
    )
    chosen = parser.parse_args()
    report = Report()
    sizes(report)
    way(report)
    phrases(report)
    durations(report)
    if chosen.trace:
        from trace_request import trace

        traced = trace(MODEL)
        report.listing(f"{len(traced)} files that functions of a greedy request are in", traced)
    return int(report.over > 0)


if __name__ == "__main__":
    sys.exit(main())
