"""The article's two servers: FastAPI around transformers' `generate()`.

They speak as Triton's generate extension does:

    POST /v2/models/llama/generate {"text_input": "...", "max_tokens": 40}
      -> {"text_output": "...", "num_input_tokens": 12, "num_output_tokens": 40}

Greedy, and exactly `max_tokens` tokens. Requests are collected for at most the delay, their prompts are padded on the
left, and as many tokens are generated as the longest needs. Naive is a batch of one. Faithful to the article, faults
included: there is no queue limit, every request waits for the longest of its batch, later arrivals wait for the whole
batch, finished sequences are still computed, and one failing request fails its batch.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel, Field
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

PATH = "/v2/models/llama/generate"
DELAY_S = 0.01
"""Longest wait for a batch to fill."""


class Question(BaseModel):
    """A request. max_tokens: the exact number to generate."""

    text_input: str = Field(min_length=1)
    max_tokens: int = Field(ge=1)


Completion = dict[str, str | int]
"""An answer's fields, as above."""


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

    def complete(self, prompts: Sequence[list[int]], lengths: Sequence[int]) -> list[Completion]:
        """Return the prompts' completions of these lengths, computed as one batch, padded on the left."""
        # Padding while tokenizing would be state of the tokenizer, which another thread uses meanwhile.
        inputs = self.tokenizer.pad({"input_ids": list(prompts)}, return_tensors="pt").to(self.model.device)
        generated = self.model.generate(**inputs, max_new_tokens=max(lengths))  # type: ignore[misc]  # self is a protocol
        completions = generated[:, inputs["input_ids"].shape[1] :]
        return [
            {
                "text_output": str(self.tokenizer.decode(tokens[:length], skip_special_tokens=True)),
                "num_input_tokens": len(prompt),
                "num_output_tokens": length,
            }
            for tokens, prompt, length in zip(completions, prompts, lengths, strict=True)
        ]


def batching(pretrained: Pretrained, largest: int) -> FastAPI:
    """Return the server of this model with batches of at most `largest` requests."""
    queue: asyncio.Queue[tuple[list[int], int, asyncio.Future[Completion]]] = asyncio.Queue()

    async def run() -> None:
        while True:
            batch = [await queue.get()]
            with suppress(TimeoutError):  # a smaller batch, then
                async with asyncio.timeout(DELAY_S):
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

    @server.post(PATH)
    async def generate(question: Question) -> Completion:
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        await queue.put((pretrained.tokenizer(question.text_input)["input_ids"], question.max_tokens, answer))
        return await answer

    return server


def main() -> None:
    """Load the model and serve it until a signal ends the process."""
    parser = argparse.ArgumentParser(prog="python -m perf.servers.fastapi_server", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a folder")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), required=True)
    parser.add_argument("--threads", type=int, required=True, help="of torch")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="largest batch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pretrained = Pretrained(options.model, options.dtype)
    server = batching(pretrained, options.batch)
    print(f"dtype {options.dtype}, {torch.get_num_threads()} threads, model {options.model}", flush=True)
    uvicorn.run(server, host="127.0.0.1", port=options.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
