"""Another server's next-token distributions over a text, by its own engine.

Each server gives the log probabilities of its TOP best tokens at every position; the rest of the vocabulary counts as
one symbol, whose probability is what they leave. That makes a KL divergence smaller, never larger: for our own INT8 by
3 percent (measured on SmolLM2-135M-Instruct).
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from perf.load.protocols import Target
from perf.quality.divergence import Distances, Forward
from perf.servers.baselines import TOP

_TIMEOUT_S = 300.0

Position = Sequence[tuple[int, float]]
"""Tokens and their log probabilities, the best first."""


@torch.inference_mode()
def compare(reference: Forward, target: Target, text: Sequence[int]) -> Distances:
    """Compare what a server predicts for every token of a text but the first with the reference. Raises OSError."""
    return distances(reference.logits(reference.hidden(text)[:-1]), positions(target, text))


def positions(target: Target, text: Sequence[int]) -> list[Position]:
    """Return what the server predicts for every token of a text but the first. Raises OSError."""
    return _ASKED[target.name.partition("_")[0]](target.url, text)


def distances(logits: Tensor, predicted: Sequence[Position]) -> Distances:
    """Compare the reference's logits [positions, vocabulary] with what is predicted at the same positions."""
    divergences, agreements = [], []
    for row, position in zip(logits, predicted, strict=True):
        ids = torch.tensor([token for token, _ in position])
        got = _with_rest(torch.tensor([log_prob for _, log_prob in position], dtype=torch.float64))
        expected = _with_rest(row.double().log_softmax(-1)[ids])
        divergences.append((expected.exp() * (expected - got)).sum())
        agreements.append(row.argmax() == ids[0])
    return Distances(torch.stack(divergences), torch.stack(agreements))


def _with_rest(log_probs: Tensor) -> Tensor:
    """Return the log probabilities and, as the last, that of everything else."""
    # Rounding may leave nothing.
    rest = (1 - log_probs.exp().sum()).clamp(min=1e-12).log()
    return torch.cat([log_probs, rest[None]])


def _vllm(url: str, text: Sequence[int]) -> list[Position]:
    fields = {"model": "llama", "prompt": text, "max_tokens": 1, "prompt_logprobs": TOP}
    answer = _post(f"{url}/v1/completions", fields)
    found: list[Position] = []
    # A position has the text's own token, too, at whatever rank.
    for tokens in answer["choices"][0]["prompt_logprobs"][1:]:
        ranked = sorted((each["rank"], int(token), each["logprob"]) for token, each in tokens.items())
        found.append([(token, log_prob) for _, token, log_prob in ranked])
    return found


def _llama_cpp(url: str, text: Sequence[int]) -> list[Position]:
    """Ask for one token after each beginning of the text: the slot's cache has all of it but the last token."""
    found: list[Position] = []
    for length in range(1, len(text)):
        fields = {"prompt": text[:length], "n_predict": 1, "n_probs": TOP, "cache_prompt": True, "temperature": 0.0}
        answer = _post(f"{url}/completion", fields)
        best = answer["completion_probabilities"][0]["top_logprobs"]
        found.append([(each["id"], each["logprob"]) for each in best])
    return found


def _openvino(url: str, text: Sequence[int]) -> list[Position]:
    found: list[Position] = _post(f"{url}/log_probs", {"prompt": text[:-1], "top": TOP})
    return found


def _post(url: str, fields: Mapping[str, object]) -> Any:  # noqa: ANN401 - JSON
    request = urllib.request.Request(url, json.dumps(fields).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        return json.load(response)


_ASKED: Mapping[str, Callable[[str, Sequence[int]], list[Position]]] = {
    "vllm": _vllm,
    "llama": _llama_cpp,
    "openvino": _openvino,
}
"""By the beginning of a server's key."""
