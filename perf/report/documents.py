"""Fill the tables and plots of README.md and docs/benchmarks.md from perf/results/*.json, or check them.

A block stands between <!-- table: NAME --> (or plot) and <!-- end: NAME -->; the rest of a document stays as it is.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perf.report import tables
from perf.report.results import RESULTS, ROOT, Result, ResultError, read_all
from perf.report.text import Table

SAME, DIFFERENT, FAILED = 0, 1, 2

_MARKER = re.compile(r"^<!-- *(?P<what>table|plot|end): *(?P<name>.*?) *-->$", re.MULTILINE)

COMMANDS = {
    "bench": "make bench",
    "sweep": "make sweep",
    "quality": "make quality",
    "gpu": "make bench-gpu",
    "tune": "make tune SLO_P95_MS=<milliseconds>",
}
"""The command that writes each kind of result."""

TABLES: Mapping[str, tuple[str, Callable[[Result], Table | None]]] = {
    "article": ("bench", tables.article),
    "mixed": ("bench", tables.mixed),
    "sweep": ("sweep", tables.sweep),
    "peers-closed": ("bench", tables.peers_closed),
    "peers-poisson": ("bench", tables.peers_poisson),
    "overhead": ("bench", tables.overhead),
    "where": ("bench", tables.where),
    "quality": ("quality", tables.quality),
    "gpu-verdict": ("gpu", tables.gpu_verdict),
    "gpu-decoding": ("gpu", tables.gpu_decoding),
    "gpu-article": ("gpu", tables.article),
    "gpu-mixed": ("gpu", tables.mixed),
    "gpu-products": ("gpu", tables.gpu_products),
    "tune": ("tune", tables.tune),
}
"""By block: the kind of result, and the table made of it."""

PLOTS = {
    "latency-throughput": ("sweep", "Latency at the median and the 95th percentile over tokens per second"),
    "scaling": ("sweep", "Tokens per second over the requests at a time, with the device's limit"),
    "lengths": ("bench", "Tokens per second at equal, uniform and geometric output lengths"),
    "peers": ("bench", "Tokens per second of this server and the baselines, closed loop"),
    "streaming": ("bench", "Time to first token, inter-token latency and goodput under Poisson arrivals"),
    "overhead": ("bench", "Where the time of serving goes"),
    "pareto": ("tune", "Tokens per second over p95 latency of the tuned settings"),
}
"""By block: the kind of result, and the picture's alternative text."""


class MarkerError(ValueError):
    """A block without an end, or an unknown one. The message names the document, the block and the line."""


@dataclass(frozen=True)
class Place:
    """A block of a document: table or plot, its name, and what is between its markers as [start, stop)."""

    kind: str
    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Output:
    """A file's due content; None if nothing was measured for it. changed: the blocks that differ from the file."""

    file: Path
    content: str | None
    changed: Sequence[str]

    @property
    def difference(self) -> str:
        """How the file differs, in words."""
        if self.content is None:
            return "exists although its results don't: delete it"
        state = "differs from the results" if self.file.exists() else "does not exist"
        return f"{state}: run python -m perf.report"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check; return the exit code. What can't be read is one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.report",
        description=__doc__,
        epilog="Exit code: 0, 1 if --check found a difference, 2 if something can't be read.",
    )
    parser.add_argument("documents", nargs="*", type=Path, help="Markdown files (README.md docs/benchmarks.md)")
    parser.add_argument("--check", action="store_true", help="write nothing; name what differs")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="(perf/results)")
    parser.add_argument(
        "--plots", type=Path, default=ROOT / "docs" / "benchmarks", metavar="FOLDER", help="(docs/benchmarks)"
    )
    chosen = parser.parse_args(arguments)
    files = chosen.documents or [ROOT / "README.md", ROOT / "docs" / "benchmarks.md"]
    try:
        # Everything is made before anything is written: an error changes no file.
        results = read_all(chosen.results)
        drawn = list(pictures(results, chosen.plots))
        names = [output.file.stem for output in drawn if output.content is not None]
        outputs = [*drawn, *(_document(file, results, chosen.plots, names) for file in files)]
        return _check(outputs) if chosen.check else _write(outputs)
    except (OSError, ResultError, MarkerError) as error:
        print(f"report: {error}", file=sys.stderr)
        return FAILED


