"""The quality loss of INT8, for SmolLM2-135M-Instruct and a chapter of a novel or for your own (`make quality`).

Each candidate predicts every token of the text beside the unquantized weights in FP32; the ceiling is the reference
itself, at KL divergence 0. Candidates are loaded by the server's loader:

- exact INT8, what a CPU serves: 8-bit terms of activations, one, two, or two for outliers, and each KV cache dtype.
- LLM.int8() (bitsandbytes) with its outlier threshold of 6.
- or quantized checkpoints of the model.

Or they are servers of `make bench`'s case smollm2, in its settings, each by its own engine. Results of several runs
over the same text are kept in one file. Reported facts are read back from the loaded models.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from llama_engine.errors import EngineError
from llama_engine.model.loader import LoadedModel, load_checkpoint
from llama_engine.model.model_info import ModelInfo
from llama_engine.model.precision import choose_device
from llama_engine.settings import Settings

from perf import report
from perf.bench.cases import CASES
from perf.checkpoint import quantized, smollm2
from perf.command import CORES, make_command
from perf.quality import served
from perf.quality.divergence import (
    CONTEXT,
    PROSE,
    Distances,
    Forward,
    Texts,
    distances,
    from_text,
    perplexity,
    summary,
)
from perf.results_file import RESULTS, Results, read
from perf.servers.running import NotRunError, Server
from perf.table import markdown

_FLOATS = {torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "BF16"}


class Candidate(NamedTuple):
    """A form of the model to compare. settings: the engine's that select it, over the defaults."""

    key: str
    title: str
    settings: Mapping[str, Any]


OUTLIER_COLUMNS = (
    Candidate("triton_llama_int8", "exact INT8, outlier columns", {}),
    Candidate("int8_kv_float32", "exact INT8, outlier columns, KV FP32", {"kv_cache_dtype": "float32"}),
    Candidate("int8_kv_int8", "exact INT8, outlier columns, KV INT8", {"kv_cache_dtype": "int8"}),
)
"""On a CPU alone."""
CANDIDATES = (
    Candidate("int8_2_terms", "exact INT8, two terms", {"int8_terms": "2"}),
    Candidate("triton_llama_int8_one_term", "exact INT8, one term", {"int8_terms": "1"}),
    Candidate("int8_threshold_6", "INT8, threshold 6, activations rounded too", {"int8_threshold": 6.0}),
)


def main() -> None:
    """Parse the options, load, compare, write and print; an error is one line on stderr and exit code 1."""
    parser = argparse.ArgumentParser(
        prog="make quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="path or hub id of a Llama in safetensors (default: SmolLM2-135M-Instruct)")
    add("--text", type=Path, default=PROSE, help="UTF-8 file (default: a chapter of Alice in Wonderland)")
    add("--quantized", type=Path, nargs="+", metavar="PATH", help="compare these quantized checkpoints of it instead")
    servers = {case.server.key: case.server for case in CASES["smollm2"](None)}
    others = [key for key in servers if not key.startswith("triton_llama")]
    add("--servers", nargs="+", choices=others, metavar="KEY", help=f"compare these servers instead: {others}")
    add("--output", type=Path, help="default: perf/results/quality.json or quality-formats.json")
    options = parser.parse_args()
    options.output = options.output or RESULTS / f"quality{'-formats' if options.quantized else ''}.json"
    try:
        _measure(options, [servers[key] for key in options.servers or ()])
    except (EngineError, NotRunError, OSError, ValueError) as error:
        sys.exit(f"quality: {error}")
    print(markdown(read(options.output), report.quality))
    print(f"written to {options.output}")


def _measure(options: argparse.Namespace, servers: Sequence[Server]) -> None:
    """Compare every candidate with the unquantized weights and write the result file.

    One candidate at a time is in memory, beside what it is compared with. Raises EngineError for a checkpoint that
    can't be loaded, OSError or ValueError for an unusable text, NotRunError for a server that isn't installed.
    """
    # Read first: the checkpoint may take minutes to load.
    content = options.text.read_bytes().decode()
    device = choose_device("auto", 0 if torch.cuda.is_available() else None)
    base = Settings(model=options.model or str(smollm2()))
    reference = load_checkpoint(replace(base, quantization="none"), device)
    context = min(CONTEXT, reference.max_model_len)
    texts = from_text(content, reference.tokenizer.pretrained, context)
    settings = {
        "model": options.model or "SmolLM2-135M-Instruct",
        "context": context,
        "text": options.text.name,
        "texts": len(texts),
        "tokens": sum(len(tokens) - 1 for tokens in texts),
    }
    results = Results(options.output, "quality", settings, make_command("quality"), merge=True)
    candidates = [*OUTLIER_COLUMNS, *CANDIDATES] if device.type == "cpu" else [*CANDIDATES]
    if options.quantized:
        candidates = [
            Candidate(path.name, path.name, {"model": str(path), "quantization": "checkpoint"})
            for path in options.quantized
        ]
    elif options.model is None:
        file = {"model": str(quantized(smollm2(), "q4_1")), "quantization": "checkpoint"}
        candidates.append(Candidate("triton_llama_q4_1", "GGUF Q4_1, as served", file))
    for candidate in candidates if not servers else ():
        print(f"{candidate.title} …", flush=True)
        for key, measurement in compared(candidate, reference, load(base, device, candidate), texts).items():
            results.add(key, measurement)
    for server in servers:
        print(f"{server.title} …", flush=True)
        results.add(server.key, beside(server, Forward(reference), Path(reference.name), texts))
    results.finish()


def beside(server: Server, reference: Forward, checkpoint: Path, texts: Texts) -> dict[str, object]:
    """Compare what a server predicts with the reference. Raises NotRunError or OSError."""
    converted = quantized(checkpoint, server.converted) if server.converted else checkpoint
    with server.start(converted, CORES) as running:
        parts = [served.compare(reference, running.target, each) for each in texts]
        return {
            **server.to_json(),
            "weights_mib": round(running.weights_mib, 2),
            "command": running.command,
            "settings": dict(running.settings),
            **Distances(*map(torch.cat, zip(*parts, strict=True))).summary(),
        }


def load(base: Settings, device: torch.device, candidate: Candidate) -> LoadedModel:
    """Load what the engine serves."""
    return load_checkpoint(replace(base, **{"quantization": "int8", **candidate.settings}), device)


def compared(
    candidate: Candidate, reference: LoadedModel, loaded: LoadedModel, texts: Texts
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
