"""Is the product right and quick on this GPU? One run, one file, and at its end the verdict on every aim.

    make bench-gpu                                   all of it, in 8 minutes
    make bench-gpu GPU='--only decode graph'         parts of it
    make bench-gpu GPU='--smoke --device cpu'        does the program work? no GPU needed

Parts: environment · correct (tokens and logits of the embedded checkpoint) · stock (generate() in INT8) · capacity
(Llama-2-7B's shape: memory plan against memory, growth, scarcity) · decode (the engine without a server) · graph (the
same with its steps as CUDA graphs) · quality · products (every way to multiply with an 8-bit weight) · article (the
servers, where Triton is at hand) · tiles (how to cut a weight for the fused product; only if asked for).

The file is written after every measurement. What fails has its reason in there, and the next one goes on. On a machine
that has PyTorch and a GPU and reaches no package index, `pack.py` and `elsewhere.sh` take the place of make.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from perf.course import Budget, Course
from perf.gpu import verdict
from perf.gpu.options import Options, parse
from perf.gpu.parts import DeviceLostError, Ground, run
from perf.results import Results
from perf.roofline.device import measured_once

LOST = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line says.

    Returns 0: whatever was checked has passed; 1: something hasn't; LOST: the GPU can't be used any more.
    """
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
        run(Ground(options, Course(results, budget), rates))
    except DeviceLostError as error:
        results.finish()
        print(f"bench-gpu: {error}; the GPU is lost to this process: --resume --kernels stock goes on", file=sys.stderr)
        return LOST
    print()
    if options.smoke:
        print("a smoke run's figures mean nothing: no verdict")
    else:
        found = verdict.table(results.measurements, results.device, print)
        results.section("verdict", [one.to_json() for one in found])
    results.finish()
    budget.say(f"written to {options.output}")
    return 1 if verdict.failures(results.measurements) else 0


def _command(results: Results, options: Options) -> str:
    """Return the commands that the file is of, those that are resumed first."""
    before = results.get("command") if options.resume else None
    if not isinstance(before, str):
        return options.command
    return before if options.command in before.split("; ") else f"{before}; {options.command}"


def _settings(options: Options) -> dict[str, object]:
    """Return what a run is resumed with."""
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
        sys.exit("bench-gpu: interrupted; GPU=--resume goes on with what was measured")