def _check(outputs: Sequence[Output]) -> int:
    different = [output for output in outputs if output.changed]
    for output in different:
        print(f"{output.file}: {', '.join(output.changed)} {output.difference}", file=sys.stderr)
    return DIFFERENT if different else SAME


def _write(outputs: Sequence[Output]) -> int:
    for output in outputs:
        if output.content is None:
            difference = f"; {output.difference}" if output.changed else ""
            print(f"{output.file.name}: skipped, not measured{difference}")
        elif output.changed:
            output.file.parent.mkdir(parents=True, exist_ok=True)
            output.file.write_text(output.content)
            print(f"{output.file}: {', '.join(output.changed)} written")
    return SAME


def pictures(results: Mapping[str, Result], folder: Path) -> Iterator[Output]:
    """Yield every plot's file."""
    # Imported here: tables don't need matplotlib, which takes a second.
    from perf.report import plots

    draw = {
        "latency-throughput": plots.latency,
        "scaling": plots.scaling,
        "lengths": plots.lengths,
        "peers": plots.peers,
        "streaming": plots.streaming,
        "overhead": plots.overhead,
        "pareto": plots.pareto,
    }
    for name, (kind, _) in PLOTS.items():
        file = folder / f"{name}.svg"
        content = draw[name](results[kind]) if kind in results else None
        current = file.read_text() if file.exists() else None
        yield Output(file, content, [] if content == current else [f"plot {name!r}"])


def _document(file: Path, results: Mapping[str, Result], plots: Path, drawn: Collection[str]) -> Output:
    before = after = file.read_text()
    changed = []
    # From the end, so that earlier places keep their offsets.
    for place in reversed(list(places(file.name, before))):
        content = _content(file, place, results, plots, drawn)
        one = f"{after[: place.start]}\n\n{content}\n\n{after[place.stop :]}"
        if one != after:
            changed.append(f"{place.kind} {place.name!r}")
        after = one
    return Output(file, after, changed[::-1])


def _content(file: Path, place: Place, results: Mapping[str, Result], plots: Path, drawn: Collection[str]) -> str:
    known = TABLES if place.kind == "table" else PLOTS
    if place.name not in known:
        names = ", ".join(sorted(known))
        raise MarkerError(f"{file.name}: there is no {place.kind} {place.name!r}; there are {names}")
    content = None
    if place.kind == "table":
        kind, make = TABLES[place.name]
        made = make(results[kind]) if kind in results else None
        content = None if made is None else made.markdown()
    else:
        kind, title = PLOTS[place.name]
        link = Path(os.path.relpath(plots.resolve(), file.resolve().parent), f"{place.name}.svg")
        content = f"![{title}]({link.as_posix()})" if place.name in drawn else None
    return f"*Not measured yet: `{COMMANDS[kind]}` does.*" if content is None else content


def places(document: str, text: str) -> Iterator[Place]:
    """Yield the document's blocks in order. Raises MarkerError for a block without an end or a beginning."""
    opened: re.Match[str] | None = None
    for marker in _MARKER.finditer(text):
        line = f"{document}, line {text.count(chr(10), 0, marker.start()) + 1}"
        if marker["what"] != "end":
            if opened is not None:
                raise MarkerError(f"{line}: {_named(marker)} begins before the end of {_named(opened)}")
            opened = marker
        elif opened is None:
            raise MarkerError(f"{line}: the end of {marker['name']!r} has no beginning")
        elif opened["name"] != marker["name"]:
            raise MarkerError(f"{line}: found the end of {marker['name']!r}, expected that of {_named(opened)}")
        else:
            yield Place(opened["what"], opened["name"], opened.end(), marker.start())
            opened = None
    if opened is not None:
        raise MarkerError(f"{document}: {_named(opened)} has no <!-- end: {opened['name']} -->")


def _named(marker: re.Match[str]) -> str:
    return f"{marker['what']} {marker['name']!r}"
