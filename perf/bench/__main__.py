"""Measure servers under the same loads, write one file, and print its tables.

Cases (perf/bench/cases.py) run in the given order, because the budget may end first; prefixes, formats and 7b are by
choice alone. What there was no time for is recorded with that reason.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from perf import environment, report
from perf.bench.cases import CASES
from perf.bench.measure import Bench
from perf.checkpoint import default_checkpoint, described
from perf.command import CORES, Budget, existing_checkpoint, make_command, positive
from perf.device_rates import measure_rates
from perf.perf_analyzer import BadExportError
from perf.results_file import RESULTS, Results
from perf.workload import SLOTS

BY_DEFAULT = ("article", "users", "large")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; a value out of bounds ends the program with one line."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    add = parser.add_argument
    add("--budget", type=positive, default=120.0, metavar="MINUTES", help="for all of it (default 120)")
    add(
        "--model",
        type=existing_checkpoint,
        metavar="FOLDER",
        help="a Llama in safetensors (default: SmolLM2-135M-Instruct)",
    )
    add("--only", nargs="+", choices=CASES, default=BY_DEFAULT, help="cases to measure")
    known = sorted({case.server.key for cases in CASES.values() for case in cases(None)})
    add("--without", nargs="*", choices=known, metavar="SERVER", default=[], help=f"servers to leave out: {known}")
    add("--output", type=Path, metavar="FILE", help="default: perf/results/bench.json, or bench-CASE.json by choice")
    options = parser.parse_args(arguments)
    if options.output is None:
        (case, *others) = options.only
        options.output = RESULTS / ("bench.json" if others or case in BY_DEFAULT else f"bench-{case}.json")
    return options


def main() -> None:
    """Run what the command line selects."""
    options = parse()
    budget = Budget(options.budget)
    settings = {"model": described(options.model or default_checkpoint()), "threads": CORES, "concurrency": SLOTS}
    results = Results(options.output, "bench", settings, make_command("bench"))
    budget.say(f"{environment.device()}; {settings['model']}; {CORES} threads")
    rates = measure_rates(CORES)
    results.section("rates", rates.to_json())
    budget.say(rates.describe())
    bench = Bench(results, budget, rates)
    for name in options.only:
        for server, checkpoint, loads in CASES[name](options.model):
            if server.key not in options.without:
                bench.measure(server, checkpoint(), loads)
    results.finish()
    print(f"\n{report.summary(report.read(options.output))}\n")
    print(f"written to {options.output}; make report puts it into the pages")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("bench: interrupted; what was measured is beside the output file, as .partial")
    except BadExportError as error:
        sys.exit(f"bench: {error}")
