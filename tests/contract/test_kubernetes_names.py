"""What the manifests name exists: commands and options in the image, ports, labels, variables, objects, metrics."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest
from contract.kubectl import ROOT
from contract.manifests import FOLDERS, KUBERNETES, Built, Manifest, built, environment, inside
from llama_engine.observability.metrics import METRICS
from llama_engine.settings import BOUNDS, ENVIRONMENT_PREFIX

DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
HEALTH = "/srv/triton-llama/bin/health"
# How each program of the image is run from here, where the image's paths don't exist.
HELP = {
    HEALTH: [sys.executable, "-m", "triton_llama.health"],
    "triton_supervisor": [sys.executable, "-m", "triton_supervisor"],
    "triton_prepare": [sys.executable, "-m", "triton_prepare"],
}
TRITONS_OWN = {"nv_inference_pending_request_count"}
SUPERVISORS = {"TRITON_GRACE_SECONDS", "TRITON_READY_PORT"}
OTHERS = {"CHECKPOINT", "HF_HUB_OFFLINE", "OMP_NUM_THREADS"}


def commands(one: Built) -> list[list[str]]:
    """Every command line that the pod runs."""
    lines = [part["command"] for part in inside(one.pod) if isinstance(part, dict) and "command" in part]
    init = [container for container in one.pod["spec"].get("initContainers", []) if "args" in container]
    return [line + next((c["args"] for c in init if c["command"] == line), []) for line in lines]


def program_and_arguments(command: list[str]) -> tuple[str, list[str]]:
    """Which of HELP's programs a command line runs, and with what."""
    if command[:2] == ["python3", "-m"]:
        return command[2], command[3:]
    return command[0], command[1:]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_command_is_not_in_the_image(folder: str) -> None:
    programs = {program_and_arguments(command)[0] for command in commands(built(folder))}
    assert programs == (set(HELP) if "prepare" in str(built(folder).pod) else {HEALTH, "triton_supervisor"})
    assert f"ln -s ../python/triton_llama/health.py {HEALTH} " in DOCKERFILE
    for module in programs - {HEALTH}:
        assert re.search(rf"^COPY .*/{module} /srv/triton-llama/python/{module}$", DOCKERFILE, re.MULTILINE)


