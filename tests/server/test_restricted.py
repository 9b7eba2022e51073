"""Triton's control endpoints need a key that only the supervisor has; what clients use is open."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tritonclient.grpc
from server.clients import WIRES, ask, infer_url, post
from server.metrics import level
from server.servers import get_json, until
from triton_llama import LlamaClient
from triton_llama.endpoint import Protocol
from triton_local.server import LocalTriton
from triton_supervisor.hardening import GRPC_HEADER, HTTP_HEADER
from tritonclient.utils import InferenceServerException

REGION = "triton_python_backend_shm_region_1"
"""The naming scheme of the memory between Triton and the model's process."""

# With bodies that would do harm if they were read.
CONTROL = {
    "POST /v2/repository/index": b"",
    "POST /v2/repository/index?ready=true": b"{}",
    "POST /v2/repository/models/llama/load": b'{"parameters": {"config": "{}", "file:1/model.py": "aW1wb3J0IG9z"}}',
    "POST /v2/repository/models/llama/unload": b"{}",
    "GET /v2/systemsharedmemory/status": b"",
    "GET /v2/systemsharedmemory/region/x/status": b"",
    "POST /v2/systemsharedmemory/region/x/register": b'{"key": "/x", "offset": 0, "byte_size": 8}',
    "POST /v2/systemsharedmemory/unregister": b"{}",
    "GET /v2/cudasharedmemory/status": b"",
    "POST /v2/cudasharedmemory/region/x/register": b'{"raw_handle": {"b64": ""}, "device_id": 0, "byte_size": 8}',
    "GET /v2/trace/setting": b"",
    "POST /v2/trace/setting": b'{"trace_level": ["TENSORS"], "trace_rate": "1"}',
    "GET /v2/models/llama/trace/setting": b"",
    "POST /v2/models/llama/trace/setting": b'{"trace_level": ["TENSORS"], "trace_rate": "1"}',
    "GET /v2/logging": b"",
    "POST /v2/logging": b'{"log_info": false, "log_verbose_level": 9}',
}
# Similar addresses.
BESIDE = ["POST /v2/repository/index/", "POST //v2/repository/index", "POST /v2/./repository/index", "GET /V2/logging"]

Ask = Callable[[tritonclient.grpc.InferenceServerClient, dict[str, str]], object]
CALLS: dict[str, Ask] = {
    "index": lambda client, headers: client.get_model_repository_index(headers=headers),
    "load": lambda client, headers: client.load_model("llama", headers=headers),
    "unload": lambda client, headers: client.unload_model("llama", headers=headers),
    "shared memory": lambda client, headers: client.get_system_shared_memory_status(headers=headers),
    "register": lambda client, headers: client.register_system_shared_memory("x", "/x", 8, headers=headers),
    "unregister": lambda client, headers: client.unregister_system_shared_memory(headers=headers),
    "CUDA shared memory": lambda client, headers: client.get_cuda_shared_memory_status(headers=headers),
    "trace": lambda client, headers: client.get_trace_settings(headers=headers),
    "set trace": lambda client, headers: client.update_trace_settings(settings={"trace_rate": "1"}, headers=headers),
    "logging": lambda client, headers: client.get_log_settings(headers=headers),
    "set logging": lambda client, headers: client.update_log_settings({"log_info": False}, headers=headers),
}


@pytest.fixture(scope="module")
def key(triton: LocalTriton) -> str:
    """The server's key, from the one place where it is visible."""
    command = Path(f"/proc/{triton.pid}/cmdline").read_text().split("\0")
    over_http, over_grpc = (word for word in command if word.startswith(("--http-restricted-", "--grpc-restricted-")))
    _, _, found = over_http.rpartition("=")
    assert over_grpc.endswith(f":{HTTP_HEADER}={found}")
    return found


@pytest.fixture(scope="module")
def wrong_keys(key: str) -> list[str]:
    return ["", key[:-1], key + "x", key.swapcase()]


@pytest.fixture(autouse=True)
def _still_serving(triton: LocalTriton) -> Iterator[None]:
    """After each test the model is loaded and unchanged."""
    yield
    answer = ask(triton, text_input="Return a list of", max_tokens=2, min_tokens=2)
    assert answer.num_output_tokens == 2
    # Metrics are a moment late.
    until(lambda: level(triton, "llama_slots") == 32, lambda: "the model has its 32 slots")


