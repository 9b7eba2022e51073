"""On a GPU: is the engine right, does it stay within its memory plan, and how far is it from the device's limit?

- checks: bits of exact INT8 products of Llama-2-7B's shapes against the CPU's reference; greedy tokens of the embedded
  checkpoint against transformers' generate(), where FP32's must agree; requests in random mixes and cuts of their
  prompts against each alone; KL divergence of INT8 and FP16 from FP32 on a chapter of a novel.
- fp16, int8: Llama-2-7B's shape with random weights: tokens/s of 1, 8 and 32 sequences beside the limit, the peak of
  the memory beside the plan, mixes as above. Then the article's table: 32 requests of 200 tokens, all at once, served
  one at a time (naive), in batches of 8 that wait for their longest, and 32 in flight; with mixed lengths, too.
- stock: transformers' generate() with bitsandbytes' LLM.int8() on a padded batch of the same prompts.

Each measurement is written as soon as it is made; `--only` splits the run. `--device cpu` runs the same program with
the small random model (float32 for FP16): its figures say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from llama_engine.engine.engine import Engine
from llama_engine.engine.memory_plan import plan_memory
from llama_engine.model.loader import LoadedModel, load_checkpoint
from llama_engine.model.precision import choose_device
from llama_engine.settings import Settings
from transformers import AutoTokenizer, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from perf.checkpoint import EMBEDDED, LLAMA_2_7B, SMOLLM2, described, random_checkpoint
from perf.command import CORES, count, make_command
from perf.device_rates import measure_rates
from perf.gpu_checks import MIX_TOKENS, divergence, exactness, generate, mixes, products
from perf.load.workload import MEAN_OUTPUT, PROMPT_TOKENS, Mix, engine_requests, lengths, prompts
from perf.results_file import Results
from perf.roofline import DeviceRates, Weights, roofline

PARTS = ("checks", "fp16", "int8", "stock")
ROWS = (1, 8, 32)
REQUESTS = 32
"""Requests of the article's table, all sent at once."""
MODES = {"in flight": 32, "batched": 8, "naive": 1}
"""How a load is served, and the engine's slots: a batch has the size of `batched_int8` and `batched_fp16`."""

Note = Callable[[str, dict[str, object]], None]


