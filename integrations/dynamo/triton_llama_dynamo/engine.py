"""Dynamo's LLMEngine over one Triton: start, generate, health, capacity and KV events.

A cancelled request's gRPC stream is closed, which frees its slot. When Triton is lost, its requests end with
EngineShutdown, the error after which Dynamo's frontend continues them at another worker, and this worker leaves.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any, NoReturn

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.logprobs import parse_logprob_options
from dynamo.common.backend.publisher import ComponentSnapshot, ZmqSource
from dynamo.llm.exceptions import EngineShutdown, HttpError, InvalidArgument, Unknown
from dynamo.runtime import Context
from triton_llama.address import ServerAddress
from triton_llama.completion import Chunk
from triton_llama.errors import (
    OTHER_MODEL,
    LlamaConnectionError,
    OverloadedError,
    RejectedInputError,
    ServerError,
    TritonLlamaError,
    is_interruption,
)
from triton_llama.metrics_page import NoMetricsError, metrics_address, read_samples
from triton_llama_openai.triton.description import Description
from triton_llama_openai.triton.triton_client import OUTPUTS_OF_ONE, TritonClient
from triton_llama_openai.triton_load import TritonLoad, triton_load

from triton_llama_dynamo.model_files import write_model_files
from triton_llama_dynamo.request import Answer, tensors_of

if TYPE_CHECKING:
    from dynamo._core.backend import SnapshotPublisher

LOG = logging.getLogger("triton_llama_dynamo")

_INTERVAL_S = 1.0
"""Between two looks at Triton."""
_PROBE_S = 5.0
_MAX_FAILURES = 2
"""Consecutive failed probes before Triton is lost."""
_DRAIN_POLL_S = 0.1
_DESCRIPTION_S = 60.0
_REQUEST_S = 24 * 3600.0
"""A request's timeout is the frontend's."""


class TritonEngine(LLMEngine):  # type: ignore[misc]  # Dynamo isn't installed where the types are checked
    """One model of one Triton.

    metrics: HOST:PORT of Triton's metrics. files: folder of the tokenizer's files. kv_events: address of the model's
    setting `kv_events`, as seen from here, or None.
    """

    def __init__(
        self, triton: TritonClient, description: Description, metrics: str, files: Path, kv_events: str | None
    ) -> None:
        self._triton = triton
        self._description = description
        self._metrics = metrics
        self._files = files
        self._kv_events = kv_events
        self._num_requests = 0
        self._publisher: SnapshotPublisher | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.lost = False
        """Whether Triton was lost while this worker served."""

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[TritonEngine, WorkerConfig]:
        """Wait for Triton; return the engine and Dynamo's configuration of the worker."""
        args = _parser().parse_args(argv)
        server = ServerAddress.parse(args.triton, "grpc")
        triton = TritonClient(server, args.triton_model)
        description = await _description(triton)
        # Of the same name for all workers of a model: Dynamo's frontends compare it.
        files = Path(gettempdir()) / f"triton-llama-{description.digest[:16]}"
        write_model_files(description, files)
        metrics = args.triton_metrics or metrics_address(server)
        engine = cls(triton, description, metrics, files, args.kv_events)
        config = WorkerConfig(
            namespace=args.namespace,
            model_name=str(files),
            served_model_name=args.model_name or Path(description.name).name,
            component=args.component,
            discovery_backend=args.discovery_backend,
            request_plane=args.request_plane,
            event_plane=args.event_plane,
            tool_call_parser=args.tool_call_parser,
            reasoning_parser=args.reasoning_parser,
        )
        return engine, config

    async def start(self, worker_id: int) -> EngineConfig:
        """Return what Triton serves and what it can hold, once Triton says it."""
        while True:
            try:
                load = await self._load()
                break
            except NoMetricsError as error:
                LOG.warning("waiting for Triton: %s", error)
                await asyncio.sleep(_INTERVAL_S)
        return EngineConfig(
            model=str(self._files),
            llm=LlmRegistration(
                context_length=self._description.max_model_len,
                kv_cache_block_size=load.page_size,
                total_kv_blocks=load.pages,
                max_num_seqs=load.slots,
            ),
        )

    async def on_endpoint_ready(self, endpoint: object) -> None:
        """Begin to watch Triton."""
        self._watcher = asyncio.create_task(self._watch())

    async def generate(self, request: Mapping[str, Any], context: Context) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of one request."""
        tensors = tensors_of(request, self._description)
        num_logprobs, _ = parse_logprob_options(request.get("output_options") or {})
        answer = Answer(num_logprobs)
        # Without a key: there is one Triton.
        responses = self._triton.stream(tensors, OUTPUTS_OF_ONE, context.id(), range(1), _REQUEST_S, "")
        self._num_requests += 1
        try:
            async with aclosing(_until_stopped(responses, context)) as chunks:
                async for chunk in chunks:
                    yield answer.chunk(chunk)
        except TritonLlamaError as error:
            self._raise(error)
        finally:
            self._num_requests -= 1
        if context.is_stopped():
            yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}

    async def health_check_payload(self) -> dict[str, Any]:
        """Return a request for one token."""
        payload: dict[str, Any] = build_health_check_payload(bos_token_id=0)
        return payload

    async def kv_event_sources(self) -> list[ZmqSource]:
        """Return where the model publishes its KV events."""
        return [] if self._kv_events is None else [ZmqSource(endpoint=self._kv_events)]

    def component_metrics_dp_ranks(self) -> list[int]:
        """Publish the load of all instances as one rank's."""
        return [0]

    def attach_snapshot_publisher(self, publisher: SnapshotPublisher) -> None:
        """Take Dynamo's publisher of the load."""
        self._publisher = publisher

    async def cleanup(self) -> None:
        """Close the connection once all requests have ended; Dynamo bounds the wait."""
        while self._num_requests:
            await asyncio.sleep(_DRAIN_POLL_S)
        if self._watcher is not None:
            self._watcher.cancel()
        await self._triton.close()

    def _raise(self, error: TritonLlamaError) -> NoReturn:
        if error.code == OTHER_MODEL:
            self._leave(str(error))
        if is_interruption(error) or error.code == OTHER_MODEL:
            self._triton.doubt.set()
            raise EngineShutdown(str(error)) from error
        if isinstance(error, RejectedInputError):
            raise InvalidArgument(str(error)) from error
        if isinstance(error, OverloadedError):
            raise HttpError(503, str(error)) from error
        raise Unknown(str(error)) from error

    async def _load(self) -> TritonLoad:
        """Return the load of all instances. Raises NoMetricsError, also in the model's first moments."""
        load = triton_load(await asyncio.to_thread(read_samples, self._metrics, self._triton.model))
        if not load.pages:
            raise NoMetricsError(f"{self._metrics} has no pages of the model {self._triton.model} yet")
        return load

    async def _watch(self) -> None:
        """Publish the load; leave when Triton can't be reached, or fails two probes in a row."""
        failures = 0
        while not self.lost:
            self._triton.doubt.clear()
            try:
                await self._probe()
                failures = 0
                await self._publish_load()
            except LlamaConnectionError as error:
                self._leave(str(error))
            except TritonLlamaError as error:
                failures += 1
                if failures == _MAX_FAILURES:
                    self._leave(str(error))
            except NoMetricsError as error:
                LOG.warning("%s", error)
            except Exception:
                LOG.exception("a look at Triton failed")
            # An interrupted request is a reason to probe at once.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._triton.doubt.wait(), _INTERVAL_S)

    async def _probe(self) -> None:
        if not await self._triton.is_ready(_PROBE_S):
            raise ServerError("the model isn't ready")

    async def _publish_load(self) -> None:
        if self._publisher is None:
            return
        load = await self._load()
        used, total = load.used_pages, load.pages
        snapshot = ComponentSnapshot(
            kv_used_blocks=used, kv_total_blocks=total, gpu_cache_usage=used / total, dp_rank=0
        )
        self._publisher.publish(0, snapshot)

    def _leave(self, reason: str) -> None:
        if not self.lost:
            self.lost = True
            LOG.error("Triton is lost: %s", reason)
            # Dynamo's own way to end a worker: no new requests first, then those that run.
            os.kill(os.getpid(), signal.SIGTERM)


