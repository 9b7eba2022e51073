"""`make quality`: two models over the same rows, the text that is cut into them, and figures computed by hand."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.engines import EMBEDDED
from engine.oracle import oracle
from engine.prompts import random_prompt
from llama_engine.model.loader import LoadedModel
from llama_engine.settings import Settings
from llama_engine.text.tokenizer import Tokenizer

from perf.quality import divergence, llama_cpp
from perf.quality.__main__ import BY_ROW, CANDIDATES, Candidate, compared, load
from perf.quality.divergence import Forward, Tokens, distances, perplexity, summary
from perf.quality.text import PROSE, from_text


@pytest.fixture(scope="module")
def texts(fp32: LoadedModel) -> list[list[int]]:
    """Five texts of unequal lengths, one longer than a pass of the head."""
    randomness = random.Random(11)
    lengths = [range(20, 40)] * 4 + [range(divergence.POSITIONS_AT_ONCE + 9, divergence.POSITIONS_AT_ONCE + 10)]
    return [list(random_prompt(fp32.tokenizer, length, randomness)[1]) for length in lengths]


def test_the_perplexity_is_the_one_by_transformers(fp32: LoadedModel, texts: list[list[int]]) -> None:
    tokens = distances(Forward(fp32), Forward(fp32), texts)
    with torch.inference_mode():
        inputs = [torch.tensor([text]) for text in texts]
        loss = sum(float(oracle(fp32)(ids, labels=ids).loss) * (ids.numel() - 1) for ids in inputs)
    predicted = sum(ids.numel() - 1 for ids in inputs)
    assert perplexity(tokens.loss) == pytest.approx(math.exp(loss / predicted), rel=1e-5)


@pytest.mark.parametrize("candidate", [*BY_ROW, *CANDIDATES], ids=lambda candidate: candidate.key)
def test_int8_is_close_to_the_reference_but_not_equal(
    fp32: LoadedModel, texts: list[list[int]], candidate: Candidate
) -> None:
    loaded = load(Settings(model=str(EMBEDDED)), torch.device("cpu"), candidate)
    entries: dict[str, Any] = compared(candidate, fp32, loaded, texts)
    entry = entries[candidate.key]
    assert abs(entry["perplexity"] / entries["fp32"]["perplexity"] - 1) < 0.02
    assert 0 < entry["kl_nats"]["mean"] < entry["kl_nats"]["p99"] <= entry["kl_nats"]["max"]
    assert entry["kl_nats"]["mean"] < 0.01
    assert 0.9 < entry["top1_agreement"] < 1


@pytest.mark.parametrize("candidate", [*BY_ROW, *CANDIDATES], ids=lambda candidate: candidate.key)
def test_a_candidate_is_loaded_with_its_threshold_and_terms(
    fp32: LoadedModel, texts: list[list[int]], candidate: Candidate
) -> None:
    loaded = load(Settings(model=str(EMBEDDED)), torch.device("cpu"), candidate)
    entries: dict[str, Any] = compared(candidate, fp32, loaded, texts[:1])
    entry = entries[candidate.key]
    assert entry["threshold"] == candidate.settings.get("int8_threshold", 0.0)
    # LLM.int8() has no terms. By row, some have two.
    terms = "none" if entry["threshold"] else candidate.settings.get("int8_terms", "by row")
    least, most = {"none": (0, 0), "by row": (1.01, 1.99), "1": (1, 1), "2": (1.99, 2)}[terms]
    assert least <= entry.get("products", 0) <= most


def test_every_token_of_a_text_is_predicted_once_after_a_bos(tokenizer: Tokenizer) -> None:
    # Two newlines, and characters of more than one byte.
    text = "Ein schöner Text – mit\r\nZeilen. " * 40
    rows = from_text(text, tokenizer.pretrained, 64)
    assert max(map(len, rows)) == 64
    predicted = [token for row in rows for token in row[1:]]
    assert b"".join(tokenizer.vocabulary.token_bytes[token] for token in predicted) == text.encode()
    assert {row[0] for row in rows} == {tokenizer.pretrained.bos_token_id}


def test_the_summary_equals_the_one_by_hand() -> None:
    columns = ([1.0, 2.0, 3.0], [1.5, 2.0, 4.0], [0.1, 0.3, 0.2], [True, True, False])
    tokens = Tokens(*map(torch.tensor, columns))
    assert perplexity(tokens.reference_loss) == pytest.approx(math.exp(2))
    assert summary(tokens) == {
        "perplexity": round(math.exp(2.5), 4),
        "kl_nats": {"mean": 0.2, "p99": 0.3, "max": 0.3},
        "top1_agreement": 0.666667,
        "loss_difference": {"mean": 0.5, "standard_error": 0.28868},
    }


def test_windows_are_whole_and_their_second_half_is_scored(fp32: LoadedModel) -> None:
    text = PROSE.read_text()
    rows = llama_cpp.windows(text, fp32)
    tokens = fp32.tokenizer.encode(text.rstrip())
    assert [len(row) for row in rows] == [512] * (len(tokens) // 512)
    assert rows[1] == [fp32.tokenizer.pretrained.bos_token_id, *tokens[513:1024]]
    with torch.inference_mode():
        logits = oracle(fp32)(torch.tensor(rows[:1])).logits[0, 256:-1]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(rows[0][257:]))
    assert llama_cpp.by_engine(Forward(fp32), rows[:1]) == pytest.approx(math.exp(float(loss)), rel=1e-5)


def test_a_text_of_less_than_two_windows_is_refused(fp32: LoadedModel) -> None:
    with pytest.raises(ValueError, match="tokens; 1024 are needed"):
        llama_cpp.windows("Alice was not a bit hurt. " * 20, fp32)


def test_the_perplexity_is_read_from_llama_cpps_output(tmp_path: Path) -> None:
    program = tmp_path / "llama-perplexity"
    program.write_text('#!/bin/sh\necho "0.00 I Final estimate: PPL = 12.3456 +/- 0.1" >&2\n')
    program.chmod(0o755)
    assert llama_cpp.by_llama_cpp(program, tmp_path / "it.gguf", PROSE) == 12.3456


def test_a_program_that_fails_is_an_error_with_its_last_line() -> None:
    with pytest.raises(ValueError, match=r"sh printed no perplexity, but /bin/sh: "):
        llama_cpp.by_llama_cpp(Path("/bin/sh"), Path("it.gguf"), PROSE)
