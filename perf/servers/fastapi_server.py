"""The article's two servers: FastAPI around transformers' `generate()`.

    POST /generate {"prompt": "...", "max_tokens": 40} -> {"text": "...", "tokens": 40}

Greedy, and exactly `max_tokens` tokens: end tokens are disabled, so that every server does the same work. Both are
faithful to the article, faults included: there is no queue limit, and a client that disconnects is served all the same.

- **Naive** (no `--batch`): one request at a time, computed on the event loop. Meanwhile there is no second request, no
  health check, no shutdown. Every request reads all weights for itself.
- **Batching** (`--batch`, `--delay-ms`): an asyncio queue collects requests for at most the delay, pads their prompts
  on the left and generates as many tokens as the longest needs. Every request waits for the longest of its batch, later
  arrivals wait for the whole batch, finished rows are still computed, and one failing request fails its batch.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


class Question(BaseModel):
    """A request. max_tokens: the exact number to generate."""

    prompt: str = Field(min_length=1)
    max_tokens: int = Field(ge=1)


class Completion(BaseModel):
    """An answer. text: without the prompt. tokens: their number."""

    text: str
    tokens: int


class Pretrained:
    """A model and its tokenizer, on the GPU if there is one."""

    def __init__(self, checkpoint: Path, dtype: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        device = {"": "cuda" if torch.cuda.is_available() else "cpu"}
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype), device_map=device)
        self.model.generation_config = GenerationConfig(do_sample=False, pad_token_id=self.tokenizer.pad_token_id)
        self.model.eval()

    def tokens(self, question: Question) -> list[int]:
        """Return the prompt's tokens. Raises HTTPException 400 for a request that exceeds the context."""
        prompt: list[int] = self.tokenizer(question.prompt)["input_ids"]
        needed, context = len(prompt) + question.max_tokens, self.model.config.max_position_embeddings
        if needed > context:
            raise HTTPException(400, f"prompt and max_tokens are {needed} tokens, must be at most {context}")
        return prompt

    def complete(self, prompts: Sequence[list[int]], lengths: Sequence[int]) -> list[Completion]:
        """Return the prompts' completions of these lengths, computed as one batch, padded on the left."""
        # Padding while tokenizing would be state of the tokenizer, which another thread uses meanwhile.
        inputs = self.tokenizer.pad({"input_ids": list(prompts)}, return_tensors="pt").to(self.model.device)
        generated = self.model.generate(**inputs, max_new_tokens=max(lengths))  # type: ignore[misc]  # self is a protocol
        rows = generated[:, inputs["input_ids"].shape[1] :]
        return [
            Completion(text=str(self.tokenizer.decode(row[:length], skip_special_tokens=True)), tokens=length)
            for row, length in zip(rows, lengths, strict=True)
        ]


def naive(pretrained: Pretrained) -> FastAPI:
    """Return the naive server of this model."""
    server = FastAPI()

    @server.post("/generate")
    async def generate(question: Question) -> Completion:
        (completion,) = pretrained.complete([pretrained.tokens(question)], [question.max_tokens])
        return completion

    return server


def batching(pretrained: Pretrained, largest: int, delay_s: float) -> FastAPI:
    """Return the batching server of this model."""
    queue: asyncio.Queue[tuple[list[int], int, asyncio.Future[Completion]]] = asyncio.Queue()

    async def run() -> None:
        while True:
            batch = [await queue.get()]
            with suppress(TimeoutError):  # a smaller batch, then
                async with asyncio.timeout(delay_s):
                    while len(batch) < largest:
                        batch.append(await queue.get())
            prompts, lengths, answers = zip(*batch, strict=True)
            try:
                completions = await asyncio.to_thread(pretrained.complete, prompts, lengths)
            except Exception as error:  # noqa: BLE001  every request of the batch gets it, and the loop goes on
                for answer in answers:
                    answer.set_exception(error)
            else:
                for answer, completion in zip(answers, completions, strict=True):
                    answer.set_result(completion)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(run())
        yield
        running.cancel()

    server = FastAPI(lifespan=lifespan)

    @server.post("/generate")
    async def generate(question: Question) -> Completion:
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        await queue.put((pretrained.tokens(question), question.max_tokens, answer))
        return await answer

    return server


def main() -> None:
    """Load the model and serve it until a signal ends the process."""
    parser = argparse.ArgumentParser(prog="python -m perf.servers.fastapi_server", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a folder")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), required=True)
    parser.add_argument("--threads", type=int, required=True, help="of torch")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--batch", type=int, help="largest batch; without it, one request at a time")
    parser.add_argument("--delay-ms", type=float, default=10.0, help="longest wait for a batch to fill")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pretrained = Pretrained(options.model, options.dtype)
    server = naive(pretrained) if options.batch is None else batching(pretrained, options.batch, options.delay_ms / 1e3)
    print(f"dtype {options.dtype}, {torch.get_num_threads()} threads, model {options.model}", flush=True)
    uvicorn.run(server, host="127.0.0.1", port=options.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
