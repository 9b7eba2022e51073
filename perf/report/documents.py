"""Everything that is made out of results: documents with their blocks filled, and the plots' files.

Nothing is written here; `Output` is what should be in a file, to be written or to be compared with what is.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from perf.report.blocks import PLOTS, TABLES, PlotBlock, TableBlock
from perf.report.markers import MarkerError, Place, filled, places
from perf.report.run import Run

Block = TypeVar("Block", TableBlock, PlotBlock)


@dataclass(frozen=True)
class Output:
    """What a file should contain.

    content: None if nothing was measured to make it of. changed: the blocks that the file has in another state; a plot
    has one, itself.
    """

    file: Path
    content: str | None
    changed: Sequence[str]


def documents(files: Sequence[Path], runs: Mapping[str, Run], plots: Path, drawn: Collection[str]) -> Iterator[Output]:
    """Yield every document with its blocks filled. plots: the folder with the pictures of these names, `drawn`.

    Raises MarkerError for a block that isn't ended or isn't known, ResultError for results that can't be read.
    """
    for file in files:
        before = after = file.read_text()
        changed = []
        # From the end, so that the places before stay where they are.
        for place in reversed(places(file.name, before)):
            one = filled(after, place, _content(file, place, runs, plots, drawn))
            if one != after:
                changed.append(f"{place.kind} {place.name!r}")
            after = one
        yield Output(file, after, changed[::-1])


def pictures(runs: Mapping[str, Run], plots: Path) -> Iterator[Output]:
    """Yield every plot. Raises ResultError for results that can't be read."""
    for name, block in PLOTS.items():
        file = plots / f"{name}.svg"
        content = block.draw(runs[block.kind]) if block.kind in runs else None
        there = file.read_text() if file.exists() else None
        yield Output(file, content, [] if content == there else [f"plot {name!r}"])


def _content(file: Path, place: Place, runs: Mapping[str, Run], plots: Path, drawn: Collection[str]) -> str:
    if place.kind == "table":
        return _table(_known(file, place, TABLES), runs)
    block = _known(file, place, PLOTS)
    if place.name not in drawn:
        return _not_yet(block.command)
    link = Path(os.path.relpath(plots.resolve(), file.resolve().parent), f"{place.name}.svg")
    return f"![{block.title}]({link.as_posix()})"


def _table(block: TableBlock, runs: Mapping[str, Run]) -> str:
    table = block.make(runs[block.kind]) if block.kind in runs else None
    return _not_yet(block.command) if table is None else table.markdown()


def _not_yet(command: str) -> str:
    return f"*Not measured yet: `{command}` does.*"


def _known(file: Path, place: Place, blocks: Mapping[str, Block]) -> Block:
    if place.name not in blocks:
        raise MarkerError(
            f"{file.name}: there is no {place.kind} {place.name!r}; there are {', '.join(sorted(blocks))}"
        )
    return blocks[place.name]
