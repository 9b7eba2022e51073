"""Fill the tables of docs/benchmarks.md and draw its plot from perf/results/*.json, or check that both are current.

A table stands between <!-- table: NAME --> and <!-- end: NAME -->; the rest of the page stays as it is.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from perf.environment import ROOT
from perf.report import plots, prefixes, tables
from perf.report.results import RESULTS, NotMeasuredError, Result, read

PAGE = ROOT / "docs" / "benchmarks.md"
PLOT = ROOT / "docs" / "benchmarks" / "lengths.svg"

TABLES: Mapping[str, tuple[str, Callable[[Result], str]]] = {
    "article": ("bench", tables.article),
    "mixed": ("bench", tables.mixed),
    "peers": ("bench", tables.peers),
    "users": ("bench", tables.by_users),
    "large": ("bench", tables.large),
    "formats": ("bench-formats", tables.formats),
    "formats-gguf": ("bench-formats-gguf", tables.formats),
    "users-avx2": ("bench-avx2", tables.by_users),
    "prefixes": ("bench-prefixes", prefixes.prefixes),
    "context": ("bench-prefixes", prefixes.context),
    "quality": ("quality", tables.quality),
    "quality-planted": ("quality-planted", tables.quality),
    "quality-formats": ("quality-formats", tables.quality),
}
"""For each table's name in the page: its results file, and the function that makes the table."""


def filled(page: str, results: Path = RESULTS) -> str:
    """Return a page with every table's content. Raises ValueError unless it has each exactly once."""
    for name, (result, make) in TABLES.items():
        try:
            content = make(read(results / f"{result}.json"))
        except NotMeasuredError as error:
            content = f"*{error}.*"
        block = f"<!-- table: {name} -->\n\n{content}\n\n<!-- end: {name} -->"
        pattern = rf"^<!-- table: {name} -->$.*?^<!-- end: {name} -->$"
        page, count = re.subn(pattern, lambda _, block=block: block, page, flags=re.MULTILINE | re.DOTALL)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"the page has {count} tables {name}, not one")
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and the plot, or check them; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.report", description=__doc__, epilog="Exit code: 1 if --check found a difference, else 0."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; name what differs")
    check = parser.parse_args(arguments).check
    # Everything is made before anything is written: an error changes no file.
    files = {PAGE: filled(PAGE.read_text()), PLOT: plots.by_lengths(read(RESULTS / "bench.json"))}
    different = {file: text for file, text in files.items() if not file.exists() or file.read_text() != text}
    for file, text in different.items():
        if check:
            print(f"{file} differs from the results: run make report", file=sys.stderr)
        else:
            file.write_text(text)
            print(f"{file} written")
    return 1 if check and different else 0


if __name__ == "__main__":
    sys.exit(main())
