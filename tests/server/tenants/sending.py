"""Send requests in asyncio, and keep every byte that comes back."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio
import httpx
from server.clients import DTYPES
from server.fuzzing.values import packed
from server.servers import TIMEOUT_S
from server.tenants.asked import Asked
from triton_local.server import LocalTriton
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub


@dataclass
class Heard:
    """What has come back. raw: every byte, headers and trailers too. parts: JSON objects or gRPC messages."""

    status: str = ""
    raw: bytearray = field(default_factory=bytearray)
    parts: list[Any] = field(default_factory=list)

    def take(self, response: service_pb2.ModelInferResponse) -> None:
        """Keep a response over gRPC."""
        self.raw += response.SerializeToString()
        self.parts.append(response)

    def take_streamed(self, response: service_pb2.ModelStreamInferResponse) -> None:
        """Keep a response of a gRPC stream."""
        if response.error_message:
            self.fail("error", response.error_message)
        else:
            self.take(response.infer_response)

    def fail(self, status: str, message: str) -> None:
        """Keep an error over gRPC."""
        self.status = status
        self.raw += message.encode()
        self.parts.append({"error": message})


@dataclass(frozen=True)
class Tenant:
    """The connections of one tenant; none is shared. key: its API key of the endpoint."""

    triton: httpx.AsyncClient
    endpoint: httpx.AsyncClient
    calls: GRPCInferenceServiceStub
    shared: SharedStream
    key: str


@asynccontextmanager
async def connected(server: LocalTriton, endpoint: str, keys: list[str]) -> AsyncIterator[list[Tenant]]:
    """Connect every tenant. endpoint: the OpenAI endpoint's address."""
    async with AsyncExitStack() as connections:

        async def client(url: str) -> httpx.AsyncClient:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            client = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False)
            return await connections.enter_async_context(client)

        tenants = []
        for key in keys:
            # Otherwise grpc gives channels of one target one connection.
            own = (("grpc.use_local_subchannel_pool", 1),)
            channel = grpc.aio.insecure_channel(server.grpc_url, options=own)
            calls = GRPCInferenceServiceStub(await connections.enter_async_context(channel))
            shared = SharedStream(calls)
            connections.push_async_callback(shared.close)
            tenants.append(
                Tenant(await client(f"http://{server.http_url}"), await client(endpoint), calls, shared, key)
            )
        yield tenants


async def send(tenant: Tenant, asked: Asked) -> Heard:
    """Send a request, and leave where its client does; return what has come back until then."""
    heard = Heard()
    sending = asyncio.create_task(_send(tenant, asked, heard))
    if not asked.leaves:
        await sending
        return heard
    await asyncio.wait([sending], timeout=random.Random(asked.number).uniform(0, 0.15))
    sending.cancel()
    await asyncio.wait([sending])
    heard.status = "left"
    return heard


async def _send(tenant: Tenant, asked: Asked, heard: Heard) -> None:
    match asked.way:
        case "generate" | "generate_stream":
            await _http(tenant.triton, asked, {**asked.body, **asked.parameters}, heard)
        case "infer":
            inputs = [
                {"name": name, "datatype": DTYPES[name], "shape": [1, len(values)], "data": values}
                for name, values in _listed(asked.body).items()
            ]
            parameters = {name: value for name, value in asked.parameters.items() if name != "id"}
            await _http(tenant.triton, asked, {"id": asked.id, "inputs": inputs, "parameters": parameters}, heard)
        case "endpoint":
            headers = {"authorization": f"Bearer {tenant.key}", **asked.headers}
            await _http(tenant.endpoint, replace(asked, headers=headers), asked.body, heard)
        case "shared stream":
            await tenant.shared.ask(asked, heard)
        case _:
            await _grpc(tenant.calls, asked, heard)


async def _http(client: httpx.AsyncClient, asked: Asked, body: object, heard: Heard) -> None:
    async with client.stream("POST", asked.target, json=body, headers=asked.headers) as response:
        heard.status = str(response.status_code)
        for name, value in response.headers.raw:
            heard.raw += name + b": " + value + b"\n"
        beginning = len(heard.raw)
        async for part in response.aiter_bytes():
            heard.raw += part
    text = heard.raw[beginning:].decode()
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
        heard.parts += [json.loads(event) for event in events if event != "[DONE]"]
    else:
        heard.parts.append(json.loads(text) if text else {})


async def _grpc(calls: GRPCInferenceServiceStub, asked: Asked, heard: Heard) -> None:
    options = {"metadata": tuple(asked.headers.items()), "timeout": TIMEOUT_S}
    heard.status = "OK"
    try:
        if asked.way == "unary":
            call = calls.ModelInfer(_message(asked), **options)
            heard.take(await call)
        else:
            call = calls.ModelStreamInfer(iter([_message(asked)]), **options)
            async for response in call:
                heard.take_streamed(response)
    except grpc.aio.AioRpcError as error:
        heard.fail(error.code().name, str(error.details()))
        heard.raw += error.debug_error_string().encode()
    finally:
        call.cancel()
    for metadata in (await call.initial_metadata(), await call.trailing_metadata()):
        heard.raw += "".join(f"{name}: {value}\n" for name, value in metadata or ()).encode()


class SharedStream:
    """A gRPC stream that many requests of one tenant go through at a time."""

    def __init__(self, calls: GRPCInferenceServiceStub) -> None:
        self._messages: asyncio.Queue[service_pb2.ModelInferRequest | None] = asyncio.Queue()
        self._waiting: dict[str, tuple[Heard, asyncio.Event]] = {}
        self._reading = asyncio.create_task(self._read(calls.ModelStreamInfer(self._written())))

    async def ask(self, asked: Asked, heard: Heard) -> None:
        """Send a request and wait for its last response."""
        message, ended = _message(asked), asyncio.Event()
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        heard.status = "OK"
        self._waiting[asked.id] = heard, ended
        await self._messages.put(message)
        waiting = asyncio.create_task(ended.wait())
        await asyncio.wait([waiting, self._reading], timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        assert ended.is_set(), f"the stream has ended, or nothing comes: {self._reading}"

    async def close(self) -> None:
        """End the stream. Raises what has ended it before."""
        await self._messages.put(None)
        await self._reading

    async def _written(self) -> AsyncIterator[service_pb2.ModelInferRequest]:
        while (message := await self._messages.get()) is not None:
            yield message

    async def _read(self, call: Any) -> None:  # noqa: ANN401 - grpc is not annotated
        async for response in call:
            heard, ended = self._waiting[response.infer_response.id]
            heard.take_streamed(response)
            if response.error_message or response.infer_response.parameters["triton_final_response"].bool_param:
                ended.set()


def _message(asked: Asked) -> service_pb2.ModelInferRequest:
    message = service_pb2.ModelInferRequest(model_name=asked.target, id=asked.id)
    for name, value in asked.parameters.items():
        if name != "id":
            message.parameters[name].string_param = str(value)
    for name, values in _listed(asked.body).items():
        message.inputs.add(name=name, datatype=DTYPES[name], shape=[1, len(values)])
        message.raw_input_contents.append(b"".join(packed(value, DTYPES[name]) for value in values))
    return message


def _listed(body: Mapping[str, object]) -> dict[str, list[Any]]:
    return {name: value if isinstance(value, list) else [value] for name, value in body.items()}
