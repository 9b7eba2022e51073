"""The matrix of stops: every stop, in every situation, under both configs (`make stops`).

Each cell is a server of its own. What became of every request that it had accepted goes into perf/results/stops.json,
and `make report` writes the table of docs/operations.md from it. A cell that fails, or for which there is no time, is
recorded with its reason, and the others follow.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compose.commands import CommandFailedError
from compose.container import docker_stop
from compose.engine import docker_engine
from server.stops.cells import CONFIGS, run
from server.stops.outcomes import Outcome
from server.stops.scene import CellError
from server.stops.situations import SITUATIONS
from server.stops.stops import STOPS, Stop
from triton_local.errors import LauncherError

from perf.command import given, make_command, positive
from perf.course import Budget
from perf.results_file import Results

HELD, FAILED, INTERRUPTED = 0, 1, 130
LAST_START_S = 60.0
"""With less time left no cell begins."""
DOCKER = "docker"
_CELL_S = 300.0
"""Bound of a cell: start, situation, stop, end."""

Measurement = Mapping[str, Any]


def main() -> int:
    """Run the cells that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(prog="make stops", description=__doc__, epilog="Exit code: 1 if a cell failed.")
    add = parser.add_argument
    add("--budget", type=positive, default=25.0, metavar="MINUTES", help="for all of it (default 25)")
    add("--at-once", type=int, default=2, metavar="N", help="cells at the same time (default 2)")
    add("--stops", nargs="*", choices=[*STOPS, DOCKER], default=[*STOPS, DOCKER], metavar="STOP", help="(all)")
    add("--situations", nargs="*", choices=SITUATIONS, default=[*SITUATIONS], metavar="SITUATION", help="(all)")
    add("--configs", nargs="*", choices=CONFIGS, default=[*CONFIGS], metavar="CONFIG", help="(both)")
    add("--resume", action="store_true", help="run only what the output file lacks, or what failed or wasn't run")
    add("--output", type=Path, default=Path("perf/results/stops.json"), metavar="FILE")
    options = parser.parse_args()
    try:
        results = Results(options.output, "stops", {"model": "models/pydoc-llama"}, options.resume)
    except ValueError as error:
        print(f"stops: {error}", file=sys.stderr)
        return FAILED
    variables = {"BUDGET": f"{options.budget:g}"} if options.budget != parser.get_default("budget") else {}
    words = given(parser, options, ("at_once", "stops", "situations", "configs"))
    before, this = results.get("command"), make_command("stops", variables, words)
    results.section("command", this if before in (None, this) else f"{before}; {this}")
    budget = Budget(60 * options.budget)
    with ExitStack() as engine:
        stops: dict[str, Stop[Any]] = dict(STOPS)
        if DOCKER in options.stops:
            try:
                stops[DOCKER] = engine.enter_context(docker_stop(engine.enter_context(docker_engine())))
            except (AssertionError, CommandFailedError, OSError) as error:
                print(f"stops: no containers: {' '.join(str(error).split())[:200]}", file=sys.stderr)
        try:
            asyncio.run(_run(options, stops, results, budget))
        except (KeyboardInterrupt, asyncio.CancelledError):
            print("stops: interrupted; --resume goes on", file=sys.stderr)
            return INTERRUPTED
    results.finish()
    return _verdict(results)


async def _run(options: argparse.Namespace, stops: Mapping[str, Stop[Any]], results: Results, budget: Budget) -> None:
    task = asyncio.current_task()
    assert task is not None
    # As Ctrl-C: every server is ended before the program is.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    free = asyncio.Semaphore(options.at_once)

    async def cell(config: str, situation: str, stop: str) -> None:
        async with free:
            if stop not in stops:
                found: Measurement = {"not_run": "no Docker engine, or no image"}
            elif budget.left < LAST_START_S:
                found = {"not_run": f"the {options.budget:.0f} minutes were over"}
            else:
                found = await _measured(stops[stop], situation, config)
        title = f"{stop} while {situation}, {config}"
        results.add(f"{config}/{situation}/{stop}", {"title": title, "situation": situation, "stop": stop, **found})
        budget.say(f"{title}: {found}")

    keys = [
        (config, situation, stop)
        for situation in options.situations
        for config in options.configs
        for stop in options.stops
    ]
    await asyncio.gather(*(cell(*key) for key in keys if not _held(results.measurements.get("/".join(key)))))


async def _measured(stop: Stop[Any], situation: str, config: str) -> Measurement:
    """Return the cell as JSON, or as one that failed: the others follow."""
    try:
        ran = asdict(await asyncio.wait_for(run(stop, SITUATIONS[situation], config), _CELL_S))
    except (CellError, LauncherError, CommandFailedError, OSError, TimeoutError) as error:
        print(f"stops: {error}", file=sys.stderr)
        # Without paths of this machine, which a result doesn't have.
        reason = f"{type(error).__name__}: {re.sub('/[^ ]*', '...', ' '.join(str(error).split()))[:300]}"
        none = {"accepted": 0, "running": 0, "waiting": 0, "outcomes": {}, "held": False, "seconds": 0.0}
        return {**none, "failures": [reason]}
    if log := ran.pop("log"):
        print(f"stops: the log ends with: {log}", file=sys.stderr)
    return ran


def _held(found: Measurement | None) -> bool:
    return found is not None and "not_run" not in found and not found["failures"]


def _verdict(results: Results) -> int:
    cells = results.measurements.values()
    outcomes = Counter[str]()
    for cell in cells:
        outcomes.update(cell.get("outcomes", {}))
    failed = sum(not _held(cell) for cell in cells)
    counted = ", ".join(f"{outcomes[outcome]} {outcome}" for outcome in Outcome)
    print(f"{len(cells)} cells, {failed} failed or not run; {outcomes.total()} requests: {counted}")
    return FAILED if failed else HELD


if __name__ == "__main__":
    sys.exit(main())
