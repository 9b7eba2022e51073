"""Measure cold starts from a checkpoint as it is and from a prepared one, in turns: `python -m perf.coldstart`."""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from triton_prepare.prepare import prepare

from perf.checkpoint import FOLDER, Shape, default_checkpoint, random_checkpoint
from perf.coldstart.start import Start, start
from perf.report.text import Table, terminal
from perf.results import Results

LLAMA_1B = Shape(2048, 8192, 16, 32, 8, 32000, 1024, "float16")
"""The matrices of Llama 3.2 1B with a smaller vocabulary: 1.1 billion parameters."""
_TITLES = {"original": "quantized at every start", "prepared": "prepared once"}


def main() -> None:
    """Parse the options, prepare, measure, write and print."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="python -m perf.coldstart", description=__doc__)
    parser.add_argument("--model", type=Path, help="a Llama in safetensors (default: the benchmarks' random weights)")
    parser.add_argument("--billion", action="store_true", help="random weights of 1.1 billion parameters in FP16")
    parser.add_argument("--repetitions", type=int, default=5, help="starts of each (5)")
    parser.add_argument("--threads", type=int, default=cores, help=f"that compute in the server ({cores})")
    parser.add_argument("--output", type=Path, default=Path("perf/results/coldstart.json"))
    options = parser.parse_args()
    if options.repetitions < 1:
        parser.error(f"--repetitions is {options.repetitions}; one start of each is needed at least")
    original = _checkpoint(options.model, options.billion)
    torch.set_num_threads(options.threads)
    out = FOLDER / "prepared" / f"{original.name}-int8"
    prepare(str(original), None, out)
    folders = {"original": original, "prepared": out}
    settings = {"model": original.name, "threads": options.threads, "repetitions": options.repetitions}
    results = Results(options.output, "coldstart", settings, resume=False)
    results.section("command", _command(options.model, options.billion, options.repetitions))
    starts: dict[str, list[Start]] = {name: [] for name in folders}
    # In turns, so that a slow minute hits both.
    for repetition in range(options.repetitions):
        for name, folder in folders.items():
            starts[name].append(one := start(folder, options.threads))
            print(f"{repetition + 1}. {_TITLES[name]}: ready after {one.ready_s:.1f} s, {one.load_s:.1f} s to load")
    for name, taken in starts.items():
        results.add(name, _measurement(name, folders[name], taken))
    results.finish()
    print(terminal(_table(results)))
    print(f"written to {options.output}")


def _checkpoint(model: Path | None, billion: bool) -> Path:
    if model is not None:
        return model.resolve()
    return random_checkpoint(LLAMA_1B, FOLDER) if billion else default_checkpoint()


def _measurement(name: str, folder: Path, starts: Sequence[Start]) -> dict[str, object]:
    """Return the starts of one checkpoint as the result's file has them. Seconds in order of the starts."""
    return {
        "title": _TITLES[name],
        "loaded": starts[0].loaded,
        "files_mib": round(sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 2**20, 1),
        "ready_seconds": [round(one.ready_s, 2) for one in starts],
        "load_seconds": [round(one.load_s, 2) for one in starts],
        "peak_mib": [round(one.peak_mib, 1) for one in starts],
    }


def _table(results: Results) -> Table:
    """Return the medians."""
    rows = [
        [
            str(measurement["title"]),
            f"{measurement['files_mib']:,.0f}",
            f"{statistics.median(measurement['ready_seconds']):.1f}",
            f"{statistics.median(measurement['load_seconds']):.1f}",
            f"{statistics.median(measurement['peak_mib']):,.0f}",
        ]
        for measurement in results.measurements.values()
    ]
    titles = ["checkpoint", "weights on disk, MiB", "ready after, s", "of it loading, s", "peak memory, MiB"]
    return Table(titles=titles, right=[False, True, True, True, True], rows=rows)


def _command(model: Path | None, billion: bool, repetitions: int) -> str:
    """Return how to measure it again, without a path of this machine."""
    which = ["--model", f"<{model.name}>"] if model is not None else ["--billion"] if billion else []
    return shlex.join(["python", "-m", "perf.coldstart", *which, "--repetitions", str(repetitions)])


if __name__ == "__main__":
    main()