def test_a_command_has_an_option_that_its_program_does_not_know() -> None:
    used: dict[tuple[str, str], set[str]] = {}
    for command in (command for folder in FOLDERS for command in commands(built(folder))):
        program, arguments = program_and_arguments(command)
        verb = arguments[0] if program == "triton_supervisor" else ""
        used.setdefault((program, verb), set()).update(word for word in arguments if word.startswith("--"))
    for (program, verb), options in used.items():
        line = [*HELP[program], *([verb] if verb else []), "--help"]
        shown = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stdout
        assert options <= set(re.findall(r"--[a-z-]+", shown)), program


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_port_is_not_the_images(folder: str) -> None:
    ports = {port["name"]: port["containerPort"] for port in built(folder).server["ports"]}
    (exposed,) = re.findall(r"^EXPOSE (.*)$", DOCKERFILE, re.MULTILINE)
    assert [ports[name] for name in ("http", "grpc", "metrics")] == [int(port) for port in exposed.split()]
    assert str(ports["ready"]) == environment(built(folder).server)["TRITON_READY_PORT"]
    assert set(ports) == {"http", "grpc", "metrics", "ready"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_port_is_named_that_no_container_has(folder: str) -> None:
    one = built(folder)
    named = [port["targetPort"] for service in one.all("Service") for port in service["spec"]["ports"]]
    rules = [rule for policy in one.all("NetworkPolicy") for rule in policy["spec"].get("ingress", [])]
    named += [port["port"] for rule in rules for port in rule["ports"]]
    named += [end["port"] for monitor in one.all("PodMonitor") for end in monitor["spec"]["podMetricsEndpoints"]]
    assert set(named) <= {port["name"] for port in one.server["ports"]}


@pytest.mark.parametrize("folder", FOLDERS)
def test_something_selects_other_pods_than_the_servers(folder: str) -> None:
    one = built(folder)
    labels = one.pod["metadata"]["labels"]
    selectors: list[Manifest] = [service["spec"]["selector"] for service in one.all("Service")]
    for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
        selectors += [found["spec"]["selector"]["matchLabels"] for found in one.all(kind)]
    selectors += [policy["spec"]["podSelector"]["matchLabels"] for policy in one.all("NetworkPolicy")]
    spread = one.pod["spec"]["topologySpreadConstraints"]
    selectors += [constraint["labelSelector"]["matchLabels"] for constraint in spread]
    assert all(selector == {"app.kubernetes.io/name": "triton-llama"} for selector in selectors)
    assert labels["app.kubernetes.io/name"] == "triton-llama"


def test_a_pod_waits_for_a_label_of_nodes_that_the_device_plugin_does_not_set() -> None:
    for folder in FOLDERS:
        assert not {"nodeSelector", "affinity", "nodeName"} & built(folder).pod["spec"].keys(), folder


def test_a_pod_that_still_prepares_counts_as_a_server_that_is_down() -> None:
    monitors = [monitor for folder in FOLDERS for monitor in built(folder).all("PodMonitor")]
    kept = {"sourceLabels": ["__meta_kubernetes_pod_phase"], "regex": "Running", "action": "keep"}
    assert monitors
    assert all(end["relabelings"] == [kept] for one in monitors for end in one["spec"]["podMetricsEndpoints"])


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_node_may_run_another_version_of_the_image(folder: str) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {container["image"] for container in built(folder).containers()} == {f"triton-llama:{version}"}
    assert f"-t triton-llama:{version} ." in (KUBERNETES / "README.md").read_text()


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_variable_of_the_server_means_nothing_to_it(folder: str) -> None:
    names = set(environment(built(folder).server))
    settings = {name for name in names if name.startswith(ENVIRONMENT_PREFIX)}
    assert settings <= {f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in BOUNDS}
    assert names - settings <= SUPERVISORS | OTHERS
    documented = (ROOT / "deploy" / "docker" / "README.md").read_text()
    assert [name for name in sorted(SUPERVISORS) if f"`{name}`" not in documented] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_variable_is_used_before_it_is_defined(folder: str) -> None:
    for container in built(folder).containers():
        defined: set[str] = set()
        for variable in container.get("env", []):
            assert set(re.findall(r"\$\((\w+)\)", variable.get("value", ""))) <= defined, variable["name"]
            defined.add(variable["name"])
        assert set(re.findall(r"\$\((\w+)\)", " ".join(container.get("args", [])))) <= defined


@pytest.mark.parametrize("folder", FOLDERS)
def test_an_object_is_named_that_is_not_there(folder: str) -> None:
    one = built(folder)
    parts = [part for part in inside(one.pod) if isinstance(part, dict)]
    maps = {part["configMapKeyRef"]["name"] for part in parts if "configMapKeyRef" in part}
    assert maps == {found["metadata"]["name"] for found in one.all("ConfigMap")}
    claims = {part["claimName"] for part in parts if "claimName" in part}
    assert claims == {found["metadata"]["name"] for found in one.all("PersistentVolumeClaim")}
    # A secret is the operator's to make; a pod starts without.
    assert all(part["secretKeyRef"]["optional"] for part in parts if "secretKeyRef" in part)
    mounted = {mount["name"] for container in one.containers() for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in one.pod["spec"]["volumes"]}


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if not folder.endswith("cpu-demo")])
def test_the_server_reads_another_checkpoint_than_was_prepared(folder: str) -> None:
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


def test_the_autoscaler_asks_for_a_metric_that_does_not_exist_or_scales_something_else() -> None:
    one = built("overlays/autoscaling")
    scaled = one.one("ScaledObject")["spec"]
    assert scaled["scaleTargetRef"]["name"] == one.one("Deployment")["metadata"]["name"]
    queries = [trigger["metadata"]["query"] for trigger in scaled["triggers"]]
    asked = {name for query in queries for name in re.findall(r"\b((?:nv|llama)_\w+)\{", query)}
    assert asked <= {metric.name for metric in METRICS} | TRITONS_OWN
    assert len(asked) == 3
    namespaces = {name for query in queries for name in re.findall(r'namespace="([^"]+)"', query)}
    assert namespaces == {one.one("Namespace")["metadata"]["name"]}