async def _description(triton: TritonClient) -> Description:
    """Return the description of the served model, once Triton gives it."""
    while True:
        try:
            description = await triton.description("", _DESCRIPTION_S)
            assert description is not None
            return description
        except TritonLlamaError as error:
            LOG.warning("waiting for Triton: %s", error)
            await asyncio.sleep(_INTERVAL_S)


async def _until_stopped(responses: AsyncGenerator[list[Chunk], None], context: Context) -> AsyncGenerator[Chunk, None]:
    """Yield the chunks of a stream until its end, or until the request is cancelled, which closes it."""
    stopped = asyncio.ensure_future(context.async_killed_or_stopped())
    async with aclosing(responses):
        try:
            while True:
                response = asyncio.ensure_future(anext(responses, None))
                try:
                    await asyncio.wait((response, stopped), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    # `responses` can't be closed while it runs. A response that has arrived stays.
                    response.cancel()
                    await asyncio.wait((response,))
                if response.cancelled() or (chunks := response.result()) is None:
                    return
                for chunk in chunks:
                    yield chunk
        finally:
            stopped.cancel()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("triton_llama_dynamo", description=__doc__)
    parser.add_argument("--triton", default="127.0.0.1:8001", help="Triton's gRPC address")
    parser.add_argument("--triton-metrics", help="Triton's metrics, HOST:PORT; default: the port above gRPC's")
    parser.add_argument("--triton-model", default="llama", help="the model's name in Triton")
    parser.add_argument("--kv-events", help="the model's setting kv_events as seen from here, tcp://HOST:PORT")
    parser.add_argument("--model-name", help="the name that clients use; default: the checkpoint's")
    parser.add_argument("--namespace", default=os.environ.get("DYN_NAMESPACE", "dynamo"))
    parser.add_argument("--component", default="backend")
    parser.add_argument("--discovery-backend", default=os.environ.get("DYN_DISCOVERY_BACKEND", "etcd"))
    parser.add_argument("--request-plane", default=os.environ.get("DYN_REQUEST_PLANE", "tcp"))
    parser.add_argument("--event-plane", default=os.environ.get("DYN_EVENT_PLANE"))
    parser.add_argument("--tool-call-parser", help="Dynamo's parser of tool calls")
    parser.add_argument("--reasoning-parser", help="Dynamo's parser of reasoning")
    return parser
