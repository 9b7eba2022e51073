"""Every folder of deploy/kubernetes builds, is valid, runs with few rights, and agrees with image, engine and settings.

Kinds of other projects, such as PodMonitor, are checked against custom_resources/*.schema.json, which are their
definitions reduced to the fields that are used here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from deploy.code_blocks import ROOT
from deploy.manifests import FOLDERS, KUBERNETES, NAME, PROBE_MARGIN_S, Manifest, Overlay, build, environment, mappings
from engine.configs import read_config
from llama_engine.observability.metrics import METRICS
from llama_engine.settings import BOUNDS, ENVIRONMENT_PREFIX
from triton_llama_openai import settings as endpoint_settings
from triton_supervisor.settings import DEFAULT_GRACE_S, STOP_MARGIN_S

SCHEMAS = {
    file.name.removesuffix(".schema.json"): json.loads(file.read_text())
    for file in (Path(__file__).parent / "custom_resources").glob("*.schema.json")
}
(OLDEST,) = re.findall(r"^For Kubernetes (1\.\d+) or newer", (KUBERNETES / "README.md").read_text(), re.MULTILINE)
VERSIONS = (OLDEST, kubernetes_validate.latest_version())
DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
# How to run each program of the image here, where the image's paths don't exist.
MODULES = {"/srv/triton-llama/bin/health": "triton_supervisor.health"}
OTHER_VARIABLES = {"TRITON_GRACE_SECONDS", "CHECKPOINT", "HF_HUB_OFFLINE", "OMP_NUM_THREADS"}
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@pytest.fixture(params=FOLDERS)
def overlay(request: pytest.FixtureRequest) -> Overlay:
    """Each folder of deploy/kubernetes in turn, the base included."""
    return build(request.param)


def _commands(overlay: Overlay) -> list[tuple[str, list[str]]]:
    """Return the module and the arguments of every command line in the pod."""
    lines = [[*part["command"], *part.get("args", [])] for part in mappings(overlay.pod) if "command" in part]
    # -P: not the folder that the process starts in.
    lines = [[word for word in line if word not in ("python3", "-P", "-m")] for line in lines if line[0] != "sleep"]
    return [(MODULES.get(line[0], line[0]), line[1:]) for line in lines]


def _option(command: list[str], name: str) -> float:
    """Return the number behind an option of a command line."""
    return float(command[command.index(name) + 1])


def _pause_before_the_end(container: Manifest) -> int:
    """Return the seconds that a container serves on before it gets SIGTERM."""
    program, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    return int(seconds)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_for_kubernetes(version: str) -> None:
    # The pods of KServe and Dynamo, whose own schemas leave them open.
    dynamo = yaml.safe_load((ROOT / "integrations" / "dynamo" / "kubernetes.yaml").read_text())
    specs = [component["podTemplate"]["spec"] for component in dynamo["spec"]["components"]]
    specs += [{name: value for name, value in build("overlays/kserve").pod.items() if name != "minReplicas"}]
    manifests = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": spec} for spec in specs]
    manifests += [manifest for name in FOLDERS for manifest in build(name).objects]
    kinds = set()
    # Each once, although overlays share most of them.
    for manifest in {json.dumps(manifest, sort_keys=True): manifest for manifest in manifests}.values():
        kind = manifest["kind"].lower()
        kinds.add(kind)
        if kind in SCHEMAS:
            jsonschema.Draft202012Validator(SCHEMAS[kind]).validate(manifest)
        else:
            kubernetes_validate.validate(manifest, version, strict=True)
    assert kinds > set(SCHEMAS)


def test_kserve_sends_requests_to_the_endpoint() -> None:
    # To the first port of transformer-container, or else of the first container.
    overlay = build("overlays/kserve")
    names = [container["name"] for container in overlay.pod["containers"]]
    assert names == ["kserve-container", "transformer-container"]
    assert [port["name"] for port in overlay.openai["ports"]] == ["openai"]
    labels = overlay.only("InferenceService")["metadata"]["labels"]
    assert all(service["spec"]["selector"].items() <= labels.items() for service in overlay.all("Service"))


def test_the_gateways_route_leads_to_the_endpoints() -> None:
    overlay = build("overlays/gateway")
    pool, (rule,) = overlay.only("InferencePool"), overlay.only("HTTPRoute")["spec"]["rules"]
    group, _, _ = pool["apiVersion"].partition("/")
    assert rule["backendRefs"] == [{"group": group, "kind": "InferencePool", "name": pool["metadata"]["name"]}]
    labels = overlay.only("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert [port["number"] for port in pool["spec"]["targetPorts"]] == [overlay.openai["ports"][0]["containerPort"]]


def test_every_pod_is_locked_down_in_a_restricted_namespace(overlay: Overlay) -> None:
    (namespace,) = overlay.all("Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    namespaces = {manifest["metadata"].get("namespace") for manifest in overlay.objects if manifest is not namespace}
    assert namespaces == {namespace["metadata"]["name"]}
    assert overlay.only("ServiceAccount")["automountServiceAccountToken"] is False
    for pod in overlay.pods.values():
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "runAsNonRoot": True,
                "capabilities": {"drop": ["ALL"]},
            }, container["name"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        # Variables of a Service called "llama" would be unknown settings, with which the model doesn't load.
        assert pod["enableServiceLinks"] is False


def test_the_server_downloads_nothing(overlay: Overlay) -> None:
    variables = environment(overlay.server)
    assert variables["HF_HUB_OFFLINE"] == "1"
    assert "HF_TOKEN" not in variables
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in overlay.all("NetworkPolicy")}
    assert policies["triton-llama"]["policyTypes"] == ["Ingress", "Egress"]
    assert not policies["triton-llama"].get("egress")
    # Only with an init container that downloads.
    assert ("triton-llama-download" in policies) == ("initContainers" in overlay.pod)


def test_the_image_has_every_command_with_its_options() -> None:
    used: dict[str, set[str]] = {}
    for module, arguments in (command for folder in FOLDERS for command in _commands(build(folder))):
        package = module.partition(".")[0]
        assert re.search(rf"^COPY .*/{package} /srv/triton-llama/python/{package}$", DOCKERFILE, re.MULTILINE)
        used.setdefault(module, set()).update(word for word in arguments if word.startswith("--"))
    for module, options in used.items():
        line = [sys.executable, "-m", module, "--help"]
        shown = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stdout
        assert options <= set(re.findall(r"--[a-z-]+", shown)), module


def test_every_port_is_one_of_the_image(overlay: Overlay) -> None:
    ports = {port["name"]: port["containerPort"] for port in [*overlay.server["ports"], *overlay.openai["ports"]]}
    (exposed,) = re.findall(r"^EXPOSE (\d+) (\d+) (\d+) (\d+)$", DOCKERFILE, re.MULTILINE)
    of_the_image = dict(zip(("http", "grpc", "metrics", "openai"), map(int, exposed), strict=True))
    assert ports == of_the_image


def test_services_policies_and_monitors_name_ports_of_their_pods(overlay: Overlay) -> None:
    ports = {
        name: {port["name"] for container in pod["containers"] for port in container["ports"]}
        for name, pod in overlay.pods.items()
    }
    for service in (each["spec"] for each in overlay.all("Service")):
        assert {port["targetPort"] for port in service["ports"]} <= ports[service["selector"][NAME]]
    for policy in (each["spec"] for each in overlay.all("NetworkPolicy")):
        named = {port["port"] for rule in policy.get("ingress", []) for port in rule["ports"]}
        assert named <= ports[policy["podSelector"]["matchLabels"][NAME]]
    for monitor in (each["spec"] for each in overlay.all("PodMonitor")):
        assert {end["port"] for end in monitor["podMetricsEndpoints"]} <= ports["triton-llama"]


def test_every_container_runs_the_version_of_this_project(overlay: Overlay) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {container["image"] for container in overlay.containers.values()} == {f"triton-llama:{version}"}
    assert f"-t triton-llama:{version} ." in (KUBERNETES / "README.md").read_text()


def test_every_variable_is_known(overlay: Overlay) -> None:
    prefix = endpoint_settings.ENVIRONMENT_PREFIX
    settings = {f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in BOUNDS}
    settings |= {f"{prefix}{name.upper()}" for name in endpoint_settings.Settings.model_fields}
    assert {*environment(overlay.server), *environment(overlay.openai)} <= settings | OTHER_VARIABLES
    for container in overlay.containers.values():
        defined: set[str] = set()
        for variable in [*container["env"], {"name": "", "value": " ".join(container.get("args", []))}]:
            assert set(re.findall(r"\$\((\w+)\)", variable.get("value", ""))) <= defined, variable
            defined.add(variable["name"])


def test_every_object_that_a_pod_names_exists(overlay: Overlay) -> None:
    parts = [part for pod in overlay.pods.values() for part in mappings(pod)]
    maps = {part["configMapKeyRef"]["name"] for part in parts if "configMapKeyRef" in part}
    maps |= {part["configMap"]["name"] for part in parts if "configMap" in part}
    assert maps == {manifest["metadata"]["name"] for manifest in overlay.all("ConfigMap")}
    claims = {part["claimName"] for part in parts if "claimName" in part}
    assert claims == {manifest["metadata"]["name"] for manifest in overlay.all("PersistentVolumeClaim")}
    # The operator creates the secret; a pod starts without it.
    assert all(part["secretKeyRef"]["optional"] for part in parts if "secretKeyRef" in part)


def test_the_server_reads_the_checkpoint_that_was_prepared(overlay: Overlay) -> None:
    for prepare in overlay.pod.get("initContainers", []):
        assert prepare["args"][prepare["args"].index("--out") + 1] == "/models/$(NAME)"
        assert environment(overlay.server)["LLAMA_MODEL"] == "/models/$(CHECKPOINT)"
        variables = [*prepare["env"], *overlay.server["env"]]
        sources = {variable["name"]: variable.get("valueFrom") for variable in variables}
        assert sources["NAME"] == sources["CHECKPOINT"]


def test_a_pod_is_killed_only_after_its_drain(overlay: Overlay) -> None:
    assert environment(overlay.server)["TRITON_GRACE_SECONDS"] == str(DEFAULT_GRACE_S)
    seconds = overlay.pod["terminationGracePeriodSeconds"]
    assert seconds == _pause_before_the_end(overlay.server) + DEFAULT_GRACE_S + STOP_MARGIN_S


def test_the_endpoint_stops_taking_requests_before_the_server_does(overlay: Overlay) -> None:
    seconds = _pause_before_the_end(overlay.openai)
    assert environment(overlay.openai)["TRITON_LLAMA_OPENAI_GRACE"] == str(DEFAULT_GRACE_S)
    assert 0 < seconds < _pause_before_the_end(overlay.server)
    assert seconds + DEFAULT_GRACE_S < overlay.pod["terminationGracePeriodSeconds"]


def test_a_probe_has_time_to_report_its_reason(overlay: Overlay) -> None:
    probes = [part[name] for part in (overlay.server, overlay.openai) for name in PROBES if name in part]
    assert len(probes) == 4
    for probe in probes:
        assert _option(probe["exec"]["command"], "--timeout") + PROBE_MARGIN_S <= probe["timeoutSeconds"]


def test_the_autoscaler_scales_by_metrics_that_exist() -> None:
    overlay, config = build("overlays/autoscaling"), read_config("config")
    scaled = overlay.only("ScaledObject")["spec"]
    assert scaled["scaleTargetRef"]["name"] == overlay.only("Deployment")["metadata"]["name"]
    queries = " ".join(trigger["metadata"]["query"] for trigger in scaled["triggers"])
    names = set(re.findall(r"\b((?:nv|llama)_\w+)\{", queries))
    assert len(names) == 3
    assert names <= {metric.name for metric in METRICS} | {"nv_inference_pending_request_count"}
    assert set(re.findall(r'namespace="([^"]+)"', queries)) == {overlay.only("Namespace")["metadata"]["name"]}
    thresholds = {trigger["name"]: int(trigger["metadata"]["threshold"]) for trigger in scaled["triggers"]}
    # The autoscaler divides the running sequences by this and rounds up, so full pods stay and add none.
    assert thresholds["running"] == config.max_batch_size
    assert thresholds["waiting"] < config.dynamic_batching.default_queue_policy.max_queue_size
