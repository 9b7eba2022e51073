"""`make quality`: two models over the same rows, the text that is cut into them, and figures computed by hand."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import pytest
import torch
from aiohttp import web
from engine.engines import EMBEDDED
from engine.logits import oracle
from engine.prompts import random_prompt
from llama_engine.model.loader import LoadedModel
from llama_engine.settings import Settings
from llama_engine.text.tokenizer import Tokenizer

from perf.load.protocols import Target
from perf.quality import divergence, served
from perf.quality.__main__ import CANDIDATES, OUTLIER_COLUMNS, Candidate, compared, load
from perf.quality.divergence import Forward, Tokens, distances, from_text, perplexity, summary


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


@pytest.mark.parametrize(
    ("candidate", "least", "most"),
    # LLM.int8() has no terms. With outlier columns, some have two.
    [(OUTLIER_COLUMNS[2], 1.01, 1.99), (CANDIDATES[2], 0, 0)],
    ids=["int8_kv_int8", "int8_threshold_6"],
)
def test_a_candidate_with_its_threshold_and_terms_is_close_to_the_floats(
    fp32: LoadedModel, texts: list[list[int]], candidate: Candidate, least: float, most: float
) -> None:
    loaded = load(Settings(model=str(EMBEDDED)), torch.device("cpu"), candidate)
    entries: dict[str, Any] = compared(candidate, fp32, loaded, texts)
    entry = entries[candidate.key]
    assert abs(entry["perplexity"] / entries["fp32"]["perplexity"] - 1) < 0.02
    assert 0 < entry["kl_nats"]["mean"] < entry["kl_nats"]["p99"] <= entry["kl_nats"]["max"]
    assert entry["kl_nats"]["mean"] < 0.01
    assert 0.9 < entry["top1_agreement"] < 1
    assert entry["threshold"] == candidate.settings.get("int8_threshold", 0.0)
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


def test_an_unknown_rest_counts_as_one_symbol() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    found = served.distances(logits, [[(1, math.log(0.5)), (0, math.log(0.3))]])
    by_hand = 0.4 * math.log(0.4 / 0.3) + 0.3 * math.log(0.3 / 0.5) + 0.3 * math.log(0.3 / 0.2)
    assert float(found.divergence) == pytest.approx(by_hand, rel=1e-6)
    assert found.agrees.tolist() == [False]


async def test_every_server_is_asked_for_each_position_in_its_protocol() -> None:
    """Each answers that token 7 has the probability 0.5, at a position after as many tokens as it was sent."""
    known, text = [(7, math.log(0.5))], [1, 2, 3]

    async def answer(request: web.Request) -> web.Response:
        prompt = (await request.json())["prompt"]
        rank = {"rank": 1, "logprob": known[0][1]}
        return web.json_response({
            "/v1/completions": {"choices": [{"prompt_logprobs": [None, *[{"7": rank}] * (len(prompt) - 1)]}]},
            "/completion": {"completion_probabilities": [{"top_logprobs": [{"id": 7, "logprob": known[0][1]}]}]},
            "/log_probs": [known] * len(prompt),
        }[request.path])  # fmt: skip

    application = web.Application()
    application.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
    for key in ("vllm_int8", "llama_cpp_q4_1", "openvino_int8"):
        target = Target(key, "openai_completions", f"http://127.0.0.1:{runner.addresses[0][1]}", "llama")
        found = await asyncio.to_thread(served.positions, target, text)
        assert [[*map(tuple, position)] for position in found] == [known] * 2
    await site.stop()
    await runner.cleanup()
