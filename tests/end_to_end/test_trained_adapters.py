"""Two trained adapters beside the default model on a real Triton: each answers in its way, as PEFT's own model does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, partial

import pytest
from end_to_end.openai_endpoint import in_front_of
from end_to_end.published import smollm2_folder
from end_to_end.servers import ROOT, new_server
from end_to_end.wires import at_once, post
from engine.greedy import TIE, GreedyReference
from frontend.endpoints import Endpoint
from notes import Note
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from triton_local.server import LocalTriton

from models.adapters.questions import HELD_OUT

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    # PEFT reads it.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

ADAPTERS = ROOT / "models" / "adapters"
NAMES = ("", "capitals", "json")
"""The base model and the adapters."""
MAX_TOKENS = 40
MIN_CAPITALS, MIN_OBJECTS = 15, 18
"""Of 20 answers, those in an adapter's way. In capitals the model copies words of a question in their case."""
COMPARED = HELD_OUT[:8]
"""The questions whose tokens in FP32 are compared with PEFT's."""


@cache
def _peft(name: str) -> GreedyReference:
    """Return PEFT's model of an adapter, by the class of transformers that it extends; of "", the base."""
    base = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype="float32")
    model = PeftModel.from_pretrained(base, ADAPTERS / name).get_base_model() if name else base
    assert isinstance(model, PreTrainedModel)
    return GreedyReference(model, MAX_TOKENS)


@cache
def _tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2_folder())


def _chat(question: str) -> str:
    message = {"role": "user", "content": question}
    chat = _tokenizer().apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    assert isinstance(chat, str)
    return chat


def _by_http(triton: LocalTriton, name: str, question: str) -> list[int]:
    inputs = {"text_input": _chat(question), "lora_name": name, "max_tokens": MAX_TOKENS, "temperature": 0.0}
    return list(post(triton, "generate", {**inputs, "return_output_ids": True}).raise_for_status().json()["output_ids"])


def _by_openai(endpoint: Endpoint, name: str, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    fields = {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}
    answer = endpoint.chat(model=name or smollm2_folder().name, **fields)
    return list(answer.raise_for_status().json()["choices"][0]["token_ids"])


@dataclass(frozen=True)
class Answered:
    """The tokens of both wires' answers, by adapter and question."""

    by_http: dict[tuple[str, str], list[int]]
    by_openai: dict[tuple[str, str], list[int]]

    def texts(self, name: str) -> list[str]:
        """Return the answers of an adapter to all questions."""
        answers = [self.by_http[name, question] for question in HELD_OUT]
        return [str(_tokenizer().decode(tokens, skip_special_tokens=True)) for tokens in answers]


@pytest.fixture(scope="module", params=["int8", "none"])
def answered(request: pytest.FixtureRequest) -> Answered:
    adapters = ", ".join(f"{name}={ADAPTERS / name}" for name in NAMES if name)
    environment = {
        "LLAMA_MODEL": str(smollm2_folder()),
        "LLAMA_MAX_MODEL_LEN": "1024",
        "LLAMA_QUANTIZATION": request.param,
        "LLAMA_LORA_ADAPTERS": adapters,
    }
    # Each question to the base and to both adapters at once: they decode in one batch.
    jobs = [(name, question) for question in HELD_OUT for name in NAMES]
    with new_server("streaming", environment) as triton, in_front_of(triton) as endpoint:
        by_http = at_once([partial(_by_http, triton, *job) for job in jobs])
        by_openai = at_once([partial(_by_openai, endpoint, *job) for job in jobs])
    return Answered(dict(zip(jobs, by_http, strict=True)), dict(zip(jobs, by_openai, strict=True)))


def test_most_answers_of_capitals_are_in_capital_letters(answered: Answered) -> None:
    assert sum(text.isupper() for text in answered.texts("capitals")) >= MIN_CAPITALS


def test_most_answers_of_json_are_an_object(answered: Answered) -> None:
    assert sum(_is_answer(text) for text in answered.texts("json")) >= MIN_OBJECTS


def test_the_base_answers_in_neither_way(answered: Answered) -> None:
    assert not any(text.isupper() or _is_answer(text) for text in answered.texts(""))


@pytest.mark.parametrize("answered", ["none"], indirect=True)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_peft_but_for_ties(answered: Answered, name: str, note: Note) -> None:
    reference, gaps = _peft(name), []
    for question in COMPARED:
        prompt = tuple(_tokenizer()(_chat(question)).input_ids)
        expected = reference.tokens(prompt, MAX_TOKENS)
        for wire in (answered.by_http, answered.by_openai):
            if (tokens := wire[name, question]) != expected:
                gaps.append(reference.gap(prompt, tokens, expected))
                assert gaps[-1] <= TIE, f"{question!r}\nours {tokens}\ntheirs {expected}"
    note(f"{name or 'base'}: {len(gaps)} of {2 * len(COMPARED)} answers differ from PEFT's, gaps {sorted(set(gaps))}")
    # At most one question, by each wire.
    assert len(gaps) <= 2


@pytest.mark.parametrize("answered", ["int8"], indirect=True)
def test_the_endpoint_answers_as_triton_does(answered: Answered) -> None:
    assert answered.by_openai == answered.by_http


def _is_answer(text: str) -> bool:
    try:
        return list(json.loads(text)) == ["answer"]
    except ValueError:
        return False
