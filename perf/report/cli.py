"""Make every table and plot again out of perf/results/*.json, or check that none has to be."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from perf.report.documents import Output, documents, pictures
from perf.report.fields import ResultError
from perf.report.markers import MarkerError
from perf.report.run import RESULTS, ROOT, read_all

SAME, DIFFERENT, FAILED = 0, 1, 2


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
        outputs = _outputs(files, chosen.results, chosen.plots)
        return _check(outputs) if chosen.check else _write(outputs)
    except (OSError, ResultError, MarkerError) as error:
        print(f"report: {error}", file=sys.stderr)
        return FAILED


def _outputs(files: Sequence[Path], results: Path, plots: Path) -> list[Output]:
    """Make everything before anything is written: an error leaves all files as they were."""
    runs = read_all(results)
    drawn = list(pictures(runs, plots))
    names = [output.file.stem for output in drawn if output.content is not None]
    return [*drawn, *documents(files, runs, plots, names)]


def _check(outputs: Sequence[Output]) -> int:
    different = [output for output in outputs if output.changed]
    for output in different:
        print(f"{output.file}: {', '.join(output.changed)} {_state(output)}", file=sys.stderr)
    return DIFFERENT if different else SAME


def _state(output: Output) -> str:
    if output.content is None:
        return "is there, and nothing in the results to draw it from: delete it"
    if not output.file.exists():
        return "isn't there: run python -m perf.report"
    return "isn't what the results say: run python -m perf.report"


def _write(outputs: Sequence[Output]) -> int:
    for output in outputs:
        if output.content is None:
            print(f"{output.file.name}: skipped, not measured" + (f"; {_state(output)}" if output.changed else ""))
        elif output.changed:
            output.file.parent.mkdir(parents=True, exist_ok=True)
            output.file.write_text(output.content)
            print(f"{output.file}: {', '.join(output.changed)} written")
    return SAME
