"""Cold starts from a checkpoint as it is and from a prepared one, in turns: `python -m perf.coldstart`.

The checkpoint's files are dropped from the page cache, the server starts, and is stopped when it is ready; the
libraries stay cached. The rest of a start, importing PyTorch above all, is the same for every checkpoint; so the time
that the model's process spends on the checkpoint itself is taken too, from its lines in the log.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from triton_prepare.prepare import prepare

from perf.checkpoint import FOLDER, Shape, default_checkpoint, random_checkpoint
from perf.command import CORES, count, given
from perf.environment import family, status_kib
from perf.results_file import Results
from perf.servers.triton import local_triton, read_back

LLAMA_1B = Shape(2048, 8192, 16, 32, 8, 32000, 1024, "float16")
"""The matrices of Llama 3.2 1B with a smaller vocabulary: 1.1 billion parameters."""


def measure_start(checkpoint: Path, found: dict[str, Any]) -> None:
    """Start a server of the product with this checkpoint, stop it, and add its figures to those found before.

    ready_seconds: until the server is ready. load_seconds: of it, from parsing the settings to the weights in place.
    peak_mib: the largest resident set of the model's process until then, pages of files included. loaded: the model's
    log line. Raises LauncherError if it isn't ready.
    """
    for path in checkpoint.iterdir():
        with path.open("rb") as file:
            # Pages not yet written to the disk would stay.
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    moments: dict[str, float] = {}

    def note(line: str) -> None:
        for beginning in ("settings: ", "loaded "):
            if f"llama: {beginning}" in line:
                moments[beginning] = time.monotonic()

    environment = {"OMP_NUM_THREADS": str(CORES), "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    with local_triton(variant="default", model=str(checkpoint), environment=environment, on_log_line=note) as server:
        ready = time.monotonic() - began
        peaks = [0]
        for pid in family(server.pid):
            # The kernel reports none for a process that has just ended.
            with suppress(ValueError, FileNotFoundError):
                peaks.append(status_kib(pid, "status", "VmHWM"))
        found["loaded"] = read_back(server).loaded
    found["ready_seconds"].append(round(ready, 2))
    found["load_seconds"].append(round(moments["loaded "] - moments["settings: "], 2))
    found["peak_mib"].append(round(max(peaks) / 2**10, 1))


def main() -> None:
    """Prepare, measure, write and print."""
    parser = argparse.ArgumentParser(prog="python -m perf.coldstart", description=__doc__)
    parser.add_argument("--billion", action="store_true", help="random weights of 1.1 billion parameters in FP16")
    parser.add_argument("--repetitions", type=count, default=5, help="starts of each (5)")
    parser.add_argument("--output", type=Path, default=Path("perf/results/coldstart.json"))
    options = parser.parse_args()
    original = random_checkpoint(LLAMA_1B, FOLDER) if options.billion else default_checkpoint()
    torch.set_num_threads(CORES)
    prepared = FOLDER / "prepared" / f"{original.name}-int8"
    prepare(str(original), None, prepared)
    settings = {"model": original.name, "threads": CORES, "repetitions": options.repetitions}
    results = Results(options.output, "coldstart", settings, resume=False)
    command = ["python", "-m", "perf.coldstart", *(["--billion"] if options.billion else [])]
    results.section("command", shlex.join([*command, *given(parser, options, ["repetitions"])]))
    starts: dict[Path, dict[str, Any]] = {}
    for folder, title in ((original, "quantized at every start"), (prepared, "prepared once")):
        mebibytes = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 2**20
        lists: dict[str, Any] = {"ready_seconds": [], "load_seconds": [], "peak_mib": []}
        starts[folder] = {"title": title, "loaded": "", "files_mib": round(mebibytes, 1), **lists}
    # In turns, so that a slow minute affects both.
    for repetition in range(options.repetitions):
        for folder, found in starts.items():
            measure_start(folder, found)
            ready, load = found["ready_seconds"][-1], found["load_seconds"][-1]
            print(f"{repetition + 1}. {found['title']}: ready after {ready:.1f} s, {load:.1f} s to load")
    for name, found in zip(("original", "prepared"), starts.values(), strict=True):
        results.add(name, found)
        medians = {key: statistics.median(found[key]) for key in ("ready_seconds", "load_seconds", "peak_mib")}
        print(f"{found['title']}: {found['files_mib']:,.0f} MiB of weights, medians {medians}")
    results.finish()
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
