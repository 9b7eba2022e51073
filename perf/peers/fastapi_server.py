"""What the article's two servers have in common: the wire, the options, and a model loaded with transformers.

    POST /generate {"prompt": "...", "max_tokens": 40} -> {"text": "...", "tokens": 40}

Greedy, and exactly `max_tokens` tokens: end tokens are switched off, so that every server does the same work.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

DTYPES = ("float32", "float16", "bfloat16")


class Question(BaseModel):
    """A request. max_tokens: exactly so many are generated."""

    prompt: str = Field(min_length=1)
    max_tokens: int = Field(ge=1)


class Completion(BaseModel):
    """An answer. text: without the prompt. tokens: how many it has."""

    text: str
    tokens: int


@dataclass(frozen=True)
class Pretrained:
    """A model and its tokenizer."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def load(cls, checkpoint: Path, dtype: str) -> Pretrained:
        """Load it, onto the GPU if there is one."""
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype), device_map={"": device})
        model.generation_config = GenerationConfig(do_sample=False, pad_token_id=tokenizer.pad_token_id)
        return cls(model.eval(), tokenizer)

    def tokens(self, question: Question) -> list[int]:
        """Return the prompt's tokens. Raises HTTPException 400 for a question that the context has no room for."""
        prompt: list[int] = self.tokenizer(question.prompt)["input_ids"]
        needed, context = len(prompt) + question.max_tokens, self.model.config.max_position_embeddings
        if needed > context:
            raise HTTPException(400, f"prompt and max_tokens are {needed} tokens, must be at most {context}")
        return prompt

    def generate(self, prompts: Sequence[list[int]], tokens: int) -> torch.Tensor:
        """Return the prompts' completions, [prompts, tokens]; the prompts are padded on the left, and go together."""
        # Padding while tokenizing would be a state of the tokenizer's, and another thread tokenizes meanwhile.
        inputs = self.tokenizer.pad({"input_ids": list(prompts)}, return_tensors="pt").to(self.model.device)
        # Its self is a protocol that the class doesn't meet.
        generated = self.model.generate(**inputs, max_new_tokens=tokens)  # type: ignore[misc]
        assert isinstance(generated, torch.Tensor)
        return generated[:, inputs["input_ids"].shape[1] :]

    def completion(self, tokens: torch.Tensor) -> Completion:
        """Return the tokens of one row as an answer."""
        return Completion(text=str(self.tokenizer.decode(tokens, skip_special_tokens=True)), tokens=len(tokens))


def options(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of both."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True, help="a folder")
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    parser.add_argument("--threads", type=int, required=True, help="of torch")
    parser.add_argument("--port", type=int, required=True)
    return parser


def loaded(chosen: argparse.Namespace) -> Pretrained:
    """Load the model, to be computed with so many threads."""
    torch.set_num_threads(chosen.threads)
    return Pretrained.load(chosen.model, chosen.dtype)


def serve(application: FastAPI, chosen: argparse.Namespace) -> None:
    """Serve until a signal ends it."""
    print(f"dtype {chosen.dtype}, {torch.get_num_threads()} threads, model {chosen.model}", flush=True)
    uvicorn.run(application, host="127.0.0.1", port=chosen.port, log_level="warning", access_log=False)
