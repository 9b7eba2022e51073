"""The fake Triton's gRPC server, in a thread with an event loop of its own.

`_Service` answers as `FakeTriton` says, and makes the failures of its fields: failing, die_after, broken, end_early.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import grpc
from frontend.fake_triton import FakeTriton
from frontend.model_messages import read_request
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceServicer, add_GRPCInferenceServiceServicer_to_server

# ruff: noqa: N802 - Triton's names
HOST = "127.0.0.1"
Context: TypeAlias = grpc.aio.ServicerContext
Requests = AsyncIterator[messages.ModelInferRequest]
Responses = AsyncIterator[messages.ModelStreamInferResponse]


@contextmanager
def fake_triton() -> Iterator[FakeTriton]:
    """Serve until the block ends."""
    triton = FakeTriton()
    triton.server = Server(triton)
    try:
        yield triton
    finally:
        triton.server.close()


class Server:
    """The fake's sockets, served in a thread with an event loop of its own."""

    def __init__(self, triton: FakeTriton) -> None:
        self._triton = triton
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-triton")
        self._thread.start()
        self._server: grpc.aio.Server | None = None
        self.start()

    def start(self) -> None:
        """Listen, at the fake's port once it has one."""
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(20)

    def stop(self) -> None:
        """Cancel every call and close the port."""
        asyncio.run_coroutine_threadsafe(self.die(), self._loop).result(20)

    async def die(self, restart: Callable[[], object] | None = None) -> None:
        """Do what `stop` does, from within the server's loop. restart: called before it listens again."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)
        if restart is not None:
            restart()
            await self._start()

    def close(self) -> None:
        """End the thread, once the calls have ended: tasks that are pending then log errors in a later test."""
        self.stop()
        try:
            asyncio.run_coroutine_threadsafe(self._calls_end(), self._loop).result(20)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _calls_end(self) -> None:
        if calls := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(calls)

    async def _start(self) -> None:
        self._server = grpc.aio.server()
        add_GRPCInferenceServiceServicer_to_server(_Service(self._triton), self._server)
        self._triton.port = self._server.add_insecure_port(f"{HOST}:{self._triton.port}")
        await self._server.start()


class _Service(GRPCInferenceServiceServicer):  # type: ignore[misc] # generated, without types
    """Triton's calls. triton: what they answer, and with which failures."""

    def __init__(self, triton: FakeTriton) -> None:
        self._triton = triton

    async def ModelReady(self, request: messages.ModelReadyRequest, _: object) -> messages.ModelReadyResponse:
        return messages.ModelReadyResponse(ready=self._triton.ready and request.name in self._triton.models)

    async def ModelConfig(self, _: object, __: object) -> messages.ModelConfigResponse:
        response = messages.ModelConfigResponse()
        response.config.model_transaction_policy.decoupled = self._triton.decoupled
        return response

    async def ModelInfer(self, message: messages.ModelInferRequest, context: Context) -> messages.ModelInferResponse:
        (response,) = [response async for response in self._answer(message, context)]
        return response.infer_response

    async def ModelStreamInfer(self, requests: Requests, context: Context) -> Responses:
        async for message in requests:
            async for response in self._answer(message, context):
                yield response

    async def _answer(self, message: messages.ModelInferRequest, context: Context) -> Responses:
        triton = self._triton
        request = read_request(message, dict(context.invocation_metadata()))
        if not request.inputs.keys() & {"text_input", "input_ids"}:
            is_update = "lora_path" in request.inputs
            yield triton.update(request) if is_update else await triton.describe(message.model_name, request)
            return
        if error := triton.refusal(message.model_name, request):
            yield messages.ModelStreamInferResponse(error_message=error)
            return
        triton.requests.append(request)
        triton.running += 1
        sent = 0
        try:
            async for response in triton.answer(request):
                if triton.failing is not None and sent == triton.after_tokens and triton.failures > 0:
                    triton.failures -= 1
                    if triton.status is not None:
                        await context.abort(triton.status, triton.failing)
                    yield messages.ModelStreamInferResponse(error_message=triton.failing)
                    return
                if sent == triton.die_after:
                    triton.die_after = None
                    assert triton.server is not None
                    dying = asyncio.create_task(triton.server.die(triton.restart))
                    # It cancels this call, too.
                    await asyncio.shield(dying)
                if sent and triton.broken is not None:
                    triton.broken(response)
                yield response
                sent += 1
                if triton.end_early:
                    return
        except (asyncio.CancelledError, GeneratorExit):
            # GeneratorExit: it was cancelled while gRPC was sending a response.
            triton.cancelled.append(request.id)
            raise
        finally:
            triton.running -= 1
