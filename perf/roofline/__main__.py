"""Print this device's rates and the roofline of a checkpoint: `python -m perf.roofline CHECKPOINT`."""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import LlamaConfig

from perf import workload
from perf.roofline.device import measure
from perf.roofline.physics import roofline
from perf.roofline.rates import WIDTHS

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m perf.roofline", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--mix", choices=workload.MIXES, default="equal")
    options = parser.parse_args()
    config = LlamaConfig.from_pretrained(options.checkpoint)
    rates = measure(options.threads)
    print(rates.describe())
    lengths = workload.lengths(options.mix, options.requests)
    print("| weights | rows | bytes/step | operations/step | step at best | tokens/s at best | bound by |")
    print("|---|---|---|---|---|---|---|")
    for weights in WIDTHS:
        for rows in options.rows:
            bound = roofline(config, weights, rates, rows, lengths, workload.PROMPT_TOKENS)
            print(
                f"| {weights} | {rows} | {bound.bytes_per_step:,} | {bound.operations_per_step:,} | "
                f"{1e3 * bound.step_seconds:.2f} ms | {bound.tokens_per_second:,.0f} | {bound.bound_by} |"
            )
