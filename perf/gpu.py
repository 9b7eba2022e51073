"""On a GPU: is the engine right, does it stay within its memory plan, and how far is it from the device's limit?

1. Greedy FP32 tokens of the embedded checkpoint against transformers' generate() on each prompt alone.
2. KL divergence of INT8's and FP16's next-token distributions from FP32's, on the embedded checkpoint's held-out text.
3. Llama-2-7B's shape with random weights, FP16 and INT8: tokens/s of 1, 8 and 32 rows beside the limit, and the peak
   of the memory beside the plan.

`--device cpu` runs the same program with the small random model: its figures say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import Engine
from llama_engine.events import Completion
from llama_engine.model.loader import Checkpoint, load_checkpoint
from llama_engine.model.memory_plan import plan_memory
from llama_engine.settings import Settings
from transformers import LlamaConfig, LlamaForCausalLM

from perf.checkpoint import LLAMA_2_7B, SMALL, described, random_checkpoint
from perf.command import CORES, count, make_command
from perf.quality import text
from perf.quality.divergence import Forward, distances, summary
from perf.results_file import Results
from perf.roofline.device import measure_rates
from perf.roofline.physics import roofline
from perf.roofline.rates import DeviceRates, Weights
from perf.workload import PROMPT_TOKENS, prompts

ROWS = (1, 8, 32)
TEXTS = 32
"""Rows of the held-out text that KL divergence is taken over."""


def main() -> int:
    """Measure, write the result and print each figure. Returns 1 if a token of FP32 is wrong, else 0."""
    parser = argparse.ArgumentParser(prog="python -m perf.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=count, default=200, help="of each completion (default 200)")
    parser.add_argument("--output", type=Path, default=Path("perf/results/gpu.json"), metavar="FILE")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, and there is no GPU; --device cpu tests the program")
    device = torch.device(options.device)
    large = random_checkpoint(LLAMA_2_7B if device.type == "cuda" else SMALL)
    facts = {"model": described(large), "threads": CORES}
    results = Results(options.output, "gpu", facts, make_command("bench-gpu"))
    rates = measure_rates(CORES)
    results.section("rates", rates.to_json())
    print(rates.describe(), flush=True)

    def note(key: str, measurement: dict[str, object]) -> None:
        results.add(key, measurement)
        print(f"{key}: {measurement}", flush=True)

    exact = exactness(device)
    note("exactness", exact)
    for quantization, dtype in (("none", "float16"), ("int8", "auto")):
        note(f"divergence/{quantization}/{dtype}", divergence(device, quantization, dtype))
    half: Weights = "fp16" if device.type == "cuda" else "fp32"
    for weights, quantization in ((half, "none"), ("int8", "int8")):
        settings = Settings(model=str(large), quantization=quantization, max_model_len=PROMPT_TOKENS + options.tokens)
        checkpoint = load_checkpoint(settings, device)
        for rows in ROWS:
            note(f"decode/{weights}/{rows}", decode(checkpoint, settings, weights, rates, rows, options.tokens))
        # Freed before the next one is loaded.
        del checkpoint
    results.finish()
    print(f"written to {options.output}")
    return 1 if exact["different"] else 0


def requests(checkpoint: Checkpoint, amount: int, tokens: int) -> list[GenerationRequest]:
    """Return greedy requests of PROMPT_TOKENS tokens each, which end at `tokens`."""
    texts = prompts(Path(checkpoint.name), amount)
    encoded = [tuple(checkpoint.tokenizer.encode(prompt)) for prompt in texts]
    return [
        GenerationRequest(prompt, tuple(ids), max_tokens=tokens, min_tokens=tokens)
        for prompt, ids in zip(texts, encoded, strict=True)
    ]


def exactness(device: torch.device, amount: int = 16, tokens: int = 64) -> dict[str, object]:
    """Compare the engine's greedy FP32 texts, all rows at once, with generate()'s, each prompt alone."""
    settings = Settings(quantization="none", dtype="float32")
    checkpoint = load_checkpoint(settings, device)
    load = requests(checkpoint, amount, tokens)
    results = Engine(checkpoint, settings, amount).generate(load)
    model = LlamaForCausalLM.from_pretrained(checkpoint.name, dtype=torch.float32)
    different = 0
    for request, result in zip(load, results, strict=True):
        ids = torch.tensor([request.prompt_tokens])
        # On the CPU: the reference is the same on every device.
        output: torch.Tensor = model.generate(  # type: ignore[misc, assignment]
            ids, do_sample=False, repetition_penalty=1.0, max_new_tokens=tokens, min_new_tokens=tokens
        )
        expected = str(checkpoint.tokenizer.pretrained.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
        different += not isinstance(result, Completion) or result.text.strip() != expected.strip()
    return {"requests": amount, "tokens": amount * tokens, "different": different}


def divergence(device: torch.device, quantization: str, dtype: str) -> dict[str, object]:
    """Compare a precision's next-token distributions with FP32's."""
    base = Settings(quantization="none", dtype="float32")
    reference = load_checkpoint(base, device)
    candidate = load_checkpoint(replace(base, quantization=quantization, dtype=dtype), device)
    rows, _ = text.held_out(reference.max_model_len)
    (tokens,) = distances([Forward(reference)], Forward(candidate), rows[:TEXTS])
    return {"loaded": candidate.info.describe(), **summary(tokens)}


def decode(
    checkpoint: Checkpoint, settings: Settings, weights: Weights, rates: DeviceRates, rows: int, tokens: int
) -> dict[str, object]:
    """Generate in `rows` rows at once. Returns tokens/s, the limit, and the memory's peak and plan in MiB."""
    device = checkpoint.info.device
    plan = plan_memory(checkpoint, settings, rows)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    engine = Engine(checkpoint, settings, rows)
    engine.warm_up()
    load = requests(checkpoint, rows, tokens)
    began = time.perf_counter()
    engine.generate(load)
    rate = rows * tokens / (time.perf_counter() - began)
    config = LlamaConfig.from_pretrained(checkpoint.name)
    limit = roofline(config, weights, rates, rows, [tokens] * rows, PROMPT_TOKENS)
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
    return {
        "decode_steps": engine.describe_decode(),
        "tokens_per_second": round(rate, 1),
        "limit": limit.beside(rate),
        "peak_mib": peak,
        "plan_mib": round(plan.total / 2**20),
    }


if __name__ == "__main__":
    sys.exit(main())
