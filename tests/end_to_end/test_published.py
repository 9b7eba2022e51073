"""Published checkpoints on a real Triton: HTTP, gRPC and OpenAI's protocol, token for token as transformers.

The folders are served in FP32, the GGUF files as they are saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
from end_to_end.openai_endpoint import in_front_of
from end_to_end.published import gemma_file, gemma_folder, smollm2_file, smollm2_folder
from end_to_end.servers import new_server
from end_to_end.streams import GrpcStream
from end_to_end.wires import at_once, post
from engine.greedy import TIE, GreedyReference
from frontend.endpoints import Endpoint
from notes import Note
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from triton_local.server import LocalTriton

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

MAX_TOKENS = 24
NEAR_TIE = 0.25
"""Largest gap of logits in FP32 where an answer by a file as saved may differ."""
QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three fruits.",
    "How many days has a week? Answer 7, 8 or 12345.",
    "Translate to French: good morning 😀",
    "def fibonacci(n):\n    # in Python",
    "Why is the sky blue?",
    "Wer schrieb den Faust? Grüße über alles",
    "Give me a JSON object with a name.",
    "Tell me a joke about two penguins.",
]
BEGINNINGS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "import numpy as np\n\ndef mean(values):\n    ",
    "1, 2, 3, 4, 5, 12345,",
    "Die Hauptstadt von Österreich ist",
    "The three most common fruits are",
    "Q: Why is the sky blue?\nA:",
    "😀 你好 means",
    "Water boils at a temperature of",
    "Dear Sir or Madam,\n\n",
]


Tokens = list[int]


@dataclass(frozen=True)
class Served:
    """A checkpoint on a Triton behind the OpenAI endpoint, and transformers' tokenizer and model in FP32."""

    triton: LocalTriton
    endpoint: Endpoint
    name: str
    tokenizer: PreTrainedTokenizerBase
    reference: GreedyReference
    largest_gap: float

    def texts(self) -> list[str]:
        return QUESTIONS if self.tokenizer.chat_template else BEGINNINGS

    def prompt(self, text: str) -> str:
        """Return the chat of a question, or the text itself if there is no template."""
        if not self.tokenizer.chat_template:
            return text
        message = {"role": "user", "content": text}
        chat = self.tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        assert isinstance(chat, str)
        return chat

    def tokens(self, text: str) -> Tokens:
        """Return the prompt's tokens by transformers."""
        return list(self.tokenizer(self.prompt(text)).input_ids)

    def inputs(self, text: str) -> dict[str, object]:
        flags = {"return_output_ids": True, "return_log_probs": True}
        return {"text_input": self.prompt(text), "max_tokens": MAX_TOKENS, "temperature": 0.0, **flags}


Wire = Callable[[Served, str], Tokens]
"""Returns the tokens of an answer, with the end token."""


def by_http(served: Served, text: str) -> Tokens:
    return list(post(served.triton, "generate", served.inputs(text)).raise_for_status().json()["output_ids"])


def by_grpc(served: Served, text: str) -> Tokens:
    with GrpcStream(served.triton) as stream:
        stream.ask({**served.inputs(text), "stream": True})
        tokens = [int(token) for chunk in stream.outputs() for token in chunk["output_ids"].ravel()]
        stream.end()
    return tokens


def by_openai(served: Served, text: str) -> Tokens:
    fields = {"model": served.name, "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}
    if served.tokenizer.chat_template:
        answer = served.endpoint.chat(messages=[{"role": "user", "content": text}], **fields)
    else:
        answer = served.endpoint.complete(prompt=text, **fields)
    return list(answer.raise_for_status().json()["choices"][0]["token_ids"])


WIRES: list[Wire] = [by_http, by_grpc, by_openai]


@cache
def transformers_of(folder: Path) -> tuple[PreTrainedTokenizerBase, GreedyReference]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    return AutoTokenizer.from_pretrained(folder), GreedyReference(model, MAX_TOKENS)


CHECKPOINTS = {
    "SmolLM2 file": (smollm2_file, smollm2_folder),
    "Gemma file": (gemma_file, gemma_folder),
    "SmolLM2 folder, FP32": (smollm2_folder, smollm2_folder),
    "Gemma folder, FP32": (gemma_folder, gemma_folder),
}
"""What is served, and the folder for transformers."""
FILES = list(CHECKPOINTS)[:2]


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    path, folder = (fetched() for fetched in CHECKPOINTS[request.param])
    environment = {"LLAMA_MODEL": str(path), "LLAMA_MAX_MODEL_LEN": "1024"}
    if path == folder:
        environment["LLAMA_QUANTIZATION"] = "none"
    largest_gap = TIE if path == folder else NEAR_TIE
    with new_server("streaming", environment) as triton, in_front_of(triton) as endpoint:
        yield Served(triton, endpoint, path.name.removesuffix(".gguf"), *transformers_of(folder), largest_gap)


@pytest.mark.parametrize("served", CHECKPOINTS, indirect=True)
def test_greedy_tokens_are_those_of_generate_but_for_ties(served: Served, note: Note) -> None:
    jobs = [(text, wire) for text in served.texts() for wire in WIRES]
    answers = at_once([partial(wire, served, text) for text, wire in jobs])
    gaps = []
    for (text, wire), tokens in zip(jobs, answers, strict=True):
        prompt = tuple(served.tokens(text))
        expected = served.reference.tokens(prompt, MAX_TOKENS)
        if tokens != expected:
            gaps.append(served.reference.gap(prompt, tokens, expected))
            assert gaps[-1] <= served.largest_gap, f"{wire.__name__}: {text!r}\nours {tokens}\ntheirs {expected}"
    note(f"{served.name}: {len(gaps)} of {len(jobs)} answers differ from generate()'s, gaps {sorted(set(gaps))}")
    # In FP32 at most one prompt, by each wire.
    assert served.largest_gap > TIE or len(gaps) <= len(WIRES)


@pytest.mark.parametrize("served", CHECKPOINTS, indirect=True)
def test_prompts_have_the_tokens_of_transformers(served: Served) -> None:
    for text in served.texts():
        answer = post(served.triton, "generate", {**served.inputs(text), "max_tokens": 1}).json()
        assert served.endpoint.tokens(served.prompt(text)) == served.tokens(text)
        assert answer["num_input_tokens"] == len(served.tokens(text))


@pytest.mark.parametrize("served", FILES, indirect=True)
def test_log_probs_alone_are_the_bits_of_those_among_others(served: Served) -> None:
    asks = [partial(post, served.triton, "generate", served.inputs(text)) for text in served.texts()]
    among = [answer.json()["output_log_probs"] for answer in at_once(asks)]
    assert [ask().json()["output_log_probs"] for ask in asks] == among
