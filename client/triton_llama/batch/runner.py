"""Runs a batch: several requests at a time, each answer to its file."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from triton_llama.batch.answer_file import ID_PREFIX, AnswerFile
from triton_llama.batch.progress import Progress
from triton_llama.batch.request_lines import BatchRequest
from triton_llama.batch.sender import Sender, SendOptions, open_session
from triton_llama.errors import LlamaTimeoutError


@dataclass(frozen=True)
class BatchRunner:
    """Sends a batch to an endpoint, and its answers to their files."""

    answers: AnswerFile
    errors: AnswerFile
    progress: Progress
    options: SendOptions

    async def run(self, requests: Iterator[BatchRequest]) -> None:
        """Send the requests. When this is cancelled, those under way are dropped, and the files don't have them.

        Raises AccessDeniedError, LlamaConnectionError for a wrong address, and OSError where a file can't be written.
        """
        showing = asyncio.create_task(self.progress.show())
        try:
            async with open_session(self.options) as http, asyncio.TaskGroup() as group:
                sender = Sender(http, self.options, self.progress)
                for _ in range(self.options["concurrency"]):
                    group.create_task(self._work(sender, requests))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        finally:
            showing.cancel()

    async def _work(self, sender: Sender, requests: Iterator[BatchRequest]) -> None:
        for request in requests:
            answer: dict[str, object] = {"id": f"{ID_PREFIX}{uuid.uuid4().hex}", "custom_id": request.custom_id}
            try:
                response = await sender.send(request)
            except LlamaTimeoutError as error:
                self._fail(answer | {"response": None, "error": {"code": "batch_expired", "message": str(error)}})
                continue
            answer |= {"response": response, "error": None}
            if response["status_code"] == 200 and isinstance(response["body"], dict):
                self.answers.append(answer)
                self.progress.answered += 1
                self.progress.tokens += _count_tokens(response["body"])
            else:
                self._fail(answer)

    def _fail(self, answer: dict[str, object]) -> None:
        self.errors.append(answer)
        self.progress.failed += 1


def _count_tokens(body: dict[str, Any]) -> int:
    """Return the generated tokens; of embeddings, which have none, the prompts'."""
    usage = body.get("usage") or {}
    names = ("completion_tokens", "output_tokens", "prompt_tokens")
    return next((usage[name] for name in names if name in usage), 0)
