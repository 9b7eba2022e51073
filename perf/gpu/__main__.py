"""Correctness, memory and speed of the engine on a GPU: one run, one JSON file, and a verdict on every aim.

    make bench-gpu                                   all of it, in 8 minutes
    make bench-gpu GPU='--only decode graph'         parts of it
    make bench-gpu GPU='--smoke --device cpu'        does the program work? no GPU needed

The ceiling: a decode step reads every weight once and every cached position once, so it takes at least
(weights + rows × context × KV bytes) / bandwidth, or its operations / the device's matrix rate. Both rates are measured
first, and every throughput stands beside the limit that they set (perf.roofline.physics).

Parts: environment · correct (tokens and logits of the embedded checkpoint) · stock (generate() in INT8) · capacity
(Llama-2-7B's shape: memory against the memory plan, growth, scarcity) · decode (the engine without a server) · graph
(the same with its steps as CUDA graphs) · quality · products (every way to multiply with an 8-bit weight) · article
(the servers, where Triton is installed) · tiles (cuts of a weight for the fused product; only on request).

The file is written after every measurement. A measurement that fails has its reason in the file, and the run continues.
On a machine with PyTorch and a GPU but without a package index, `pack.py` and `elsewhere.sh` replace make.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from perf.course import Budget, Course
from perf.gpu import verdict
from perf.gpu.options import Options, parse
from perf.gpu.parts import DeviceLostError, Run
from perf.results import Results
from perf.roofline.device import measured_once

LOST = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 0 if every check passed, 1 if one did not, LOST if the GPU can't be used by this process any more."""
    options = parse(arguments)
    budget = Budget(options.budget_s)
    torch.set_num_threads(options.threads)
    try:
        results = Results(options.output, "gpu", _settings(options), options.resume, options.partial)
    except ValueError as error:
        sys.exit(f"bench-gpu: {error}")
    results.section("command", _command(results, options))
    budget.say(f"{results.device}; torch {torch.__version__}")
    rates = measured_once(results, options.threads, options.amount.rates_s)
    budget.say(rates.describe())
    try:
        Run(options, Course(results, budget), rates).all()
    except DeviceLostError as error:
        results.finish()
        print(
            f"bench-gpu: {error}; this process can't use the GPU any more; continue with --resume --kernels stock",
            file=sys.stderr,
        )
        return LOST
    print()
    if options.smoke:
        print("no verdict: a smoke run's figures mean nothing")
    else:
        found = verdict.table(results.measurements, results.device, print)
        results.section("verdict", [one.to_json() for one in found])
    results.finish()
    budget.say(f"written to {options.output}")
    return 1 if verdict.failures(results.measurements) else 0


def _command(results: Results, options: Options) -> str:
    """Return the commands that made the file, resumed ones first."""
    before = results.get("command") if options.resume else None
    if not isinstance(before, str):
        return options.command
    return before if options.command in before.split("; ") else f"{before}; {options.command}"


def _settings(options: Options) -> dict[str, object]:
    """Return what must be equal for a run to be resumed."""
    shape = options.amount.shape
    return {
        "model": f"random weights, {shape.hidden} x {shape.layers}, and models/pydoc-llama",
        "device": options.device.type,
        "smoke": options.smoke,
        "threads": options.threads,
        "prompt_tokens": options.amount.prompt,
        "output_tokens": options.amount.output,
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("bench-gpu: interrupted; GPU=--resume continues with what was measured")
