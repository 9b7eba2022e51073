"""Triton's control endpoints need a key that only the supervisor has; what clients use is open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import tritonclient.grpc
from end_to_end.servers import HTTP
from end_to_end.wires import ask
from triton_local.server import LocalTriton
from triton_supervisor.tritonserver_options import CONTROL_HEADER
from tritonclient.utils import InferenceServerException

GRPC_HEADER = f"triton-grpc-protocol-{CONTROL_HEADER}"
"""Triton adds the prefix."""

# Of each category, with a body that would do harm if it were read.
CONTROL = {
    "POST /v2/repository/index": b"",
    "POST /v2/repository/models/llama/load": b'{"parameters": {"config": "{}", "file:1/model.py": "aW1wb3J0IG9z"}}',
    "POST /v2/repository/models/llama/unload": b"{}",
    "POST /v2/systemsharedmemory/region/x/register": b'{"key": "/x", "offset": 0, "byte_size": 8}',
    "GET /v2/cudasharedmemory/status": b"",
    "POST /v2/models/llama/trace/setting": b'{"trace_level": ["TENSORS"], "trace_rate": "1"}',
    "POST /v2/logging": b'{"log_info": false, "log_verbose_level": 9}',
}

CALLS: dict[str, Callable[..., object]] = {
    "unload": lambda client, **key: client.unload_model("llama", **key),
    "register": lambda client, **key: client.register_system_shared_memory("x", "/x", 8, **key),
    "set trace": lambda client, **key: client.update_trace_settings(settings={"trace_rate": "1"}, **key),
    "set logging": lambda client, **key: client.update_log_settings({"log_info": False}, **key),
}


@pytest.fixture(scope="module")
def key(triton: LocalTriton) -> str:
    """The server's key, from the one place where it is visible."""
    command = Path(f"/proc/{triton.pid}/cmdline").read_text().split("\0")
    over_http, over_grpc = (word for word in command if word.startswith(("--http-restricted-", "--grpc-restricted-")))
    _, _, key = over_http.rpartition("=")
    assert over_grpc.endswith(f":{CONTROL_HEADER}={key}")
    return key


def _http(server: LocalTriton, what: str, **headers: str) -> httpx.Response:
    method, path = what.split()
    return HTTP.request(method, f"http://{server.http_address}{path}", content=CONTROL[what] or None, headers=headers)


@pytest.mark.parametrize("what", CONTROL)
def test_control_endpoints_over_http_need_the_key(triton: LocalTriton, key: str, what: str) -> None:
    for headers in ({}, {CONTROL_HEADER: key[:-1]}, {GRPC_HEADER: key}):
        refused = _http(triton, what, **headers)
        assert refused.status_code == 403, refused.text
        assert refused.json() == {"error": f"This API is restricted, expecting header '{CONTROL_HEADER}'"}


@pytest.mark.parametrize("what", CALLS)
def test_control_calls_over_grpc_need_the_key(triton: LocalTriton, key: str, what: str) -> None:
    with tritonclient.grpc.InferenceServerClient(triton.grpc_address) as client:
        for headers in ({}, {GRPC_HEADER: key[:-1]}, {CONTROL_HEADER: key}):
            with pytest.raises(InferenceServerException) as refused:
                CALLS[what](client, headers=headers)
            assert refused.value.status() == "StatusCode.UNAVAILABLE"
            assert refused.value.message() == f"This protocol is restricted, expecting header '{GRPC_HEADER}'"


def test_the_key_opens_control_endpoints(triton: LocalTriton, key: str) -> None:
    """After all the refusals above: the model is loaded and unchanged."""
    models = _http(triton, "POST /v2/repository/index", **{CONTROL_HEADER: key}).raise_for_status().json()
    assert [model["name"] for model in models if model.get("state") == "READY"] == ["llama"]
    with tritonclient.grpc.InferenceServerClient(triton.grpc_address) as client:
        models = client.get_model_repository_index(headers={GRPC_HEADER: key}).models
        assert [model.name for model in models if model.state == "READY"] == ["llama"]
    assert ask(triton, text_input="Return a list of", max_tokens=2, min_tokens=2).num_output_tokens == 2
    assert triton.log_text().count("llama: loaded ") == 1
    assert key not in triton.log_text()
