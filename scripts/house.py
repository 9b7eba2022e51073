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
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path
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

over: list[str] = []
"""Numbers that are over their bound."""


def number(what: str, value: float | None, bound: float | None = None) -> None:
    """Print one line. value: None if it can't be known here; bound: None if there is none."""
    bad = value is not None and bound is not None and value > bound
    if bad:
        over.append(what)
    shown = "-" if value is None else f"{value:,.0f}"
    limit = "" if bound is None else f"{bound:8,.0f}  {'OVER' if bad else '-' if value is None else 'ok'}"
    print(f"{what:52} {shown:>8} {limit}".rstrip())


def listing(title: str, rows: Iterable[str]) -> None:
    """Print details."""
    print(f"\n{title}", *(f"  {row}" for row in rows), sep="\n")


def tracked(*patterns: str) -> list[str]:
    """Return the tracked files that match these patterns of git."""
    done = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).exists()]


def lines(files: Iterable[str]) -> int:
    """Return the lines of all files together."""
    return sum((ROOT / name).read_text().count("\n") for name in files)


def functions(files: Iterable[str]) -> list[tuple[int, str, str]]:
    """Return every function as its lines, decorators included, file and name; a nested one is a part of its outer."""
    found = []
    for name in files:
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                found.append(((node.end_lineno or first) - first + 1, name, node.name))
    return sorted(found, reverse=True)


def sizes() -> None:
    """Lines of folders, files and functions."""
    python = tracked("*.py")
    for folder, bound in FOLDERS.items():
        number(f"Python lines, {folder}", lines(tracked(f"{folder}/*.py")), bound)
    for room in sorted({name.split("/")[1] for name in tracked("tests/*/*.py")}):
        number(f"  tests/{room}", lines(tracked(f"tests/{room}/*.py")))
    number("Python lines, all", lines(python))
    number("lines, README.md", lines(["README.md"]), README_LINES)
    number("lines, model.py", lines(tracked("model_repository/llama/1/model.py")), MODEL_LINES)
    chat = [name for name in tracked("client/*.py") if re.search(r"chat|conversation|turns", name)]
    number("lines, the client's chat", lines(chat), CHAT_LINES)
    number("Python files", len(python))

    product = functions(name for name in python if not name.startswith("tests/"))
    long = [one for one in functions(python) if one[0] > FUNCTION_LINES]
    number("median function, without tests", statistics.median(count for count, *_ in product))
    # The GPU's kernels have no bound.
    number("functions over 50 lines, without kernels", sum("/kernels/" not in file for _, file, _ in long), 0)
    shown = sorted({*product[:8], *long}, reverse=True)
    listing("Longest functions", [f"{count:4} {file} {name}" for count, file, name in shown])
    longest = sorted(((lines([name]), name) for name in python), reverse=True)
    listing("Longest files", [f"{count:4} {name}" for count, name in longest[:12]])


def way() -> None:
    """Files on a greedy request's way, as the numbered list of docs/architecture.md has them, from the root or 1/."""
    named = re.findall(r"^\d+\. \[?`([\w/.]+\.py)`", WAY.read_text(), re.MULTILINE)
    print()
    number("files on a greedy request's way, as listed", len(named) or None, WAY_FILES)
    number("  of them missing", sum(not (MODEL / name).exists() and not (ROOT / name).exists() for name in named), 0)


def durations() -> None:
    """Seconds of the runs that scripts/run_tests.py has recorded: of each room, and from the first start to the end."""
    spans: dict[str, tuple[datetime, datetime]] = {}
    cases: list[tuple[float, str]] = []
    for file in sorted(DURATIONS.glob("*.xml")):
        for suite in ElementTree.parse(file).getroot().iter("testsuite"):
            start, seconds = datetime.fromisoformat(suite.get("timestamp", "")), float(suite.get("time", 0))
            spans[file.stem] = start, start + timedelta(seconds=seconds)
            number(f"seconds, {len(suite):,} tests of {file.stem}", seconds)
            cases += [(float(case.get("time", 0)), f"{case.get('classname')}.{case.get('name')}") for case in suite]
    quick = sum((spans[room][1] - spans[room][0]).total_seconds() for room in ("unit", "contract") if room in spans)
    number("seconds, unit and contract together", quick or None, UNIT_AND_CONTRACT_SECONDS)
    default = [room for room in spans if not room.endswith("-long") and room not in ("compose", "kernels")]
    for command, part, bound in (("make test", default, TEST_SECONDS), ("make test-all", [*spans], TEST_ALL_SECONDS)):
        starts, ends = [spans[room][0] for room in part], [spans[room][1] for room in part]
        span = (max(ends) - min(starts)).total_seconds() if part else None
        number(f"seconds, {command}, first start to last end", span, bound)
    listing("Slowest tests", [f"{seconds:6.1f} s {name}" for seconds, name in sorted(cases, reverse=True)[:12]])


def main() -> int:
    """Print everything; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="store_true", help="also list the files that one request runs through")
    chosen = parser.parse_args()
    sizes()
    way()
    number("phrases of scripts/words.py", sum(1 for _ in words.hits()), 0)
    durations()
    if chosen.trace:
        from trace_request import trace

        traced = trace(MODEL)
        listing(f"{len(traced)} files that functions of a greedy request are in", traced)
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
