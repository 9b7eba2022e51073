"""The parts of a run as tasks with their keys, which begin with the part's name, in the order of a run.

Each task is a measurement that may fail alone. `environment` and what needs a GPU only tell so on a CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from engine.prompts import reference_text
from llama_engine.model.loader import Checkpoint
from llama_engine.settings import Settings

from perf.course import Course
from perf.gpu import capacity, correctness, decoding, environment, products
from perf.gpu.decoding import Wave
from perf.gpu.models import FP16, FP32, INT8, Precision, RandomLlama, precisions
from perf.quality import candidates, text
from perf.quality.candidates import GPU_CANDIDATES, Candidate
from perf.roofline.rates import DeviceRates

Tasks = Iterator[tuple[str, Callable[[], Mapping[str, object]]]]

OUTLIER_ROWS = (1, 32)
"""Row counts at threshold 6, where every layer waits for the device and a wave takes long."""
ARTICLE_CONCURRENCY = 32

_FUSED_INT8 = Candidate("int8_fused", "INT8, fused, weights only", kernels="fused")
"""The aims' subject: the engine's own product, which rounds no activations."""


def tasks(options: argparse.Namespace, measured: Mapping[str, Mapping[str, Any]], rates: DeviceRates) -> Tasks:
    """Yield every part's tasks but the article's. measured: what the run has found so far. rates: the device's.

    Tasks use the random model of their precision, so each must run before the next is taken.
    """
    yield "environment", partial(environment.describe, options.device)
    yield from _correct(options)
    llama = RandomLlama(options.amount.shape, options.device, options.kernels)
    for precision in precisions(options.device):
        yield from _random_llama(options, llama, precision, measured, rates)
    llama.free()
    # After what the aims need: rebuilding its text takes a while.
    yield from _quality(options)
    yield from _products(options, rates)


def _correct(options: argparse.Namespace) -> Tasks:
    """Compare tokens and logits of the embedded checkpoint."""
    device, amount = options.device, options.amount
    tokens = partial(correctness.exactness, device, amount.batches)
    yield "correct/tokens/fp32", partial(tokens, amount.exact_s)
    yield "correct/tokens/fp32_graphs", partial(tokens, amount.exact_s / 2, graphs=True)
    yield "correct/tokens/fp32_fused", partial(tokens, amount.exact_s / 2, fused=True)

    @cache
    def exact() -> Sequence[torch.Tensor]:
        return correctness.exact_logits(device, amount.logit_rows, amount.logit_steps)

    def logits(precision: Precision, fused: bool = False) -> Mapping[str, object]:
        return correctness.tolerance(device, exact(), amount.logit_steps, precision, fused)

    for precision in (FP32, FP16, *precisions(device)[1:]):
        yield f"correct/logits/{precision.key}", partial(logits, precision)
    for precision in (FP16, INT8):
        yield f"correct/logits/{precision.key}_fused", partial(logits, precision, fused=True)


def _random_llama(
    options: argparse.Namespace,
    llama: RandomLlama,
    precision: Precision,
    measured: Mapping[str, Mapping[str, Any]],
    rates: DeviceRates,
) -> Tasks:
    """Measure speed and memory of the model of random weights in a precision."""
    amount, key = options.amount, precision.key

    def wave(rows: int, stock: bool = False, graphs: bool = False) -> Mapping[str, object]:
        one = Wave(precision, rates, rows, amount.prompt, amount.output)
        return decoding.engine(llama.at(precision, stock), one, graphs)

    def generate(rows: int) -> Mapping[str, object]:
        one = Wave(precision, rates, rows, amount.prompt, amount.output)
        return decoding.stock(llama.at(precision, stock=True), llama.module, one)

    def replayed(rows: int) -> Mapping[str, object]:
        found = wave(rows, graphs=True)
        launched = measured.get(f"decode/{key}/{rows}", {})
        # Other tokens are no failure: random weights give logits that are nearly equal.
        same = {"same_tokens_as_launched": found["texts"] == launched["texts"]} if "texts" in launched else {}
        return {**found, **same}

    # generate(), and the engine with the same layers: what the engine's own are compared with.
    if precision.weights == "int8":
        yield f"stock/{key}/{amount.decode_rows[0]}", partial(generate, amount.decode_rows[0])
    if precision == INT8:
        for rows in (one for one in amount.decode_rows if one in OUTLIER_ROWS):
            yield f"stock_engine/{key}/{rows}", partial(wave, rows, stock=True)
    yield f"capacity/{key}", lambda: capacity.steady(llama.at(precision), amount)
    if precision == INT8:
        yield f"capacity/{key}/graphs", lambda: capacity.steady(llama.at(precision), amount, graphs=True)
    for rows in amount.decode_rows:
        if not precision.threshold or rows in OUTLIER_ROWS:
            yield f"decode/{key}/{rows}", partial(wave, rows)
    if not precision.threshold:
        for rows in amount.graph_rows:
            yield f"graph/{key}/{rows}", partial(replayed, rows)


def _quality(options: argparse.Namespace) -> Tasks:
    """Measure each quantization's distance from the unquantized embedded checkpoint, as `make quality`, on less text.

    A smoke run takes a page of any text: rebuilding the held-out text takes a while.
    """
    device, amount = options.device, options.amount
    base = Settings(max_model_len=amount.context)

    @cache
    def reference() -> tuple[Checkpoint, text.Rows, Mapping[str, object]]:
        loaded = candidates.load(base, device)
        if options.smoke:
            page = text.from_text(reference_text()[:2000], loaded.tokenizer.pretrained, loaded.max_model_len)
            return loaded, page, {"text": "a page"}
        return loaded, *text.held_out(loaded.max_model_len)

    def distance(candidate: Candidate) -> Mapping[str, object]:
        unquantized, rows, origin = reference()
        loaded = candidates.load(base, device, candidate)
        if candidate == _FUSED_INT8 and loaded.kernels.few_rows is None:
            raise RuntimeError("the fused 8-bit product isn't used; the log has the reason")
        taken = rows[: amount.texts]
        found: dict[str, Any] = candidates.measured(candidate, unquantized, None, loaded, taken)[candidate.key]
        return {
            **found,
            **origin,
            "rows": len(taken),
            "reference": unquantized.info.describe(),
            "in_short": f"KL {found['kl_nats']['mean']} nats per token from the unquantized weights",
        }

    for candidate in (*([_FUSED_INT8] if device.type == "cuda" else []), *GPU_CANDIDATES):
        yield f"quality/{candidate.key}", partial(distance, candidate)


def _products(options: argparse.Namespace, rates: DeviceRates) -> Tasks:
    """Time every way to multiply with an 8-bit weight."""
    amount, fused = options.amount, options.kernels == "fused"
    for outputs, inputs in products.matrices(amount.shape):
        for rows in amount.product_rows:
            task = partial(products.measure, outputs, inputs, rows, options.device, rates, amount.product_s, fused)
            yield f"products/{outputs}x{inputs}/{rows}", task


def article(course: Course, rates: DeviceRates) -> None:
    """Measure every server of the article's tables through Triton and perf_analyzer, in the remaining time.

    Equal lengths first; the aims' servers first, the naive one, which takes longest, last. Needs tritonserver, its
    Python backend's stub for this Python, and perf_analyzer.
    """
    # Imported here: only this part needs Triton and its clients.
    from perf.bench import articles
    from perf.checkpoint import default_checkpoint

    # Servers are other processes: what this one's allocator caches is missing from their memory plans.
    torch.cuda.empty_cache()
    # On disk, where servers load it from: 13 GB at Llama-2-7B's shape.
    checkpoint = default_checkpoint()
    for mix in ("equal", "uniform"):
        articles.tables(
            course,
            ARTICLE_CONCURRENCY,
            checkpoint,
            rates,
            [mix],
            course.budget.left,
            lambda servers: sorted(servers, key=lambda one: (-one.quick, -one.max_batch_size)),
        )
