"""The example proxy lets through what clients ask and nothing else, and its files agree with the server's."""

from __future__ import annotations

import re

import pytest
import yaml
from contract.code_blocks import blocks
from contract.kubectl import ROOT
from contract.manifests import built, environment
from triton_supervisor.flush import PAUSE_S

PROXY = ROOT / "deploy" / "proxy"
CONFIG = (PROXY / "haproxy.cfg").read_text()
COMPOSE = (PROXY / "compose.proxy.yml").read_text()
README = (PROXY / "README.md").read_text()
# compose.proxy.yml marks with !reset what it takes away.
SERVICES = yaml.safe_load(COMPOSE.replace("!reset", ""))["services"]
LET_THROUGH = [
    re.compile(pattern)
    for pattern in re.findall(r"^    acl wants_(?:text|facts) path_reg '(.*)'$", CONFIG, re.MULTILINE)
]
GRPC = "/inference.GRPCInferenceService"

ASKED = [
    "/v2/models/llama/generate",
    "/v2/models/llama/generate_stream",
    "/v2/models/llama/infer",
    "/v2/models/llama/versions/1/infer",
    "/v2/health/ready",
    "/v2/models/llama/ready",
    "/v2/models/llama/config",
    "/v2",
    f"{GRPC}/ModelInfer",
    f"{GRPC}/ModelReady",
    f"{GRPC}/ServerMetadata",
]
FORBIDDEN = [
    "/v2/repository/index",
    "/v2/repository/models/llama/unload",
    "/v2/models/llama/../../repository/models/llama/unload",
    "/v2/systemsharedmemory/status",
    "/v2/models/llama/trace/setting",
    "/v2/trace/setting",
    "/v2/logging",
    "/metrics",
    "/v2/models/llama/generate/",
    # Only for who asks for it: see below.
    f"{GRPC}/ModelStreamInfer",
    f"{GRPC}/RepositoryModelUnload",
    f"{GRPC}/SystemSharedMemoryRegister",
    f"{GRPC}/LogSettings",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
]


@pytest.mark.parametrize("path", ASKED)
def test_what_a_client_asks_is_refused(path: str) -> None:
    assert any(pattern.search(path) for pattern in LET_THROUGH)


@pytest.mark.parametrize("path", FORBIDDEN)
def test_what_is_not_for_clients_is_let_through(path: str) -> None:
    assert not any(pattern.search(path) for pattern in LET_THROUGH)


def test_the_proxy_looks_where_no_server_says_whether_it_is_ready() -> None:
    ports = set(re.findall(r" check port (\d+) ", CONFIG))
    assert ports == {SERVICES["server"]["environment"]["TRITON_READY_PORT"]}
    assert ports == {environment(built("base").server)["TRITON_READY_PORT"]}
    assert set(re.findall(r'"\$\{TRITON_HOST\}:(\d+)"', CONFIG)) == {"8000", "8001"}


def test_a_server_refuses_before_the_proxy_has_seen_that_it_will() -> None:
    checks = set(re.findall(r" inter (\d+)s fastinter (\d+)ms fall (\d+) ", CONFIG))
    ((interval, next_ones, failures),) = checks
    seen = int(interval) + int(next_ones) / 1000 * (int(failures) - 1)
    notice = int(SERVICES["server"]["environment"]["TRITON_NOTICE_SECONDS"])
    assert notice >= seen + 2 * int(interval)
    # Without a notice: it refuses, and keeps its connections for a while.
    assert seen < PAUSE_S


def test_a_request_that_is_let_in_does_not_fit_into_the_buffer_it_is_counted_in() -> None:
    (buffer,) = re.findall(r"tune\.bufsize (\d+)", CONFIG)
    (most,) = set(re.findall(r"(?:req\.body_size|hex2i) gt (\d{2,})", CONFIG))
    (head,) = re.findall(r"req\.hdrs,length gt (\d+)", CONFIG)
    (address,) = re.findall(r"url,length gt (\d+)", CONFIG)
    # HAProxy keeps 1 KiB free for headers of its own, and notes 8 bytes about each of at most 101 of them.
    assert int(buffer) - int(most) - int(head) - int(address) >= 4096
    assert CONFIG.index("req.hdrs,length") < CONFIG.index("wait-for-body")


