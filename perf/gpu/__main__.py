"""Correctness, memory and speed of the engine on a GPU: one run and one JSON file.

    make bench-gpu                                   all of it, in 8 minutes
    make bench-gpu GPU='--only decode graph'         parts of it
    make bench-gpu GPU='--smoke --device cpu'        does the program work? no GPU needed

The ceiling: a decode step reads every weight once and every cached position once, so it takes at least
(weights + rows × context × KV bytes) / bandwidth, or its operations / the device's matrix rate. Both rates are measured
first, and every throughput stands beside the limit that they set (perf.roofline.physics).

Parts: environment · correct (tokens and logits of the embedded checkpoint) · stock (generate() in INT8) · capacity
(Llama-2-7B's shape: memory against the memory plan, growth) · decode (the engine without a server) · graph (the same
with its steps as CUDA graphs) · quality · products (every way to multiply with an 8-bit weight) · article (the servers,
where Triton is installed).

The file is written after every measurement. A measurement that fails has its reason in the file, and the run continues.
On a machine with PyTorch and a GPU but without a package index, `pack.py` and `elsewhere.sh` replace make.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from perf.command import CORES, begin
from perf.course import Course, reason
from perf.gpu.options import parse
from perf.gpu.parts import article, tasks
from perf.roofline.rates import DeviceRates

LOST = 3

_LEAST_S = {"environment": 0.0, "correct": 10.0, "quality": 15.0, "capacity": 25.0, "decode": 15.0, "stock": 25.0,
            "graph": 25.0, "products": 5.0, "article": 120.0}  # fmt: skip
"""Seconds that must be left to begin a task of a part; estimates, not measured yet."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 0 if every check passed, 1 if one did not, LOST if the GPU can't be used by this process any more."""
    options = parse(arguments, __doc__)
    shape = options.amount.shape
    # What must be equal for a run to be resumed.
    settings = {
        "model": f"random weights, {shape.hidden} x {shape.layers}, and models/pydoc-llama",
        "device": options.device.type,
        "smoke": options.smoke,
        "threads": CORES,
        "prompt_tokens": options.amount.prompt,
        "output_tokens": options.amount.output,
    }
    course, rates = begin("gpu", options, settings, options.command, options.partial, options.amount.rates_s)
    results = course.results
    lost = _measure(options, course, rates)
    if lost:
        results.finish()
        print(
            f"bench-gpu: {lost}; this process can't use the GPU any more; continue with --resume --kernels stock",
            file=sys.stderr,
        )
        return LOST
    if "article" in options.only:
        _article(options, course, rates)
    results.finish()
    failed = [key for key, found in results.measurements.items() if found.get("passed") is False]
    course.budget.say(f"written to {options.output}{''.join(f'; NOT PASSED: {key}' for key in failed)}")
    return 1 if failed else 0


def _measure(options: argparse.Namespace, course: Course, rates: DeviceRates) -> str | None:
    """Run every task of the chosen parts for which there is time; return the task that broke the GPU, and its error."""
    for key, task in tasks(options, course.results.measurements, rates):
        part = key.split("/")[0].removesuffix("_engine")
        if part not in options.only:
            continue
        course.measure(key, {}, partial(_timely, options, course, part, key, task))
        if options.device.type == "cuda":
            try:
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001 - after an illegal address, say, every later CUDA call fails
                return f"{key}: {reason(error)}"
    return None


def _article(options: argparse.Namespace, course: Course, rates: DeviceRates) -> None:
    # An earlier run's reason why this part could not begin.
    course.results.forget("article")
    if options.device.type != "cuda":
        course.note("article", {"not_run": "needs CUDA"})
        return
    try:
        course.refuse_without(_LEAST_S["article"])
        article(course, rates)
    except Exception as error:  # noqa: BLE001 - the reason is the result, as in Course.measure
        course.note("article", {"not_run": reason(error)})


def _timely(
    options: argparse.Namespace, course: Course, part: str, key: str, task: Callable[[], Mapping[str, object]]
) -> Mapping[str, object]:
    if not options.smoke:
        course.refuse_without(_LEAST_S[part])
    if options.kernels != "fused" and key.endswith("_fused"):
        raise RuntimeError(f"left out by --kernels {options.kernels}")
    return task()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("bench-gpu: interrupted; GPU=--resume continues with what was measured")
