"""Fill the tables and plots of the documents from perf/results/*.json, or check them.

A block stands between <!-- table: NAME --> (or plot) and <!-- end: NAME -->; the rest of a document stays as it is.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from perf.report import plots, tables
from perf.report.results import RESULTS, ROOT, NotMeasuredError, Result, ResultError, read_all
from perf.report.text import Table

SAME, DIFFERENT, FAILED = 0, 1, 2

DOCUMENTS = [ROOT / "docs" / "benchmarks.md"]
DRAWN = ROOT / "docs" / "benchmarks"
"""The plots' folder."""

_MARKER = re.compile(r"^<!-- *(?P<what>table|plot|end): *(?P<name>.*?) *-->$", re.MULTILINE)

COMMANDS = {
    "bench": "make bench",
    "bench-avx2": "make bench BENCH='--output perf/results/bench-avx2.json'",
    "quality": "make quality",
}
"""The command that writes each result of perf/results."""

TABLES: Mapping[str, tuple[str, Callable[[Result], Table]]] = {
    "article": ("bench", tables.article),
    "mixed": ("bench", tables.mixed),
    "peers": ("bench", tables.peers),
    "users": ("bench", tables.by_users),
    "large": ("bench", tables.large),
    "article-avx2": ("bench-avx2", tables.article),
    "users-avx2": ("bench-avx2", tables.by_users),
    "quality": ("quality", tables.quality),
}
"""By block: the result, and the table made of it."""

PLOTS: Mapping[str, tuple[str, Callable[[Result], str], str]] = {
    "lengths": ("bench", plots.by_lengths, "Tokens per second at equal, uniform and geometric output lengths"),
}
"""By block: the result, the plot made of it, and the picture's alternative text."""


class MarkerError(ValueError):
    """A block without a beginning or an end, or an unknown one. The message names the document and the block."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check; return the exit code. What can't be read is one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.report",
        description=__doc__,
        epilog="Exit code: 0, 1 if --check found a difference, 2 if something can't be read.",
    )
    parser.add_argument("--check", action="store_true", help="write nothing; name what differs")
    return report(DOCUMENTS, RESULTS, DRAWN, parser.parse_args(arguments).check)


def report(documents: Sequence[Path], results_folder: Path, plots_folder: Path, check: bool) -> int:
    """Make every plot and fill every document, or with `check` name what differs; return the exit code."""
    try:
        # Everything is made before anything is written: an error changes no file.
        results = read_all(results_folder)
        drawn = {name: _made(draw, results.get(result)) for name, (result, draw, _) in PLOTS.items()}
        due = {plots_folder / f"{name}.svg": svg for name, svg in drawn.items() if svg is not None}
        due |= {document: _filled(document, results, [*due]) for document in documents}
    except (OSError, ResultError, MarkerError) as error:
        print(f"report: {error}", file=sys.stderr)
        return FAILED
    different = {file: text for file, text in due.items() if not file.exists() or file.read_text() != text}
    for file, text in different.items():
        if check:
            print(f"{file} differs from the results: run python -m perf.report", file=sys.stderr)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            print(f"{file} written")
    return DIFFERENT if check and different else SAME


def _made(make: Callable[[Result], str | Table], result: Result | None) -> str | None:
    """Return a plot, or a table's Markdown; None if it was not measured. Raises ResultError for an incomplete one."""
    if result is None:
        return None
    try:
        found = make(result)
    except NotMeasuredError:
        return None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ResultError(f"{result.file} lacks a field or has one of another form: {error!r}") from error
    return found.markdown() if isinstance(found, Table) else found


def _filled(document: Path, results: Mapping[str, Result], drawn: Collection[Path]) -> str:
    """Return the document with every block's content. drawn: the plots' files."""
    text, position = document.read_text(), 0
    parts: list[str] = []
    for begin, end in blocks(document.name, text):
        content = _content(document, begin["what"], begin["name"], results, drawn)
        parts += [text[position : begin.end()], f"\n\n{content}\n\n"]
        position = end.start()
    return "".join([*parts, text[position:]])


def _content(
    document: Path, what: str, name: str, results: Mapping[str, Result], drawn: Collection[Path]
) -> str | None:
    known = TABLES if what == "table" else PLOTS
    if name not in known:
        raise MarkerError(f"{document.name}: there is no {what} {name!r}; there are {', '.join(sorted(known))}")
    result, make = known[name][:2]
    if what == "table":
        content = _made(make, results.get(result))
    else:
        links = (os.path.relpath(plot.resolve(), document.resolve().parent) for plot in drawn if plot.stem == name)
        content = next((f"![{PLOTS[name][2]}]({Path(link).as_posix()})" for link in links), None)
    return f"*Not measured yet: `{COMMANDS[result]}` does.*" if content is None else content


def blocks(document: str, text: str) -> Iterator[tuple[re.Match[str], re.Match[str]]]:
    """Yield the markers of each block, its beginning and its end. Raises MarkerError where they don't alternate."""
    markers = list(_MARKER.finditer(text))
    for begin, end in zip_longest(markers[::2], markers[1::2]):
        if begin["what"] == "end" or end is None or (end["what"], end["name"]) != ("end", begin["name"]):
            line = text.count("\n", 0, begin.start()) + 1
            found = "the end of the document" if end is None else end[0]
            raise MarkerError(f"{document}, line {line}: found {begin[0]} and then {found}, not a block and its end")
        yield begin, end


if __name__ == "__main__":
    sys.exit(main())
