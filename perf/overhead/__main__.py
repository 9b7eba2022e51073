"""Where the time of serving goes: `python -m perf.overhead CHECKPOINT --quantization int8`.

One load runs through Triton, through the bare engine and through the engine's passes alone: each has less around the
same computation than the one before, so the ratios of their throughputs are the cost of each layer. The ceiling is the
passes alone. Prints runs, parts and a full step beside its limit; `make bench` measures the same for its result.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from perf.command import CORES, count
from perf.overhead.account import account
from perf.report.results import Part
from perf.report.tables import parts_table
from perf.report.text import terminal
from perf.roofline.device import measure


def main() -> None:
    """Parse the options, measure and print."""
    parser = argparse.ArgumentParser(prog="python -m perf.overhead", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--slots", type=count, default=32)
    parser.add_argument("--requests", type=count, default=96, dest="count")
    parser.add_argument("--threads", type=count, default=CORES)
    options = vars(parser.parse_args())
    found = account(**options, rates=measure(options["threads"]))
    print(terminal(parts_table([Part(**part) for part in found["parts"]], [])))
    print("\n".join(f"{name}: {run['tokens_per_second']:,} tokens/s" for name, run in found["runs"].items()))
    print(found["steps"])


if __name__ == "__main__":
    main()
