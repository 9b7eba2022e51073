"""The quality loss of INT8, for SmolLM2-135M-Instruct and a chapter of a novel or for your own (`make quality`).

Each candidate predicts every token of the text beside the unquantized weights; the ceiling is the reference itself, at
KL divergence 0. Candidates are loaded by the server's loader:

- exact INT8, what a CPU serves: 8-bit terms of activations, one, two, or two for outliers, and each KV cache dtype.
- LLM.int8() (bitsandbytes) with its outlier threshold of 6.
- or quantized checkpoints of the model.

Or the perplexity of a GGUF file, in FP32 and as it is served, beside llama.cpp's.

Reported facts are read back from the loaded models. Writes one JSON file and prints the table.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from llama_engine.errors import EngineError
from llama_engine.model.builder import ModelInfo
from llama_engine.model.loader import LoadedModel, load_checkpoint
from llama_engine.model.precision import choose_device
from llama_engine.settings import Settings

from perf import report
from perf.checkpoint import smollm2
from perf.command import make_command
from perf.quality import llama_cpp, text
from perf.quality.divergence import Forward, distances, perplexity, summary
from perf.results_file import RESULTS, Results

_FLOATS = {torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "BF16"}


class Candidate(NamedTuple):
    """A form of the model to compare. settings: the engine's that select it, over the defaults."""

    key: str
    title: str
    settings: Mapping[str, Any]


BY_ROW = (
    Candidate("int8", "exact INT8, outlier columns", {}),
    Candidate("int8_kv_float32", "exact INT8, outlier columns, KV FP32", {"kv_cache_dtype": "float32"}),
    Candidate("int8_kv_int8", "exact INT8, outlier columns, KV INT8", {"kv_cache_dtype": "int8"}),
)
"""On a CPU alone."""
CANDIDATES = (
    Candidate("int8_2_terms", "exact INT8, two terms", {"int8_terms": "2"}),
    Candidate("int8_1_terms", "exact INT8, one term", {"int8_terms": "1"}),
    Candidate("int8_threshold_6", "INT8, threshold 6, activations rounded too", {"int8_threshold": 6.0}),
)


