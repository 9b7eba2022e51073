"""Print what this device can do, and what that allows for a checkpoint: `python -m perf.roofline CHECKPOINT`."""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import LlamaConfig

from perf import workload
from perf.roofline import device, physics
from perf.roofline.rates import WIDTHS


def main() -> None:
    """Parse the options, measure, compute and print."""
    parser = argparse.ArgumentParser(prog="python -m perf.roofline", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--mix", choices=workload.MIXES, default="equal")
    options = parser.parse_args()
    config = LlamaConfig.from_pretrained(options.checkpoint)
    rates = device.measure(options.threads)
    print(rates.describe())
    lengths = workload.lengths(options.mix, options.requests)
    print("| weights | rows | bytes/step | operations/step | step at best | tokens/s at best | bound by |")
    print("|---|---|---|---|---|---|---|")
    for weights in WIDTHS:
        for rows in options.rows:
            limit = physics.best(config, weights, rates, rows, lengths, workload.PROMPT_TOKENS)
            print(
                f"| {weights} | {rows} | {limit.bytes_per_step:,} | {limit.operations_per_step:,} | "
                f"{1e3 * limit.step_seconds:.2f} ms | {limit.tokens_per_second:,.0f} | {limit.bound_by} |"
            )


if __name__ == "__main__":
    main()
