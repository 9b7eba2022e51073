"""What the manifests name exists: commands and options in the image, ports, labels, variables, objects, metrics."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest
from contract.code_blocks import ROOT
from contract.manifests import FOLDERS, KUBERNETES, Built, Manifest, built, environment, inside
from llama_engine.observability.metrics import METRICS
from llama_engine.settings import BOUNDS, ENVIRONMENT_PREFIX

DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
HEALTH = "/srv/triton-llama/bin/health"
# How to run each program of the image here, where the image's paths don't exist.
HELP = {
    HEALTH: [sys.executable, "-m", "triton_llama.health"],
    "triton_supervisor": [sys.executable, "-m", "triton_supervisor"],
    "triton_prepare": [sys.executable, "-m", "triton_prepare"],
}
TRITON_METRICS = {"nv_inference_pending_request_count"}
SUPERVISOR_VARIABLES = {"TRITON_GRACE_SECONDS", "TRITON_READY_PORT"}
OTHER_VARIABLES = {"CHECKPOINT", "HF_HUB_OFFLINE", "OMP_NUM_THREADS"}


def _commands(one: Built) -> list[tuple[str, list[str]]]:
    """Return the program, a key of HELP, and the arguments of every command line in the pod."""
    lines = [
        [*part["command"], *part.get("args", [])]
        for part in inside(one.pod)
        if isinstance(part, dict) and "command" in part
    ]
    return [(line[2], line[3:]) if line[:2] == ["python3", "-m"] else (line[0], line[1:]) for line in lines]


def test_every_command_is_in_the_image(overlay: Built) -> None:
    programs = {program for program, _ in _commands(overlay)}
    assert programs == (set(HELP) if "prepare" in str(overlay.pod) else {HEALTH, "triton_supervisor"})
    assert f"ln -s ../python/triton_llama/health.py {HEALTH} " in DOCKERFILE
    for module in programs - {HEALTH}:
        assert re.search(rf"^COPY .*/{module} /srv/triton-llama/python/{module}$", DOCKERFILE, re.MULTILINE)


def test_every_option_of_a_command_is_known_to_its_program() -> None:
    used: dict[tuple[str, str], set[str]] = {}
    for program, arguments in (command for folder in FOLDERS for command in _commands(built(folder))):
        verb = arguments[0] if program == "triton_supervisor" else ""
        used.setdefault((program, verb), set()).update(word for word in arguments if word.startswith("--"))
    for (program, verb), options in used.items():
        line = [*HELP[program], *([verb] if verb else []), "--help"]
        shown = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stdout
        assert options <= set(re.findall(r"--[a-z-]+", shown)), program


def test_ports_are_the_images_and_every_named_port_exists(overlay: Built) -> None:
    ports = {port["name"]: port["containerPort"] for port in overlay.server["ports"]}
    (exposed,) = re.findall(r"^EXPOSE (.*)$", DOCKERFILE, re.MULTILINE)
    assert [ports[name] for name in ("http", "grpc", "metrics")] == [int(port) for port in exposed.split()]
    assert str(ports["ready"]) == environment(overlay.server)["TRITON_READY_PORT"]
    assert set(ports) == {"http", "grpc", "metrics", "ready"}
    named = [port["targetPort"] for service in overlay.all("Service") for port in service["spec"]["ports"]]
    rules = [rule for policy in overlay.all("NetworkPolicy") for rule in policy["spec"].get("ingress", [])]
    named += [port["port"] for rule in rules for port in rule["ports"]]
    named += [end["port"] for monitor in overlay.all("PodMonitor") for end in monitor["spec"]["podMetricsEndpoints"]]
    assert set(named) <= set(ports)


def test_every_selector_selects_the_servers_pods(overlay: Built) -> None:
    selectors: list[Manifest] = [service["spec"]["selector"] for service in overlay.all("Service")]
    for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
        selectors += [found["spec"]["selector"]["matchLabels"] for found in overlay.all(kind)]
    selectors += [policy["spec"]["podSelector"]["matchLabels"] for policy in overlay.all("NetworkPolicy")]
    spread = overlay.pod["spec"]["topologySpreadConstraints"]
    selectors += [constraint["labelSelector"]["matchLabels"] for constraint in spread]
    assert all(selector == {"app.kubernetes.io/name": "triton-llama"} for selector in selectors)
    assert overlay.pod["metadata"]["labels"]["app.kubernetes.io/name"] == "triton-llama"


def test_pods_require_no_node_labels(overlay: Built) -> None:
    """The device plugin sets none."""
    assert not {"nodeSelector", "affinity", "nodeName"} & overlay.pod["spec"].keys()


def test_only_running_pods_are_scraped() -> None:
    """A pod that still prepares would count as a server that is down."""
    monitors = [monitor for folder in FOLDERS for monitor in built(folder).all("PodMonitor")]
    kept = {"sourceLabels": ["__meta_kubernetes_pod_phase"], "regex": "Running", "action": "keep"}
    assert monitors
    assert all(end["relabelings"] == [kept] for one in monitors for end in one["spec"]["podMetricsEndpoints"])


def test_every_container_runs_the_version_of_this_project(overlay: Built) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {container["image"] for container in overlay.containers()} == {f"triton-llama:{version}"}
    assert f"-t triton-llama:{version} ." in (KUBERNETES / "README.md").read_text()


def test_every_variable_of_the_server_is_known_and_documented(overlay: Built) -> None:
    names = set(environment(overlay.server))
    settings = {name for name in names if name.startswith(ENVIRONMENT_PREFIX)}
    assert settings <= {f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in BOUNDS}
    assert names - settings <= SUPERVISOR_VARIABLES | OTHER_VARIABLES
    documented = (ROOT / "deploy" / "docker" / "README.md").read_text()
    assert [name for name in sorted(SUPERVISOR_VARIABLES) if f"`{name}`" not in documented] == []


def test_variables_are_defined_before_they_are_used(overlay: Built) -> None:
    for container in overlay.containers():
        defined: set[str] = set()
        for variable in container.get("env", []):
            assert set(re.findall(r"\$\((\w+)\)", variable.get("value", ""))) <= defined, variable["name"]
            defined.add(variable["name"])
        assert set(re.findall(r"\$\((\w+)\)", " ".join(container.get("args", [])))) <= defined


def test_every_named_object_exists(overlay: Built) -> None:
    parts = [part for part in inside(overlay.pod) if isinstance(part, dict)]
    maps = {part["configMapKeyRef"]["name"] for part in parts if "configMapKeyRef" in part}
    assert maps == {found["metadata"]["name"] for found in overlay.all("ConfigMap")}
    claims = {part["claimName"] for part in parts if "claimName" in part}
    assert claims == {found["metadata"]["name"] for found in overlay.all("PersistentVolumeClaim")}
    # The operator creates the secret; a pod starts without it.
    assert all(part["secretKeyRef"]["optional"] for part in parts if "secretKeyRef" in part)
    mounted = {mount["name"] for container in overlay.containers() for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in overlay.pod["spec"]["volumes"]}


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if not folder.endswith("cpu-demo")])
def test_the_server_reads_the_checkpoint_that_was_prepared(folder: str) -> None:
    one = built(folder)
    prepare = one.pod["spec"]["initContainers"][0]
    assert prepare["args"][prepare["args"].index("--out") + 1] == "/models/$(NAME)"
    assert environment(one.server)["LLAMA_MODEL"] == "/models/$(CHECKPOINT)"
    sources = {variable["name"]: variable.get("valueFrom") for variable in [*prepare["env"], *one.server["env"]]}
    assert sources["NAME"] == sources["CHECKPOINT"]
    data = one.one("ConfigMap")["data"]
    assert set(data) == {"MODEL", "REVISION", "NAME"}
    # A branch may move between two pods; a commit can't.
    assert re.fullmatch(r"[0-9a-f]{40}", data["REVISION"])


def test_the_autoscaler_scales_the_deployment_by_metrics_that_exist() -> None:
    one = built("overlays/autoscaling")
    scaled = one.one("ScaledObject")["spec"]
    assert scaled["scaleTargetRef"]["name"] == one.one("Deployment")["metadata"]["name"]
    queries = [trigger["metadata"]["query"] for trigger in scaled["triggers"]]
    queried = {name for query in queries for name in re.findall(r"\b((?:nv|llama)_\w+)\{", query)}
    assert queried <= {metric.name for metric in METRICS} | TRITON_METRICS
    assert len(queried) == 3
    namespaces = {name for query in queries for name in re.findall(r'namespace="([^"]+)"', query)}
    assert namespaces == {one.one("Namespace")["metadata"]["name"]}