def main() -> None:
    """Parse the options, load, compare, write and print; an error is one line on stderr and exit code 1."""
    parser = argparse.ArgumentParser(
        prog="make quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="path or hub id of a Llama in safetensors (default: SmolLM2-135M-Instruct)")
    add("--text", type=Path, default=text.PROSE, help="UTF-8 file (default: a chapter of Alice in Wonderland)")
    add("--quantized", type=Path, nargs="+", metavar="PATH", help="compare these quantized checkpoints of it instead")
    add("--llama-perplexity", type=Path, metavar="PROGRAM", help="compare MODEL, a GGUF file, with llama.cpp's instead")
    add(
        "--output", type=Path, help="default: perf/results/quality.json, quality-formats.json or quality-llama-cpp.json"
    )
    options = parser.parse_args()
    kind = "-formats" if options.quantized else "-llama-cpp" if options.llama_perplexity else ""
    options.output = options.output or RESULTS / f"quality{kind}.json"
    if options.llama_perplexity and not (options.model or "").endswith(".gguf"):
        parser.error("--llama-perplexity needs --model FILE.gguf (with make: MODEL)")
    try:
        (_beside_llama_cpp if options.llama_perplexity else _measure)(options)
    except (EngineError, OSError, ValueError) as error:
        sys.exit(f"quality: {error}")
    print(report.markdown(report.read(options.output), "", report.quality))
    print(f"written to {options.output}")


def _measure(options: argparse.Namespace) -> None:
    """Compare every candidate with the unquantized weights and write the result file.

    One candidate at a time is in memory, beside what it is compared with. Raises EngineError for a checkpoint that
    can't be loaded, OSError or ValueError for an unusable text.
    """
    # Read first: the checkpoint may take minutes to load.
    content = options.text.read_bytes().decode()
    device = choose_device("auto", 0 if torch.cuda.is_available() else None)
    base = Settings(model=options.model or str(smollm2()))
    reference = load_checkpoint(replace(base, quantization="none"), device)
    texts = text.from_text(content, reference.tokenizer.pretrained, reference.max_model_len)
    settings = {
        "model": options.model or "SmolLM2-135M-Instruct",
        "context": reference.max_model_len,
        "text": options.text.name,
        "texts": len(texts),
        "tokens": sum(len(tokens) - 1 for tokens in texts),
    }
    results = Results(options.output, "quality", settings, make_command("quality"))
    candidates = [*BY_ROW, *CANDIDATES] if device.type == "cpu" else [*CANDIDATES]
    if options.quantized:
        candidates = [
            Candidate(path.name, path.name, {"model": str(path), "quantization": "checkpoint"})
            for path in options.quantized
        ]
    for candidate in candidates:
        print(f"{candidate.title} …", flush=True)
        for key, measurement in compared(candidate, reference, load(base, device, candidate), texts).items():
            results.add(key, measurement)
    results.finish()


def _beside_llama_cpp(options: argparse.Namespace) -> None:
    """Compare the perplexity of a GGUF file with llama.cpp's and write the result file. Raises as `_measure` does."""
    file = Path(str(options.model))
    content = options.text.read_bytes().decode()
    program = options.llama_perplexity
    with tempfile.TemporaryDirectory() as folder:
        floats = llama_cpp.as_floats(file, Path(folder) / "floats.gguf")
        expected = llama_cpp.by_llama_cpp(program, floats, options.text)
    stored = llama_cpp.by_llama_cpp(program, file, options.text)
    measurements: dict[str, dict[str, object]] = {
        "llama_cpp_fp32": {"title": "llama.cpp, FP32", "weights": "FP32", "perplexity": expected},
        "llama_cpp": {
            "title": "llama.cpp, as stored",
            "weights": "GGUF",
            "perplexity": stored,
            "over_fp32": round(stored / expected - 1, 6),
        },
    }
    texts: text.Texts = []
    for key, title, quantization in (("fp32", "FP32", "none"), ("served", "as served", "checkpoint")):
        loaded = load_checkpoint(Settings(model=str(file), quantization=quantization), choose_device("cpu", None))
        texts = llama_cpp.windows(content, loaded)
        found = llama_cpp.by_engine(Forward(loaded), texts)
        measurements[key] = {
            "title": f"triton-llama, {title}",
            **_facts(loaded.info),
            "weights": " and ".join(sorted(loaded.info.linears)).upper(),
            "perplexity": round(found, 4),
            "over_fp32": round(found / expected - 1, 6),
        }
    settings = {
        "model": file.name,
        "context": llama_cpp.CONTEXT,
        "text": f"{options.text.name}, the second half of each text",
        "tokens": sum(len(tokens) - llama_cpp.CONTEXT // 2 - 1 for tokens in texts),
    }
    results = Results(options.output, "quality", settings, make_command("quality"))
    for key, measurement in measurements.items():
        results.add(key, measurement)
    results.finish()


def load(base: Settings, device: torch.device, candidate: Candidate) -> LoadedModel:
    """Load what the engine serves."""
    return load_checkpoint(replace(base, **{"quantization": "int8", **candidate.settings}), device)


def compared(
    candidate: Candidate, reference: LoadedModel, loaded: LoadedModel, texts: Sequence[Sequence[int]]
) -> dict[str, dict[str, object]]:
    """Compare the loaded candidate with the reference; return measurements by key, the reference's first."""
    forward = Forward(loaded, str(candidate.settings.get("kv_cache_dtype", "auto")))
    tokens = distances(Forward(reference), forward, texts)
    products = forward.relative_products()
    name = _FLOATS[reference.info.dtype]
    return {
        name.lower(): {
            "title": name,
            **_facts(reference.info),
            "weights": name,
            "perplexity": round(perplexity(tokens.reference_loss), 4),
        },
        candidate.key: {
            "title": candidate.title,
            **_facts(loaded.info),
            "weights": " and ".join(sorted(loaded.info.linears)).upper(),
            "threshold": loaded.info.threshold,
            **summary(tokens),
            **({} if products is None else {"products": round(products, 4)}),
        },
    }


def _facts(info: ModelInfo) -> dict[str, object]:
    return {"weights_mib": round(info.weight_bytes / 2**20, 2), "loaded": info.describe()}


if __name__ == "__main__":
    main()
