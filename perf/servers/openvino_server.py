"""OpenVINO GenAI's continuous batching behind OpenAI's completions, for the Python of .work/openvino.

    POST /v1/completions {"prompt": "…", "max_tokens": 40}    a stream of exactly so many tokens, greedy
    POST /log_probs {"prompt": [1, 2, 3], "top": 1000}        log probabilities of the next token at every position

The pipeline has no log probabilities but the generated tokens': those are of the same files, compiled by the same
plugin with the same defaults.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from functools import cache
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import openvino
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

Waiting = tuple[list[int], int, "asyncio.Queue[list[int]]"]
"""A prompt, how many tokens it asks for, and where they go."""


def generate(
    pipeline: ContinuousBatchingPipeline, arrivals: SimpleQueue[Waiting], loop: asyncio.AbstractEventLoop
) -> None:
    """Step the pipeline while it has requests, and hand each step's tokens over in one wake-up of the loop."""
    # GenAI exports no name of its handles' class.
    running: list[tuple[Any, asyncio.Queue[list[int]]]] = []
    numbers = count()

    def deliver(tokens: list[tuple[asyncio.Queue[list[int]], list[int]]]) -> None:
        for queue, ids in tokens:
            queue.put_nowait(ids)

    while True:
        while not running or not arrivals.empty():
            prompt, tokens, queue = arrivals.get()
            config = GenerationConfig(max_new_tokens=tokens, ignore_eos=True)
            handle = pipeline.add_request(next(numbers), openvino.Tensor(np.array([prompt], np.int64)), config)
            running.append((handle, queue))
        pipeline.step()
        ready = [(queue, handle.read()[0].generated_ids) for handle, queue in running if handle.can_read()]
        running = [(handle, queue) for handle, queue in running if handle.get_status().name == "RUNNING"]
        loop.call_soon_threadsafe(deliver, ready)
        # A step holds the interpreter's lock: without a pause the loop would read no request for seconds.
        time.sleep(0.001)


def application(folder: Path, threads: int, slots: int) -> FastAPI:
    """Return the server of an exported model."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    scheduler = SchedulerConfig()
    scheduler.max_num_seqs = slots
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": threads}
    pipeline = ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
    arrivals: SimpleQueue[Waiting] = SimpleQueue()
    server = FastAPI()

    @server.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        if not started.is_set():
            started.set()
            arguments = (pipeline, arrivals, asyncio.get_running_loop())
            threading.Thread(target=generate, args=arguments, daemon=True).start()
        fields = await request.json()
        prompt, tokens = tokenizer.encode(fields["prompt"]).ids, fields["max_tokens"]
        queue: asyncio.Queue[list[int]] = asyncio.Queue()
        arrivals.put((prompt, tokens, queue))
        return StreamingResponse(stream(len(prompt), tokens, queue), media_type="text/event-stream")

    async def stream(prompt: int, tokens: int, queue: asyncio.Queue[list[int]]) -> AsyncIterator[str]:
        text, sent = DecodeStream(skip_special_tokens=True), 0
        while sent < tokens:
            ids = await queue.get()
            sent += len(ids)
            chunk = "".join(text.step(tokenizer, each) or "" for each in ids)
            choice = {"index": 0, "text": chunk, "finish_reason": "length" if sent >= tokens else None}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
        usage = {"prompt_tokens": prompt, "completion_tokens": sent, "total_tokens": prompt + sent}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"

    @server.post("/log_probs")
    async def log_probs(request: Request) -> list[list[tuple[int, float]]]:
        fields = await request.json()
        ids = np.array([fields["prompt"]], np.int64)
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "beam_idx": np.zeros(1, np.int32)}
        inputs["position_ids"] = np.arange(ids.size)[None]
        # A request's state is the cache of what it was asked before.
        logits = compiled().create_infer_request().infer(inputs)["logits"][0].astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        best = np.argsort(-logits)[:, : fields["top"]]
        return [[(token, values[token]) for token in row] for row, values in zip(best.tolist(), logits, strict=True)]

    @cache
    def compiled() -> openvino.CompiledModel:
        return openvino.Core().compile_model(str(folder / "openvino_model.xml"), "CPU", properties)

    started = threading.Event()
    return server


def main() -> None:
    """Load the model and serve it until a signal ends the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a folder as optimum-cli exports it")
    for name in ("threads", "slots", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    server = application(options.model, options.threads, options.slots)
    uvicorn.run(server, host="127.0.0.1", port=options.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
