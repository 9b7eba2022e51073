"""Quality loss of INT8 on this device: the comparison of `make quality`, on a part of its text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

import torch
from engine.prompts import reference_text
from llama_engine.model.loader import Checkpoint, load_checkpoint
from llama_engine.settings import Settings
from tqdm import tqdm

from perf.quality import text
from perf.quality.candidates import CANDIDATES, Candidate, measured, reference_of

FUSED = Candidate("int8_fused", 0.0, "fused")
"""The aims' subject: the engine's own product, which rounds no activations."""


def tasks(
    device: torch.device, texts: int, context: int, brief: bool
) -> Iterator[tuple[str, Callable[[], Mapping[str, object]]]]:
    """Yield a task per candidate: its distance from the unquantized embedded checkpoint, on `texts` rows of text.

    brief: on one page of any text; rebuilding the held-out text takes a while.
    """
    base = Settings(max_model_len=context)
    reference = load_checkpoint(reference_of(base), device)
    if brief:
        rows = text.from_text(
            reference_text()[:2000], "a page", reference.tokenizer.pretrained, reference.max_model_len
        )
    else:
        rows = text.held_out(reference.max_model_len)
    for candidate in (*([FUSED] if device.type == "cuda" else []), *CANDIDATES):
        yield candidate.key, lambda candidate=candidate: _distance(candidate, base, reference, rows, texts)  # type: ignore[misc]


def _distance(
    candidate: Candidate, base: Settings, reference: Checkpoint, rows: text.Rows, texts: int
) -> Mapping[str, object]:
    loaded = load_checkpoint(candidate.settings(base), reference.info.device)
    if candidate == FUSED and loaded.kernels.few_rows is None:
        raise RuntimeError("the fused 8-bit product isn't used; the log has the reason")
    taken = rows.tokens[:texts]
    silent: tqdm[NoReturn] = tqdm(disable=True)
    found = measured(candidate, reference, loaded, taken, silent)[candidate.key]
    divergence = found["kl_nats"]
    assert isinstance(divergence, Mapping)
    return {
        **found,
        **rows.origin,
        "rows": len(taken),
        "reference": reference.info.describe(),
        "in_short": f"KL {divergence['mean']} nats per token from the unquantized weights",
    }
