"""Outputs that are there where a request asks for them: shapes, the JSON of log probabilities, times."""

import json
import math
from typing import Any, cast

import numpy as np
import torch
from engine import backend_utils  # noqa: F401 - stands for the module that the next ones import
from llama_engine.engine.sequence import Sequence
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.sampling.log_probs import TokenLogProbs
from llama_engine.text.output_text import OutputText
from llama_engine.text.tokenizer import Tokenizer, Vocabulary
from llama_engine.triton.outputs import LogProbsWriter, Span, optional_outputs
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase


class _Names:
    def convert_ids_to_tokens(self, token: int) -> str | None:
        return "</s>" if token == 2 else None


TOKENIZER = Tokenizer(
    cast(PreTrainedTokenizerBase, _Names()), Vocabulary([b"a", b"b ", b"", "é".encode()[:1], b"", *[b"x"] * 9])
)


def _sequence(tokens: int, **values: object) -> Sequence:
    """A sequence of three prompt tokens whose n-th token has the log probability -n."""
    request = GenerationRequest("abc", (5, 6, 7), max_tokens=9, **values)  # type: ignore[arg-type]  # values are fields
    output = OutputText(min_tokens=0, max_tokens=tokens, stop_words=[], end_tokens=[])
    sequence = Sequence(request, output)
    for token in range(tokens):
        if request.needs_log_probs:
            always = -float(token + 1)
            sequence.next_log_probs = TokenLogProbs(token, always, 7, ((3, -0.5), (token, always)))
        sequence.append(token, b"x")
    if request.prompt_logprobs is not None:
        first, second = TokenLogProbs(6, -1.0, 3, ((8, -0.25), (9, -0.25))), TokenLogProbs(7, -math.inf, 9)
        sequence.prompt_log_probs = [first, second]
    return sequence


def _whole(sequence: Sequence) -> Span:
    return Span(sequence, 0, sequence.num_output_tokens)


def _outputs(*spans: Span) -> dict[str, NDArray[Any]]:
    """Return the optional outputs of the last response by name."""
    return {
        tensor.name(): tensor.as_numpy() for tensor in optional_outputs(spans, LogProbsWriter(TOKENIZER), final=True)
    }


def test_an_element_without_an_embedding_has_zeros_beside_others() -> None:
    generated, embedded = _sequence(2), _sequence(0, return_embedding=True)
    generated.finish(generated.completion())
    embedded.pooled = torch.tensor([0.25, -1.0])
    embedded.finish_embedding()
    assert _outputs(_whole(generated), _whole(embedded))["embedding"].tolist() == [[0.0, 0.0], [0.25, -1.0]]


def test_log_probabilities_are_padded_with_zeros() -> None:
    spans = [_whole(_sequence(tokens, return_log_probs=tokens != 4)) for tokens in (3, 1, 4)]
    outputs = _outputs(*spans)
    assert set(outputs) == {"output_log_probs", "cum_log_probs"}
    assert outputs["output_log_probs"].tolist() == [[-1, -2, -3, 0], [-1, 0, 0, 0], [0, 0, 0, 0]]
    assert outputs["cum_log_probs"].tolist() == [-6, -1, 0]
    assert {output.dtype for output in outputs.values()} == {np.dtype(np.float32)}


def test_the_likeliest_tokens_are_json_as_of_the_vllm_backend() -> None:
    spans = [_whole(_sequence(3, num_logprobs=2)), _whole(_sequence(1))]
    outputs = _outputs(*spans)
    assert set(outputs) == {"logprobs"}
    first, second = (json.loads(text) for text in outputs["logprobs"])
    assert second is None
    likeliest = {"logprob": -0.5, "rank": 1, "decoded_token": "\ufffd", "bytes": [0xC3]}
    assert first == [
        {"0": {"logprob": -1.0, "rank": 7, "decoded_token": "a"}, "3": likeliest},
        {"1": {"logprob": -2.0, "rank": 7, "decoded_token": "b "}, "3": likeliest},
        {"2": {"logprob": -3.0, "rank": 7, "decoded_token": "</s>", "bytes": []}, "3": likeliest},
    ]
    # The sampled token comes first.
    assert [next(iter(entries)) for entries in first] == ["0", "1", "2"]


def test_the_json_of_a_prompts_log_probabilities() -> None:
    outputs = _outputs(_whole(_sequence(1, prompt_logprobs=2)), _whole(_sequence(1)))
    assert set(outputs) == {"prompt_logprobs"}
    first, second = outputs["prompt_logprobs"]
    assert second == b"null"
    nothing, first_entry, other = json.loads(first)
    assert nothing is None
    # Equally likely tokens have the same rank.
    assert {token: (entry["logprob"], entry["rank"]) for token, entry in first_entry.items()} == {
        "6": (-1.0, 3), "8": (-0.25, 1), "9": (-0.25, 1),
    }  # fmt: skip
    assert {token: entry["logprob"] for token, entry in other.items()} == {"7": -9999.0}
