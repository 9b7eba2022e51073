"""Measure servers under the same loads, write a file for each case, and print its table.

Each case (perf/bench/cases.py) has a result file, perf/results/bench-CASE.json. A run measures what is selected and
keeps what other runs of the same settings measured, so that a table can be made in parts. What there was no time for is
recorded with that reason.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import llama_engine.libraries  # noqa: F401 - before anything that imports bitsandbytes

from perf import environment, report
from perf.bench.cases import CASES
from perf.bench.lora import USERS, measure_steps
from perf.bench.measure import Bench
from perf.checkpoint import described
from perf.command import CORES, Budget, count, existing_checkpoint, make_command, positive
from perf.device_rates import measure_rates
from perf.load.workload import SLOTS
from perf.results_file import RESULTS, Results, read
from perf.roofline import DeviceRates
from perf.table import markdown

BY_DEFAULT = ("smollm2", "1b", "article")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    add = parser.add_argument
    add("--budget", type=positive, default=120.0, metavar="MINUTES", help="for all of it (default 120)")
    add("--model", type=existing_checkpoint, help="a Llama in safetensors (default: SmolLM2-135M-Instruct)")
    add("--only", nargs="+", choices=CASES, default=BY_DEFAULT, help="cases to measure")
    add("--servers", nargs="+", metavar="KEY", default=[""], help="whose keys begin so, such as vllm; steps: of lora")
    add("--users", nargs="+", type=count, metavar="N", help="loads of so many users only")
    add("--loads", nargs="+", metavar="KEY", default=[""], help="whose keys begin so: drafts/edit, lora/large")
    add("--seconds", type=positive, help="of a load of smollm2, 1b, 7b, drafts or lora, after its warm-up")
    add("--folder", type=Path, default=RESULTS, help="of the result files (default perf/results)")
    return parser.parse_args(arguments)


def main() -> None:
    """Run what the command line selects."""
    options = parse()
    os.environ["TRITON_LLAMA_OPENAI_LOG_REQUESTS"] = "none"
    # Otherwise the process of each load imports PyTorch.
    multiprocessing.set_forkserver_preload(["perf.bench.cases"])
    budget = Budget(options.budget)
    rates = measure_rates(CORES)
    budget.say(f"{environment.device()}, {CORES} threads; {rates.describe()}")
    for name in options.only:
        measure_case(name, options, budget, rates)


def measure_case(name: str, options: argparse.Namespace, budget: Budget, rates: DeviceRates) -> None:
    """Run the selected servers of a case, and write its file; also when it is interrupted."""
    every, selection = CASES[name](options.model), tuple(options.servers)
    cases = [case for case in every if case.server.key.startswith(selection)]
    steps = name == "lora" and "steps".startswith(selection)
    if not (cases or steps):
        return
    settings = {"model": described(every[0].checkpoint()), "threads": CORES, "concurrency": SLOTS}
    file = options.folder / f"bench-{name}.json"
    results = Results(file, "bench", settings, make_command("bench"), merge=True)
    results.section("rates", rates.to_json())
    bench = Bench(results, budget, rates)
    try:
        if steps:
            measure_steps(results, options.users or USERS)
        for server, checkpoint, loads in cases:
            selected = [
                load._replace(seconds=load.seconds and (options.seconds or load.seconds))
                for load in loads
                if load.users in (options.users or [load.users]) and load.key.startswith(tuple(options.loads))
            ]
            if selected:
                bench.measure(server, checkpoint(), selected)
    finally:
        results.finish()
    print(f"\n{markdown(read(file), report.TABLES[name][1])}\n")
    print(f"written to {file}; make report puts it into the pages")
    if bench.different:
        sys.exit(f"bench: answers differ from those without drafts or adapters: {', '.join(bench.different)}")


if __name__ == "__main__":
    # Like Ctrl-C: the servers end, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("bench: interrupted; what was measured is in the result file")
