"""Where the time of serving goes: `python -m perf.overhead CHECKPOINT --quantization int8`.

One load runs through Triton, through the bare engine and through the engine's passes alone: each has less around the
same computation than the one before, so the ratios are the cost of each layer. The ceiling is the passes alone. Prints
ratios, parts and a full step beside its limit; --output writes one JSON file and a plot.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pydantic import TypeAdapter

from perf import environment
from perf.overhead.account import REPETITIONS, SLOTS, account
from perf.report.plots import icicle
from perf.report.results import Part
from perf.report.tables import parts_table
from perf.report.text import terminal
from perf.roofline.device import measure
from perf.workload import MEAN_OUTPUT, MIXES


def main() -> None:
    """Parse the options, measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m perf.overhead", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--mix", choices=MIXES, default="uniform")
    parser.add_argument("--requests", type=int, default=128, dest="count")
    parser.add_argument("--concurrency", type=int, default=2 * SLOTS)
    parser.add_argument("--slots", type=int, default=SLOTS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--mean", type=int, default=MEAN_OUTPUT, help="output tokens of a request")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--output", type=Path, help="JSON to write; the picture goes beside it")
    options = vars(parser.parse_args())
    output: Path | None = options.pop("output")
    found = account(**options, rates=measure(options["threads"]))
    parts = TypeAdapter(list[Part]).validate_python(found["parts"])
    print(terminal(parts_table(parts, [])))
    for name, value in (found["ratios"] | found["steps"]).items():
        print(f"{name}: {value:,.4g}")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps({"machine": environment.describe(), **found}, indent=1) + "\n")
        drawn = output.with_suffix(".svg")
        drawn.write_text(icicle(parts, "Where the time goes"))
        print(f"written to {output} and {drawn}")


if __name__ == "__main__":
    main()