def main() -> int:
    """Measure, write the result and print each figure. Returns 1 if an FP32 token or an INT8 bit is wrong, else 0."""
    parser = argparse.ArgumentParser(prog="python -m perf.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="parts of the run (default all)")
    parser.add_argument("--tokens", type=count, default=MEAN_OUTPUT, help="mean of each completion (default 200)")
    parser.add_argument("--mixes", type=count, default=30, help="random mixes of each model (default 30)")
    parser.add_argument("--output", type=Path, default=Path("perf/results/gpu.json"), metavar="FILE")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, and there is no GPU; --device cpu tests the program")
    # With an index, which `torch.cuda.set_device` asks for, and without cuDNN's attention.
    device = choose_device(options.device, 0)
    shape = LLAMA_2_7B if device.type == "cuda" else SMOLLM2
    results = Results(options.output, "gpu", {"threads": CORES}, make_command("bench-gpu"))

    def note(key: str, measurement: dict[str, object]) -> None:
        # PyTorch compiles a function eight times; a model's `dequantize` takes four, and each part loads other models.
        torch.compiler.reset()
        results.add(key, measurement)
        print(f"{key}: {measurement}", flush=True)

    wrong = "checks" in options.only and check(device, shape, options.mixes, note)
    half: Weights = "fp16" if device.type == "cuda" else "fp32"
    measured = {part: weights for part, weights in (("fp16", half), ("int8", "int8")) if part in options.only}
    if measured:
        rates = measure_rates(CORES)
        results.section("rates", rates.to_json())
        print(rates.describe(), flush=True)
    if measured or "stock" in options.only:
        large = random_checkpoint(shape)
        results.section("model", described(large))
    for weights in measured.values():
        measure(large, device, weights, rates, options.tokens, options.mixes, note)
    if "stock" in options.only:
        stock(large, device, options.tokens, note)
    print("| configuration | memory, MiB | p50, s | requests/s |", "|---|---:|---:|---:|", sep="\n")
    for key, row in results.measurements.items():
        if key.startswith("serving/") and key.endswith("/equal"):
            print(f"| {key.split('/', 1)[1]} | {row['peak_mib']} | {row['p50_s']} | {row['requests_per_second']} |")
    results.finish()
    print(f"written to {options.output}")
    return int(wrong)


def check(device: torch.device, shape: LlamaConfig, rounds: int, note: Note) -> bool:
    """Note all checks; return whether an FP32 token or an INT8 bit is wrong."""
    wrong = False
    for key, compare in (
        ("products/2", partial(products, device, shape, 2)),
        ("products/1", partial(products, device, shape, 1)),
        ("exactness/float32", partial(exactness, device)),
    ):
        result = compare()
        note(key, result)
        wrong |= bool(result["different"])
    note("exactness/float16", exactness(device, "float16"))
    for quantization, dtype in (("none", "float16"), ("int8", "auto")):
        settings = Settings(model=str(EMBEDDED), quantization=quantization, dtype=dtype)
        note(f"mixes/embedded/{quantization}", mixes(load_checkpoint(settings, device), settings, rounds))
        note(f"divergence/{quantization}/{dtype}", divergence(device, quantization, dtype))
    return wrong


def measure(
    large: Path, device: torch.device, weights: Weights, rates: DeviceRates, tokens: int, rounds: int, note: Note
) -> None:
    """Note the rates, the memory and the mixes of the large model in these weights."""
    quantization = "int8" if weights == "int8" else "none"
    # Mixed lengths are up to 1.9 times the mean.
    longest = PROMPT_TOKENS + max(2 * tokens, MIX_TOKENS)
    settings = Settings(model=str(large), quantization=quantization, max_model_len=longest, prefix_cache="off")
    checkpoint = load_checkpoint(settings, device)
    for rows in ROWS:
        note(f"decode/{weights}/{rows}", decode(checkpoint, settings, weights, rates, rows, tokens))
    note(f"mixes/large/{weights}", mixes(checkpoint, settings, rounds))
    for mode, slots in MODES.items():
        if mode == "naive" and weights == "int8":
            # The article has no such configuration, and it takes the longest.
            continue
        engine = Engine(checkpoint, settings, slots)
        engine.warm_up()
        # Naive serving has the same rate at any lengths of equal mean.
        mixed: tuple[Mix, ...] = ("equal",) if mode == "naive" else ("equal", "uniform")
        for mix in mixed:
            note(f"serving/{mode}/{weights}/{mix}", serving(engine, checkpoint, mode, mix, tokens))
        # Freed before the next one is allocated.
        del engine


def decode(
    checkpoint: LoadedModel, settings: Settings, weights: Weights, rates: DeviceRates, rows: int, tokens: int
) -> dict[str, object]:
    """Generate in `rows` rows at once. Returns tokens/s, the limit, and the memory's peak and plan in MiB."""
    device = checkpoint.info.device
    plan = plan_memory(checkpoint, settings, rows)
    reset_peak(device)
    engine = Engine(checkpoint, settings, rows)
    engine.warm_up()
    load = engine_requests(checkpoint, [tokens] * rows)
    began = time.perf_counter()
    engine.generate(load)
    rate = rows * tokens / (time.perf_counter() - began)
    config = LlamaConfig.from_pretrained(checkpoint.name)
    limit = roofline(config, weights, rates, rows, [tokens] * rows, PROMPT_TOKENS)
    return {
        "decode_steps": engine.describe_decode(),
        "tokens_per_second": round(rate, 1),
        "limit": limit.beside(rate),
        "peak_mib": peak(device),
        "plan_mib": round(plan.total / 2**20),
    }


def serving(engine: Engine, checkpoint: LoadedModel, mode: str, mix: Mix, tokens: int) -> dict[str, object]:
    """Serve requests that arrive at once. Returns rates, p50 of the latency with the wait, and the memory's peak."""
    load = engine_requests(checkpoint, lengths(mix, REQUESTS, tokens))
    size = REQUESTS if mode == "in flight" else engine.slots
    reset_peak(checkpoint.info.device)
    began = time.monotonic()
    batches = [generate(engine, load[first : first + size]) for first in range(0, REQUESTS, size)]
    seconds = time.monotonic() - began
    latencies = []
    for batch in batches:
        # A static batch is answered when its longest completion ends.
        last = max(sequence.finished_at for sequence in batch)
        latencies += [(each.finished_at if mode == "in flight" else last) - began for each in batch]
    return {
        "requests": REQUESTS,
        "requests_per_second": round(REQUESTS / seconds, 3),
        "tokens_per_second": round(sum(request.max_tokens for request in load) / seconds, 1),
        "p50_s": round(statistics.median(latencies), 3),
        "peak_mib": peak(checkpoint.info.device),
    }


def stock(folder: Path, device: torch.device, tokens: int, note: Note) -> None:
    """Note the rates of transformers with bitsandbytes' LLM.int8(): one padded batch of the same prompts."""
    quantization = BitsAndBytesConfig(load_in_8bit=True)
    model = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float16, device_map={"": device}, quantization_config=quantization
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    for rows in ROWS:
        inputs = tokenizer(prompts(folder, rows), return_tensors="pt", padding=True).to(device)
        reset_peak(device)
        # The first one loads kernels.
        for length in (2, tokens):
            began = time.monotonic()
            output: torch.Tensor = model.generate(  # type: ignore[misc, assignment]
                **inputs, do_sample=False, max_new_tokens=length, min_new_tokens=length
            )
            # Waits for the device.
            generated = output.cpu().shape[1] - inputs["input_ids"].shape[1]
            seconds = time.monotonic() - began
        rate = rows * generated / seconds
        figures = {"tokens_per_second": round(rate, 1), "p50_s": round(seconds, 3), "peak_mib": peak(device)}
        note(f"stock/{rows}", figures)


def reset_peak(device: torch.device) -> None:
    """Begin to measure the peak of the GPU's memory."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int | None:
    """Return the peak of the GPU's memory in MiB; None on a CPU."""
    return round(torch.cuda.max_memory_allocated(device) / 2**20) if device.type == "cuda" else None


if __name__ == "__main__":
    sys.exit(main())
