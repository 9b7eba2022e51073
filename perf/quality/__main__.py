"""The quality loss of INT8, for the embedded checkpoint and its held-out text or for your own (`make quality`).

Each candidate predicts every token of the text beside the unquantized weights; the ceiling is the reference itself, at
KL divergence 0. What is served is loaded by the server's loader; on a CPU it is compared with its own weights in
products of floats, too. Writes one JSON file and prints the table.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from llama_engine.errors import EngineError
from llama_engine.model.loader import EMBEDDED
from llama_engine.model.precision import choose_device
from llama_engine.settings import Settings

from perf.command import make_command, positive
from perf.quality import text
from perf.quality.candidates import (
    CANDIDATES,
    GPU_CANDIDATES,
    WEIGHTS_ONLY,
    load,
    measured,
    of_checkpoint,
    weights_only,
)
from perf.quality.planted import plant
from perf.report.results import RESULTS, read
from perf.report.tables import quality
from perf.results_file import Results


def main() -> None:
    """Parse the options, load, compare, write and print; an error is one line on stderr and exit code 1."""
    parser = argparse.ArgumentParser(prog="make quality", description=__doc__)
    parser.add_argument("--model", help="path or hub id of a Llama in safetensors (default: the embedded checkpoint)")
    parser.add_argument("--text", type=Path, help="UTF-8 file (default: the embedded checkpoint's held-out text)")
    parser.add_argument(
        "--planted", type=positive, metavar="FACTOR", help="plant outliers of this factor into the embedded checkpoint"
    )
    parser.add_argument(
        "--quantized",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="compare these quantized checkpoints of the model instead",
    )
    parser.add_argument(
        "--output", type=Path, help="default: perf/results/quality.json, quality-planted.json or quality-formats.json"
    )
    options = parser.parse_args()
    suffix = "-planted" if options.planted else "-formats" if options.quantized else ""
    options.output = options.output or RESULTS / f"quality{suffix}.json"
    if options.model is not None and options.text is None:
        parser.error(
            "--model needs --text (with make: MODEL needs TEXT): the held-out text is the embedded checkpoint's"
        )
    if options.planted and (options.model is not None or options.quantized):
        parser.error("--planted is for the embedded checkpoint, without --model and --quantized")
    try:
        with TemporaryDirectory() as folder:
            _measure(options, Path(folder))
    except (EngineError, OSError, ValueError) as error:
        sys.exit(f"quality: {error}")
    print(quality(read(options.output)))
    print(f"written to {options.output}")


def _measure(options: argparse.Namespace, folder: Path) -> None:
    """Compare every candidate with the unquantized weights and write the result file.

    One candidate at a time is in memory, beside what it is compared with. folder: for a checkpoint with planted
    outliers. Raises EngineError for a checkpoint that
    can't be loaded, OSError or ValueError for an unusable text.
    """
    # Read first: the checkpoint may take minutes to load.
    content = None if options.text is None else options.text.read_bytes().decode()
    device = choose_device("auto", 0 if torch.cuda.is_available() else None)
    base = Settings(model=options.model)
    reference = load(base, device)
    if content is None:
        rows, origin = text.held_out(reference.max_model_len)
    else:
        rows = text.from_text(content, reference.tokenizer.pretrained, reference.max_model_len)
        origin = {"text": options.text.name}
    settings = {
        "model": options.model or f"models/pydoc-llama{_planted(options.planted)}",
        "context": reference.max_model_len,
        **origin,
        "rows": len(rows),
        "tokens": sum(len(row) - 1 for row in rows),
    }
    results = Results(options.output, "quality", settings, make_command("quality"))
    on_cpu = device.type == "cpu"
    candidates = CANDIDATES if on_cpu else GPU_CANDIDATES
    if options.quantized:
        candidates = tuple(map(of_checkpoint, options.quantized))
    if options.planted:
        plant(reference, EMBEDDED, folder, options.planted, rows[0])
        base = Settings(model=str(folder))
        reference = load(base, device)
        candidates = tuple(candidate for candidate in candidates if candidate.kv_cache_dtype in ("auto", "bfloat16"))
    same_weights = weights_only(reference, head=True) if on_cpu and not options.quantized else None
    for candidate in candidates:
        print(f"{candidate.title} …", flush=True)
        if candidate.weights_only:
            loaded = weights_only(reference, head=candidate == WEIGHTS_ONLY)
        else:
            loaded = load(base, device, candidate)
        for key, measurement in measured(candidate, reference, same_weights, loaded, rows).items():
            results.add(key, measurement)
        # Freed before the next one is loaded.
        del loaded
    results.finish()


def _planted(factor: float | None) -> str:
    return f" with outliers × {factor:g}" if factor else ""


if __name__ == "__main__":
    main()
