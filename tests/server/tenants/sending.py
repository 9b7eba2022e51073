"""Send requests in asyncio, and keep every byte that comes back."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import httpx
import numpy as np
from server.clients import DTYPES
from server.servers import TIMEOUT_S
from server.tenants.asked import TENANTS, Asked
from triton_local.server import LocalTriton
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from tritonclient.utils import serialize_byte_tensor, triton_to_np_dtype


@dataclass
class Heard:
    """What has come back. raw: every byte, headers and trailers too. parts: JSON objects or gRPC messages."""

    status: str = ""
    raw: bytearray = field(default_factory=bytearray)
    parts: list[Any] = field(default_factory=list)


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

    def client(url: str) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False)

    assert len(keys) == TENANTS
    # Otherwise grpc gives channels of one target one connection.
    own = (("grpc.use_local_subchannel_pool", 1),)
    channels = [grpc.aio.insecure_channel(server.grpc_url, options=own) for _ in keys]
    stubs = [GRPCInferenceServiceStub(channel) for channel in channels]
    tenants = [
        Tenant(client(f"http://{server.http_url}"), client(endpoint), stub, SharedStream(stub), key)
        for stub, key in zip(stubs, keys, strict=True)
    ]
    try:
        yield tenants
    finally:
        for tenant, channel in zip(tenants, channels, strict=True):
            await tenant.shared.close()
            await tenant.triton.aclose()
            await tenant.endpoint.aclose()
            await channel.close()


async def send(tenant: Tenant, asked: Asked) -> Heard:
    """Send a request, and leave where its client does; return what has come back until then."""
    heard = Heard()
    sending = asyncio.create_task(_SENDERS[asked.way](tenant, asked, heard))
    if not asked.leaves:
        await sending
        return heard
    await asyncio.wait([sending], timeout=random.Random(asked.number).uniform(0, 0.15))
    sending.cancel()
    await asyncio.wait([sending])
    heard.status = "left"
    return heard


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


async def _generate(tenant: Tenant, asked: Asked, heard: Heard) -> None:
    await _http(tenant.triton, asked, {**asked.body, **asked.parameters}, heard)


async def _infer(tenant: Tenant, asked: Asked, heard: Heard) -> None:
    parameters = dict(asked.parameters)
    inputs = [
        {"name": name, "datatype": DTYPES[name], "shape": [1, len(values)], "data": values}
        for name, values in _listed(asked.body).items()
    ]
    await _http(tenant.triton, asked, {"id": parameters.pop("id"), "inputs": inputs, "parameters": parameters}, heard)


async def _endpoint(tenant: Tenant, asked: Asked, heard: Heard) -> None:
    headers = {"authorization": f"Bearer {tenant.key}", **asked.headers}
    await _http(tenant.endpoint, Asked(asked.number, "", "", asked.target, {}, headers), asked.body, heard)


async def _unary(tenant: Tenant, asked: Asked, heard: Heard) -> None:
    call = tenant.calls.ModelInfer(message(asked), metadata=tuple(asked.headers.items()), timeout=TIMEOUT_S)
    try:
        _take(heard, await call)
        heard.status = "OK"
    except grpc.aio.AioRpcError as error:
        heard.status = error.code().name
        heard.parts.append({"error": error.details()})
        heard.raw += f"{error.details()} {error.debug_error_string()}".encode()
    await _take_metadata(call, heard)


async def _stream(tenant: Tenant, asked: Asked, heard: Heard) -> None:
    metadata = tuple(asked.headers.items())
    call = tenant.calls.ModelStreamInfer(iter([message(asked)]), metadata=metadata, timeout=TIMEOUT_S)
    try:
        async for response in call:
            take_streamed(heard, response)
        heard.status = heard.status or "OK"
    except grpc.aio.AioRpcError as error:
        heard.status = error.code().name
        heard.parts.append({"error": error.details()})
    finally:
        call.cancel()
    await _take_metadata(call, heard)


class SharedStream:
    """A gRPC stream that many requests of one tenant go through at a time."""

    def __init__(self, calls: GRPCInferenceServiceStub) -> None:
        self._messages: asyncio.Queue[service_pb2.ModelInferRequest | None] = asyncio.Queue()
        self._waiting: dict[str, tuple[Heard, asyncio.Event]] = {}
        self._reading = asyncio.create_task(self._read(calls.ModelStreamInfer(self._written())))

    async def ask(self, asked: Asked, heard: Heard) -> None:
        """Send a request and wait for its last response."""
        built, ended = message(asked), asyncio.Event()
        built.parameters["triton_enable_empty_final_response"].bool_param = True
        self._waiting[built.id] = heard, ended
        await self._messages.put(built)
        waiting = asyncio.create_task(ended.wait())
        await asyncio.wait([waiting, self._reading], timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        assert ended.is_set(), f"the stream has ended, or nothing comes: {self._reading}"
        heard.status = heard.status or "OK"

    async def close(self) -> None:
        """End the stream. Raises what has ended it before."""
        await self._messages.put(None)
        await self._reading

    async def _written(self) -> AsyncIterator[service_pb2.ModelInferRequest]:
        while (built := await self._messages.get()) is not None:
            yield built

    async def _read(self, call: Any) -> None:  # noqa: ANN401 - grpc is not annotated
        async for response in call:
            heard, ended = self._waiting[response.infer_response.id]
            take_streamed(heard, response)
            if response.error_message or response.infer_response.parameters["triton_final_response"].bool_param:
                ended.set()


async def _shared_stream(tenant: Tenant, asked: Asked, heard: Heard) -> None:
    await tenant.shared.ask(asked, heard)


def take_streamed(heard: Heard, response: service_pb2.ModelStreamInferResponse) -> None:
    """Keep a response of a gRPC stream."""
    if response.error_message:
        heard.raw += response.SerializeToString()
        heard.parts.append({"error": response.error_message})
        heard.status = "error"
    else:
        _take(heard, response.infer_response)


def _take(heard: Heard, response: service_pb2.ModelInferResponse) -> None:
    heard.raw += response.SerializeToString()
    heard.parts.append(response)


async def _take_metadata(call: Any, heard: Heard) -> None:  # noqa: ANN401 - grpc is not annotated
    for metadata in (await call.initial_metadata(), await call.trailing_metadata()):
        heard.raw += "".join(f"{name}: {value}\n" for name, value in metadata or ()).encode()


def message(asked: Asked) -> service_pb2.ModelInferRequest:
    """Return a request as gRPC has it."""
    parameters = dict(asked.parameters)
    built = service_pb2.ModelInferRequest(model_name=asked.target, id=str(parameters.pop("id")))
    for name, value in parameters.items():
        built.parameters[name].string_param = str(value)
    for name, values in _listed(asked.body).items():
        built.inputs.add(name=name, datatype=DTYPES[name], shape=[1, len(values)])
        if DTYPES[name] == "BYTES":
            array = np.array([[str(value).encode() for value in values]], dtype=np.object_)
            built.raw_input_contents.append(serialize_byte_tensor(array).item())
        else:
            built.raw_input_contents.append(np.array(values, dtype=triton_to_np_dtype(DTYPES[name])).tobytes())
    return built


def _listed(body: Mapping[str, object]) -> dict[str, list[Any]]:
    return {name: value if isinstance(value, list) else [value] for name, value in body.items()}


_SENDERS: dict[str, Callable[..., Any]] = {
    "generate": _generate,
    "generate_stream": _generate,
    "infer": _infer,
    "unary": _unary,
    "stream": _stream,
    "shared stream": _shared_stream,
    "endpoint": _endpoint,
}