def test_what_is_grpc_to_one_rule_is_http_to_another() -> None:
    assert re.findall(r"use_backend triton_grpc if (.*)$", CONFIG, re.MULTILINE) == ["is_grpc"]
    assert re.findall(r"acl is_grpc (.*)$", CONFIG, re.MULTILINE) == ["path_beg /inference."]
    # Whatever isn't a gRPC stream is waited for, and counted.
    assert re.findall(r"wait-for-body time \d+s(.*)$", CONFIG, re.MULTILINE) == [" unless wants_stream"]


def test_infer_is_let_through_unless_told_otherwise() -> None:
    assert "presetenv HTTP_INFER no" in CONFIG
    assert SERVICES["proxy"]["environment"]["HTTP_INFER"] == "${PROXY_HTTP_INFER:-no}"


def test_grpc_streams_are_let_through_unless_told_otherwise() -> None:
    assert "presetenv GRPC_STREAMS no" in CONFIG
    assert SERVICES["proxy"]["environment"]["GRPC_STREAMS"] == "${PROXY_GRPC_STREAMS:-no}"
    (streams,) = re.findall(r"acl wants_stream path_reg '(.*)'$", CONFIG, re.MULTILINE)
    assert re.search(streams, f"{GRPC}/ModelStreamInfer")
    refusals = re.findall(r"http-request return status 403 .* if (.*)$", CONFIG, re.MULTILINE)
    assert refusals == ["wants_stream !streams_are_wanted", "wants_infer !infer_is_wanted"]


def test_the_proxy_gives_up_on_what_is_still_in_the_queue() -> None:
    model = (ROOT / "model_repository" / "llama" / "config.pbtxt").read_text()
    (waiting,) = re.findall(r"default_timeout_microseconds: (\d+)", model)
    for name in ("timeout client", "timeout server", "hard-stop-after"):
        (minutes,) = re.findall(rf"^    {name} (\d+)m$", CONFIG, re.MULTILINE)
        # Five minutes for the text.
        assert int(minutes) * 60 >= int(waiting) // 1_000_000 + 300, name
        assert f"{minutes} minutes without a byte" in README


def test_a_request_that_a_model_may_have_begun_is_given_to_another_one() -> None:
    for words in re.findall(r"^    retry-on (.*)$", CONFIG, re.MULTILINE):
        assert set(words.split()) <= {"conn-failure", "404", "503"}
    # 503 is also what has waited in a queue for as long as it may; it shouldn't wait in all of them.
    assert re.findall(r"retry-on conn-failure 404 503\n    retries (\d+)", CONFIG) == ["1"]


def test_the_proxy_is_locked_up_and_pinned() -> None:
    proxy = SERVICES["proxy"]
    assert proxy["read_only"] is True
    assert proxy["cap_drop"] == ["ALL"]
    assert proxy["security_opt"] == ["no-new-privileges:true"]
    assert re.fullmatch(r"\$\{PROXY_IMAGE:-haproxy:\d+\.\d+\}", proxy["image"])
    assert SERVICES["server"]["ports"] == []


@pytest.mark.parametrize("name", sorted({*re.findall(r"\$\{((?:PROXY|TRITON_REPLICAS)\w*)", COMPOSE)}))
def test_a_variable_is_not_documented(name: str) -> None:
    assert f"`{name}`" in README


def test_the_pod_of_the_readme_is_not_admitted_or_has_a_token_in_the_way_of_its_secret() -> None:
    (pod,) = (yaml.safe_load(block.text)["spec"] for block in blocks(README) if block.language == "yaml")
    assert pod["automountServiceAccountToken"] is False
    # HAProxy's image names its user, which no kubelet can tell from root.
    assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (True, 99)
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (proxy,) = pod["containers"]
    assert proxy["securityContext"]["allowPrivilegeEscalation"] is False
    assert proxy["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert proxy["command"] == SERVICES["proxy"]["command"]
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in proxy["volumeMounts"]}
