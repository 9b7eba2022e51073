"""The example proxy forwards what clients need and refuses the rest, and its config agrees with the server's files."""

from __future__ import annotations

import re

import pytest
import yaml
from contract.code_blocks import ROOT
from contract.configs import read_config
from contract.manifests import build, environment
from triton_supervisor.supervisor import FLUSH_S

CONFIG = (ROOT / "deploy/proxy/haproxy.cfg").read_text()
README = ROOT / "deploy/proxy/README.md"
# compose.proxy.yml marks with !reset what it removes.
SERVICES = yaml.safe_load((ROOT / "deploy/proxy/compose.proxy.yml").read_text().replace("!reset", ""))["services"]
GRPC = "/inference.GRPCInferenceService"

FOR_CLIENTS = {
    "/v2/models/llama/generate",
    "/v2/models/llama/generate_stream",
    "/v2/models/llama/infer",
    "/v2/models/llama/versions/1/infer",
    "/v2/health/ready",
    "/v2/models/llama/ready",
    "/v2/models/llama/config",
    "/v2",
    *(f"{GRPC}/{method}" for method in ("ModelInfer", "ModelReady", "ServerMetadata")),
}
# ModelStreamInfer is forwarded with PROXY_GRPC_STREAMS only.
OPERATORS = ("ModelStreamInfer", "RepositoryModelUnload", "SystemSharedMemoryRegister", "LogSettings")
NOT_FOR_CLIENTS = {
    "/v2/repository/index",
    "/v2/repository/models/llama/unload",
    "/v2/models/llama/../../repository/models/llama/unload",
    "/v2/systemsharedmemory/status",
    "/v2/models/llama/trace/setting",
    "/v2/trace/setting",
    "/v2/logging",
    "/metrics",
    "/v2/models/llama/generate/",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    *(f"{GRPC}/{method}" for method in OPERATORS),
}


def _lines(pattern: str) -> list[str]:
    """Return what a pattern of a whole line captures."""
    return re.findall(rf"^ *{pattern}$", CONFIG, re.MULTILINE)


@pytest.mark.parametrize("path", sorted(FOR_CLIENTS | NOT_FOR_CLIENTS))
def test_a_path_is_forwarded_only_if_it_is_for_clients(path: str) -> None:
    patterns = _lines("acl wants_(?:text|info) path_reg '(.*)'")
    assert any(re.search(pattern, path) for pattern in patterns) == (path in FOR_CLIENTS)


def test_the_proxy_notices_a_draining_server_before_it_refuses() -> None:
    server = SERVICES["server"]["environment"]
    ports = set(re.findall(r" check port (\d+) ", CONFIG))
    # Clients reach a server through the proxy only.
    assert SERVICES["server"]["ports"] == []
    assert ports == {server["TRITON_READY_PORT"]} == {environment(build("base").server)["TRITON_READY_PORT"]}
    assert set(re.findall(r'"\$\{TRITON_HOST\}:(\d+)"', CONFIG)) == {"8000", "8001"}
    ((interval, next_ones, failures),) = set(re.findall(r" inter (\d+)s fastinter (\d+)ms fall (\d+) ", CONFIG))
    noticed = int(interval) + int(next_ones) / 1000 * (int(failures) - 1)
    assert int(server["TRITON_NOTICE_SECONDS"]) >= noticed + 2 * int(interval)
    # Without a notice the server refuses, and keeps its connections for a while.
    assert noticed < FLUSH_S


def test_an_allowed_request_fits_into_the_buffer_that_it_is_measured_in() -> None:
    (buffer,) = re.findall(r"tune\.bufsize (\d+)", CONFIG)
    (most,) = set(re.findall(r"(?:req\.body_size|hex2i) gt (\d{2,})", CONFIG))
    (head,) = re.findall(r"req\.hdrs,length gt (\d+)", CONFIG)
    (address,) = re.findall(r"url,length gt (\d+)", CONFIG)
    # HAProxy reserves 1 KiB for headers of its own, and 8 bytes for each of at most 101 headers.
    assert int(buffer) - int(most) - int(head) - int(address) >= 4096
    assert CONFIG.index("req.hdrs,length") < CONFIG.index("wait-for-body")


@pytest.mark.parametrize("timeout", ["timeout client", "timeout server", "hard-stop-after"])
def test_the_proxy_waits_longer_than_the_queue(timeout: str) -> None:
    queue = read_config("config").dynamic_batching.default_queue_policy.default_timeout_microseconds // 1_000_000
    (minutes,) = _lines(rf"{timeout} (\d+)m")
    assert int(minutes) * 60 >= queue + 300
    assert f"{minutes} minutes without a byte" in README.read_text()
