"""Libraries that speak OpenAI's protocol, each a process in its own environment, which `make test-clients` installs.

A process takes a request as a line of JSON, and answers with one:
{"tokens": 12, "finish_reason": "length", "text": "…"}, or {"error": "…"}.
"""

from __future__ import annotations

import asyncio
import json
import os

from perf.environment import ROOT
from perf.soak.tally import Given

LIBRARIES = ("langchain", "litellm", "llama_index")
_ENVIRONMENTS = ROOT / ".work" / "clients"


class LibraryError(Exception):
    """A library's request failed, or its process has ended."""


def installed() -> list[str]:
    """Return the libraries whose environments are complete; the marker is created last."""
    return [name for name in LIBRARIES if (_ENVIRONMENTS / name / ".ready").exists()]


class Library:
    """A library's process, started with its first request. base_url: of the OpenAI endpoint."""

    def __init__(self, name: str, base_url: str, model: str) -> None:
        self.name = name
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(_ENVIRONMENTS),
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": "unused",
            "SOAK_MODEL": model,
            # LiteLLM's table of prices, LlamaIndex's tokenizer: nothing leads out of this machine.
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "HF_HUB_OFFLINE": "1",
        }
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def ask(self, prompt: str, max_tokens: int, temperature: float, streamed: bool) -> Given:
        """Send a chat of one message; one at a time. Raises LibraryError."""
        fields = {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, "streamed": streamed}
        async with self._turn:
            process = self._process = self._process or await self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(fields).encode() + b"\n")
            try:
                await process.stdin.drain()
                line = await process.stdout.readline()
            except ConnectionError as error:
                raise LibraryError(f"its process is gone: {error}") from error
        if not line:
            raise LibraryError(f"its process has ended with code {await process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise LibraryError(answer["error"])
        return Given(answer["text"], answer["finish_reason"], answer["tokens"])

    async def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            str(_ENVIRONMENTS / self.name / "bin" / "python"),
            *("-m", "perf.soak.library_loop", self.name),
            cwd=ROOT,
            env=self._environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