def _http(server: LocalTriton, what: str, headers: dict[str, str]) -> tuple[int, bytes]:
    """Return status and body."""
    method, path = what.split()
    request = urllib.request.Request(
        f"http://{server.http_url}{path}", data=CONTROL.get(what) or None, headers=headers, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.mark.parametrize("what", CONTROL)
def test_control_endpoints_over_http_need_the_key(
    triton: LocalTriton, key: str, wrong_keys: list[str], what: str
) -> None:
    for headers in ({}, *({HTTP_HEADER: wrong} for wrong in wrong_keys), {GRPC_HEADER: key}, {"Authorization": key}):
        status, answer = _http(triton, what, headers)
        assert status == 403, answer
        assert json.loads(answer) == {"error": f"This API is restricted, expecting header '{HTTP_HEADER}'"}


@pytest.mark.parametrize("what", BESIDE)
def test_other_spellings_of_a_control_endpoint_are_not_found(triton: LocalTriton, what: str) -> None:
    status, _ = _http(triton, what, {})
    assert status in (400, 403, 404)


@pytest.mark.parametrize("what", CALLS)
def test_control_calls_over_grpc_need_the_key(triton: LocalTriton, key: str, wrong_keys: list[str], what: str) -> None:
    with tritonclient.grpc.InferenceServerClient(triton.grpc_url) as client:
        for headers in ({}, *({GRPC_HEADER: wrong} for wrong in wrong_keys), {HTTP_HEADER: key}):
            with pytest.raises(InferenceServerException) as refused:
                CALLS[what](client, headers)
            assert refused.value.status() == "StatusCode.UNAVAILABLE"
            assert refused.value.message() == f"This protocol is restricted, expecting header '{GRPC_HEADER}'"


def test_the_key_opens_control_endpoints(triton: LocalTriton, key: str) -> None:
    status, index = _http(triton, "POST /v2/repository/index", {HTTP_HEADER: key})
    assert status == 200
    assert [(model["name"], model["state"]) for model in json.loads(index)] == [("llama", "READY")]
    assert _http(triton, "GET /v2/logging", {HTTP_HEADER.upper(): key})[0] == 200
    with tritonclient.grpc.InferenceServerClient(triton.grpc_url) as client:
        (model,) = client.get_model_repository_index(headers={GRPC_HEADER: key}).models
        assert (model.name, model.state) == ("llama", "READY")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_client_works_without_the_key(triton: LocalTriton, protocol: Protocol) -> None:
    address = triton.http_url if protocol == "http" else triton.grpc_url
    with LlamaClient(address, protocol) as client:
        status = client.status()
        assert (status.live, status.ready, status.model_ready) == (True, True, True)
        assert status.config is not None
        assert status.config.parameters["scheduling"] == "inflight"
        assert client.generate("Return a list of", max_tokens=2, min_tokens=2).num_output_tokens == 2


def test_inference_statistics_and_metadata_need_no_key(triton: LocalTriton) -> None:
    for wire in WIRES:
        assert ask(triton, wire, text_input="Return", max_tokens=1, min_tokens=1).num_output_tokens == 1
    assert get_json(triton, "/v2/models/llama/stats")["model_stats"]
    assert get_json(triton, "/v2/models/llama")["name"] == "llama"
    with tritonclient.grpc.InferenceServerClient(triton.grpc_url) as client:
        assert client.get_inference_statistics("llama").model_stats
        assert client.is_model_ready("llama")


def test_an_unregistered_shared_memory_region_is_refused(triton: LocalTriton) -> None:
    body = {
        "inputs": [
            {
                "name": "text_input",
                "shape": [1, 1],
                "datatype": "BYTES",
                "parameters": {"shared_memory_region": REGION, "shared_memory_byte_size": 8},
            }
        ]
    }
    status, answer = post(infer_url(triton), json.dumps(body).encode())
    assert status == 404
    assert f"Unable to find shared memory region: '{REGION}'" in json.loads(answer)["error"]


def test_the_key_is_not_in_the_log(triton: LocalTriton, key: str) -> None:
    assert "llama: loaded " in triton.log_text()
    assert key not in triton.log_text()
