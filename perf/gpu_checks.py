"""Whether the engine is right on a device: exact products, tokens against transformers, independence of the batch."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from llama_engine.checkpoint.architecture import read_architecture
from llama_engine.checkpoint.weights import LinearWeight
from llama_engine.engine.engine import Engine
from llama_engine.engine.events import Completion
from llama_engine.engine.sequence import Sequence as EngineSequence
from llama_engine.kernels.activation_terms import ONE_TERM, TWO_TERMS
from llama_engine.kernels.cpu import cpu_reference
from llama_engine.kernels.gpu.elementwise import SEPARATE, choose_elementwise
from llama_engine.kernels.gpu.exact_int8 import exact_int8_linear
from llama_engine.model.loader import LoadedModel, load_checkpoint
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.settings import Settings
from transformers import LlamaConfig, LlamaForCausalLM

from perf.checkpoint import EMBEDDED
from perf.load.workload import PROMPT_TOKENS, engine_requests
from perf.quality.divergence import PROSE, Forward, distances, from_text, summary

SLOTS = 32
BUDGETS = (7, 40, 512)
"""Prompt tokens per prefill pass of the random mixes; in all but the last a prompt is cut."""
MIX_TOKENS = 16
"""Tokens of each request of the random mixes."""


def generate(
    engine: Engine, load: Sequence[GenerationRequest], enters: Callable[[], bool] = lambda: True
) -> list[EngineSequence]:
    """Generate until all requests finish; return their sequences. enters: whether the next one may take a free slot."""
    sequences = [engine.builder.build(request) for request in load]
    waiting = deque(sequences)
    while waiting or engine.num_sequences:
        while waiting and engine.num_sequences < engine.slots and enters():
            engine.add(waiting.popleft())
        engine.step()
    return sequences


def products(device: torch.device, config: LlamaConfig, terms: int) -> dict[str, object]:
    """Compare exact INT8 products in FP16 on the device with the CPU's reference, in the shapes of the config."""
    architecture = read_architecture(config, "the model")
    hidden, inner, dim = architecture.hidden, architecture.intermediate, architecture.head_dim
    heads = architecture.heads + architecture.kv_heads
    elementwise = choose_elementwise(device, torch.float16, hidden, heads, dim, terms)
    fused = [name for name, function in elementwise._asdict().items() if function is not getattr(SEPARATE, name)]
    generator = torch.Generator().manual_seed(0)
    values = different = 0
    for outputs, inputs in ((3 * hidden, hidden), (2 * inner, hidden), (hidden, inner), (config.vocab_size, hidden)):
        weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, generator=generator)
        scales = torch.rand(outputs, generator=generator)
        layer = exact_int8_linear(LinearWeight(weight.to(device), scales.to(device)), terms, elementwise)
        # The reference takes int64, which is slow.
        sample = torch.arange(0, outputs, -(-outputs // 256))
        for rows in (1, 32, 300):
            activations = torch.randn(rows, inputs, generator=generator).half()
            reference = LinearWeight(weight[sample], scales[sample])
            expected = cpu_reference.linear(activations.float(), reference, ONE_TERM if terms == 1 else TWO_TERMS)
            with torch.inference_mode():
                result = layer(activations.to(device)).cpu()[:, sample]
            values += result.numel()
            different += int((result != expected.half()).sum())
    return {"values": values, "different": different, "fused": fused}


def mixes(checkpoint: LoadedModel, settings: Settings, amount: int, tokens: int = MIX_TOKENS) -> dict[str, object]:
    """Compare tokens and log probabilities of requests in random mixes and cuts with those of each alone."""
    randomness = random.Random(0)
    load = [
        replace(request, prompt_tokens=request.prompt_tokens[: randomness.randint(1, PROMPT_TOKENS)], num_logprobs=5)
        for request in engine_requests(checkpoint, [tokens] * SLOTS)
    ]
    engine = Engine(checkpoint, settings, 1)
    engine.warm_up()
    alone = {sequence.request: sequence.log_probs for sequence in generate(engine, load)}
    # Freed before the next cache is allocated.
    del engine
    compared = different = different_tokens = 0
    share = 1.0

    def enters() -> bool:
        return randomness.random() < share

    for budget in BUDGETS:
        mixed = replace(settings, prefill_tokens=budget)
        engine = Engine(checkpoint, mixed, SLOTS)
        engine.warm_up()
        for _ in range(-(-amount // len(BUDGETS))):
            chosen = randomness.sample(load, randomness.randint(1, len(load)))
            share = randomness.random() + 0.05
            for sequence in generate(engine, chosen, enters):
                expected = alone[sequence.request]
                compared += 1
                different += sequence.log_probs != expected
                different_tokens += [each.token for each in sequence.log_probs] != [each.token for each in expected]
        del engine
    return {"requests": compared, "different": different, "different_tokens": different_tokens}


def exactness(device: torch.device, dtype: str = "float32", amount: int = 16, tokens: int = 64) -> dict[str, object]:
    """Compare the engine's greedy texts, all rows at once, with generate()'s, each prompt alone."""
    settings = Settings(model=str(EMBEDDED), quantization="none", dtype=dtype)
    checkpoint = load_checkpoint(settings, device)
    load = engine_requests(checkpoint, [tokens] * amount)
    results = Engine(checkpoint, settings, amount).generate(load)
    # FP32 on the CPU: the reference is the same on every device.
    reference = torch.device("cpu") if dtype == "float32" else device
    model = LlamaForCausalLM.from_pretrained(checkpoint.name, dtype=getattr(torch, dtype), device_map={"": reference})
    different = 0
    for request, result in zip(load, results, strict=True):
        ids = torch.tensor([request.prompt_tokens], device=reference)
        output: torch.Tensor = model.generate(  # type: ignore[misc, assignment]
            ids, do_sample=False, repetition_penalty=1.0, max_new_tokens=tokens, min_new_tokens=tokens
        )
        expected = str(checkpoint.tokenizer.pretrained.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
        different += not isinstance(result, Completion) or result.text.strip() != expected.strip()
    return {"requests": amount, "tokens": amount * tokens, "different": different}


def divergence(device: torch.device, quantization: str, dtype: str) -> dict[str, object]:
    """Compare a precision's next-token distributions with FP32's."""
    base = Settings(model=str(EMBEDDED), quantization="none", dtype="float32")
    reference = load_checkpoint(base, device)
    candidate = load_checkpoint(replace(base, quantization=quantization, dtype=dtype), device)
    texts = from_text(PROSE.read_text(), reference.tokenizer.pretrained, reference.max_model_len)
    tokens = distances(Forward(reference), Forward(candidate), texts)
    return {"loaded": candidate.info.describe(), **summary(tokens)}
