"""Fill the tables and plots of the documents from perf/results/*.json, or check them.

A block stands between <!-- table: NAME --> (or plot) and <!-- end: NAME -->; the rest of a document stays as it is.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from perf.report import plots, tables
from perf.report.results import RESULTS, ROOT, Result, ResultError, read_all
from perf.report.stops import stops
from perf.report.text import Table

SAME, DIFFERENT, FAILED = 0, 1, 2

DOCUMENTS = ("README.md", "docs/benchmarks.md", "docs/exact-int8.md", "docs/operations.md")

_MARKER = re.compile(r"^<!-- *(?P<what>table|plot|end): *(?P<name>.*?) *-->$", re.MULTILINE)

COMMANDS = {
    "bench": "make bench",
    "sweep": "make sweep",
    "quality": "make quality",
    "gpu": "make bench-gpu",
    "tune": "make tune SLO_P95_MS=<milliseconds>",
    "stops": "make stops",
}
"""The command that writes each kind of result."""

TABLES: Mapping[str, tuple[str, Callable[[Result], Table | None]]] = {
    "article": ("bench", tables.article),
    "mixed": ("bench", tables.mixed),
    "sweep": ("sweep", tables.sweep),
    "headline": ("bench", tables.headline),
    "peers-closed": ("bench", tables.peers_closed),
    "users": ("bench", tables.by_users),
    "large": ("bench", tables.large),
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
    "stops-default": ("stops", stops("default")),
    "stops-streaming": ("stops", stops("streaming")),
}
"""By block: the kind of result, and the table made of it."""

PLOTS: Mapping[str, tuple[str, Callable[[Result], str | None], str]] = {
    "latency-throughput": (
        "sweep",
        plots.latency,
        "Latency at the median and the 95th percentile over tokens per second",
    ),
    "scaling": ("sweep", plots.scaling, "Tokens per second over the requests at a time, with the device's limit"),
    "lengths": ("bench", plots.lengths, "Tokens per second at equal, uniform and geometric output lengths"),
    "peers": ("bench", plots.peers, "Tokens per second of this server and the baselines, closed loop"),
    "streaming": (
        "bench",
        plots.streaming,
        "Time to first token, inter-token latency and goodput under Poisson arrivals",
    ),
    "overhead": ("bench", plots.overhead, "Where the time of serving goes"),
    "pareto": ("tune", plots.pareto, "Tokens per second over p95 latency of the tuned settings"),
}
"""By block: the kind of result, the plot made of it, and the picture's alternative text."""


class MarkerError(ValueError):
    """A block without a beginning or an end, or an unknown one. The message names the document and the block."""


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
    add = parser.add_argument
    add("documents", nargs="*", type=Path, help=f"Markdown files ({' '.join(DOCUMENTS)})")
    add("--check", action="store_true", help="write nothing; name what differs")
    add("--results", type=Path, default=RESULTS, metavar="FOLDER", help="(perf/results)")
    add("--plots", type=Path, default=ROOT / "docs" / "benchmarks", metavar="FOLDER", help="(docs/benchmarks)")
    chosen = parser.parse_args(arguments)
    files = chosen.documents or [ROOT / name for name in DOCUMENTS]
    try:
        # Everything is made before anything is written: an error changes no file.
        results = read_all(chosen.results)
        drawn = list(_pictures(results, chosen.plots))
        links = [output.file for output in drawn if output.content is not None]
        outputs = [*drawn, *(_document(file, results, links) for file in files)]
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


def _pictures(results: Mapping[str, Result], folder: Path) -> Iterator[Output]:
    for name, (kind, draw, _) in PLOTS.items():
        file = folder / f"{name}.svg"
        content = draw(results[kind]) if kind in results else None
        current = file.read_text() if file.exists() else None
        yield Output(file, content, [] if content == current else [f"plot {name!r}"])


def _document(file: Path, results: Mapping[str, Result], drawn: Collection[Path]) -> Output:
    text, position, changed = file.read_text(), 0, []
    parts: list[str] = []
    for begin, end in blocks(file.name, text):
        content = f"\n\n{_content(file, begin['what'], begin['name'], results, drawn)}\n\n"
        if content != text[begin.end() : end.start()]:
            changed.append(f"{begin['what']} {begin['name']!r}")
        parts += [text[position : begin.end()], content]
        position = end.start()
    return Output(file, "".join([*parts, text[position:]]), changed)


def _content(file: Path, what: str, name: str, results: Mapping[str, Result], drawn: Collection[Path]) -> str:
    """Return what belongs into a block. drawn: the plots' files."""
    known = TABLES if what == "table" else PLOTS
    if name not in known:
        raise MarkerError(f"{file.name}: there is no {what} {name!r}; there are {', '.join(sorted(known))}")
    kind = known[name][0]
    if what == "plot":
        links = (os.path.relpath(plot.resolve(), file.resolve().parent) for plot in drawn if plot.stem == name)
        content = next((f"![{PLOTS[name][2]}]({Path(link).as_posix()})" for link in links), None)
    else:
        table = TABLES[name][1](results[kind]) if kind in results else None
        content = None if table is None else table.markdown()
    return f"*Not measured yet: `{COMMANDS[kind]}` does.*" if content is None else content


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
