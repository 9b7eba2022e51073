"""Run the three measurements, write their JSON and print their tables: `make bench-inflight`."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path

import torch

from perf import environment
from perf.inflight import prefill_bound, schedulers, step_cost


def main() -> None:
    """Parse the options, measure, write and print."""
    parser = argparse.ArgumentParser(prog="make bench-inflight", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("perf/results/inflight.json"))
    parser.add_argument("--requests", type=int, default=96, help="of each mix of lengths")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=2, choices=range(1, 4))
    options = parser.parse_args()
    # As in the measured servers: on the small model a second thread costs more than it gains.
    torch.set_num_threads(1)
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": environment.describe(),
        "schedulers": schedulers.compare(options.requests, options.concurrency, options.repetitions),
        "step_cost": step_cost.measure(["none", "int8"], 40 * options.repetitions),
        "prefill_bound": prefill_bound.measure([32, 64, 128, 256, 512], 8 * options.repetitions),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    for section in ("schedulers", "step_cost", "prefill_bound"):
        _print_table(section, result[section])
    print(f"written to {options.output}")


def _print_table(title: str, rows: object) -> None:
    assert isinstance(rows, list)
    columns = [name for name in rows[0] if name != "seconds"]
    print(f"\n{title}\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(str(row[name]) for name in columns)} |")


main()
