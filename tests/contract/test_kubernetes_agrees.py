"""What the manifests name exists in the image, the engine and each other, and their numbers fit together."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

from contract.code_blocks import ROOT
from contract.configs import read_config
from contract.manifests import FOLDERS, KUBERNETES, Built, built, environment, mappings
from llama_engine.observability.metrics import METRICS
from llama_engine.settings import BOUNDS, ENVIRONMENT_PREFIX
from triton_llama_openai import settings as endpoint_settings
from triton_supervisor.settings import DEFAULT_GRACE_S, STOP_MARGIN_S

DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
HEALTH = "/srv/triton-llama/bin/health"
# How to run each program of the image here, where the image's paths don't exist.
HELP = {
    HEALTH: "triton_supervisor.health",
    **{name: name for name in ("triton_supervisor", "triton_prepare", "triton_llama_openai")},
    "triton_llama_openai.health": "triton_llama_openai.health",
}
SUPERVISOR_VARIABLES = {"TRITON_GRACE_SECONDS", "TRITON_NOTICE_SECONDS", "TRITON_READY_PORT"}
OTHER_VARIABLES = {"CHECKPOINT", "HF_HUB_OFFLINE", "OMP_NUM_THREADS"}
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
PROBE_MARGIN_S = 5
"""A probe takes at most its own --timeout and 2 s; the rest is for starting Python on a busy node."""


def _commands(one: Built) -> list[tuple[str, list[str]]]:
    """Return the program, a key of HELP, and the arguments of every command line in the pod."""
    lines = [[*part["command"], *part.get("args", [])] for part in mappings(one.pod) if "command" in part]
    # -P: not the folder that the process starts in.
    lines = [[word for word in line if word != "-P"] for line in lines]
    return [
        (line[2], line[3:]) if line[:2] == ["python3", "-m"] else (line[0], line[1:])
        for line in lines
        if line[0] != "sleep"
    ]


def _option(command: list[str], name: str) -> float:
    """Return the number behind an option of a command line."""
    return float(command[command.index(name) + 1])


def _notice(one: Built) -> float:
    return float(environment(one.server)["TRITON_NOTICE_SECONDS"] or 0)


def test_every_command_is_one_of_the_image() -> None:
    assert "COPY deploy/docker/bin /srv/triton-llama/bin" in DOCKERFILE
    used: dict[tuple[str, ...], set[str]] = {}
    for program, arguments in (command for folder in FOLDERS for command in _commands(built(folder))):
        module = HELP[program].partition(".")[0]
        assert re.search(rf"^COPY .*/{module} /srv/triton-llama/python/{module}$", DOCKERFILE, re.MULTILINE)
        used.setdefault((HELP[program],), set()).update(word for word in arguments if word.startswith("--"))
    for command, options in used.items():
        line = [sys.executable, "-m", *command, "--help"]
        shown = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stdout
        assert options <= set(re.findall(r"--[a-z-]+", shown)), command


def test_every_port_is_one_of_the_image(overlay: Built) -> None:
    both = [*overlay.server["ports"], *overlay.openai["ports"]]
    ports = {port["name"]: port["containerPort"] for port in both}
    (exposed,) = re.findall(r"^EXPOSE (\d+) (\d+) (\d+) (\d+)$", DOCKERFILE, re.MULTILINE)
    exposed = dict(zip(("http", "grpc", "metrics", "openai"), map(int, exposed), strict=True))
    assert ports == {**exposed, "ready": int(environment(overlay.server)["TRITON_READY_PORT"] or 0)}
    named = [port["targetPort"] for service in overlay.all("Service") for port in service["spec"]["ports"]]
    rules = [rule for policy in overlay.all("NetworkPolicy") for rule in policy["spec"].get("ingress", [])]
    named += [port["port"] for rule in rules for port in rule["ports"]]
    named += [end["port"] for monitor in overlay.all("PodMonitor") for end in monitor["spec"]["podMetricsEndpoints"]]
    assert set(named) <= set(ports)


def test_the_endpoint_is_reached(overlay: Built) -> None:
    names = [[port["name"] for port in service["spec"]["ports"]] for service in overlay.all("Service")]
    assert [of for of in names if "openai" not in of] == []
    (policy,) = (one for one in overlay.all("NetworkPolicy") if "Ingress" in one["spec"]["policyTypes"])
    allowed = [{port["port"] for port in rule["ports"]} for rule in policy["spec"]["ingress"]]
    assert allowed == [{"http", "grpc", "ready", "openai"}, {"metrics", "openai"}]
    for monitor in overlay.all("PodMonitor"):
        ends = {end["port"]: end for end in monitor["spec"]["podMetricsEndpoints"]}
        job = {"targetLabel": "job", "replacement": "triton-llama-openai"}
        assert [job in ends[port]["relabelings"] for port in ("metrics", "openai")] == [False, True]
        # A pod that still prepares would count as a server that is down.
        running = {"sourceLabels": ["__meta_kubernetes_pod_phase"], "regex": "Running", "action": "keep"}
        assert all(end["relabelings"][0] == running for end in ends.values())


def test_every_selector_selects_the_servers_pods(overlay: Built) -> None:
    selectors = [one["spec"]["selector"] for one in overlay.all("Service")]
    for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
        selectors += [one["spec"]["selector"]["matchLabels"] for one in overlay.all(kind)]
    selectors += [one["spec"]["podSelector"]["matchLabels"] for one in overlay.all("NetworkPolicy")]
    selectors += [one["labelSelector"]["matchLabels"] for one in overlay.pod["topologySpreadConstraints"]]
    server = {"app.kubernetes.io/name": "triton-llama"}
    assert [labels for labels in selectors if labels != server] == []
    assert server.items() <= overlay.one("Deployment")["spec"]["template"]["metadata"]["labels"].items()
    # A device plugin sets no node labels.
    assert not {"nodeSelector", "affinity", "nodeName"} & overlay.pod.keys()


def test_every_container_runs_the_version_of_this_project(overlay: Built) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {container["image"] for container in overlay.containers} == {f"triton-llama:{version}"}
    assert f"-t triton-llama:{version} ." in (KUBERNETES / "README.md").read_text()


def test_every_variable_is_known(overlay: Built) -> None:
    names = {*environment(overlay.server), *environment(overlay.openai)}
    settings = {name for name in names if name.startswith(ENVIRONMENT_PREFIX)}
    assert settings <= {f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in BOUNDS}
    endpoints = {name for name in names if name.startswith(endpoint_settings.ENVIRONMENT_PREFIX)}
    assert endpoints <= {
        f"{endpoint_settings.ENVIRONMENT_PREFIX}{name.upper()}" for name in endpoint_settings.Settings.model_fields
    }
    assert names - settings - endpoints <= SUPERVISOR_VARIABLES | OTHER_VARIABLES
    documented = (ROOT / "deploy" / "docker" / "README.md").read_text()
    assert [name for name in SUPERVISOR_VARIABLES if f"`{name}`" not in documented] == []
    for container in overlay.containers:
        defined: set[str] = set()
        for variable in [*container["env"], {"name": "", "value": " ".join(container.get("args", []))}]:
            assert set(re.findall(r"\$\((\w+)\)", variable.get("value", ""))) <= defined, variable
            defined.add(variable["name"])


def test_every_named_object_exists(overlay: Built) -> None:
    parts = list(mappings(overlay.pod))
    maps = {part["configMapKeyRef"]["name"] for part in parts if "configMapKeyRef" in part}
    assert maps == {found["metadata"]["name"] for found in overlay.all("ConfigMap")}
    claims = {part["claimName"] for part in parts if "claimName" in part}
    assert claims == {found["metadata"]["name"] for found in overlay.all("PersistentVolumeClaim")}
    # The operator creates the secret; a pod starts without it.
    assert all(part["secretKeyRef"]["optional"] for part in parts if "secretKeyRef" in part)


def test_the_server_reads_the_checkpoint_that_was_prepared(overlay: Built) -> None:
    for prepare in overlay.pod.get("initContainers", []):
        assert prepare["args"][prepare["args"].index("--out") + 1] == "/models/$(NAME)"
        assert environment(overlay.server)["LLAMA_MODEL"] == "/models/$(CHECKPOINT)"
        both = [*prepare["env"], *overlay.server["env"]]
        sources = {variable["name"]: variable.get("valueFrom") for variable in both}
        assert sources["NAME"] == sources["CHECKPOINT"]
        data = overlay.one("ConfigMap")["data"]
        assert set(data) == {"MODEL", "REVISION", "NAME"}
        # A branch may move between two pods; a commit can't.
        assert re.fullmatch(r"[0-9a-f]{40}", data["REVISION"])


def test_a_pod_is_killed_only_after_its_drain(overlay: Built) -> None:
    variables = environment(overlay.server)
    assert variables["TRITON_GRACE_SECONDS"] == str(DEFAULT_GRACE_S)
    seconds = overlay.pod["terminationGracePeriodSeconds"]
    assert seconds == _notice(overlay) + DEFAULT_GRACE_S + STOP_MARGIN_S
    # A stuck pod has no requests to answer.
    assert (
        _notice(overlay) + STOP_MARGIN_S <= overlay.server["livenessProbe"]["terminationGracePeriodSeconds"] < seconds
    )


def test_the_endpoint_stops_taking_requests_before_the_server_does(overlay: Built) -> None:
    program, seconds = overlay.openai["lifecycle"]["preStop"]["exec"]["command"]
    assert (program, environment(overlay.openai)["TRITON_LLAMA_OPENAI_GRACE"]) == ("sleep", str(DEFAULT_GRACE_S))
    assert 0 < int(seconds) < _notice(overlay)
    assert int(seconds) + DEFAULT_GRACE_S < overlay.pod["terminationGracePeriodSeconds"]
    assert overlay.openai["args"][-1] == f"127.0.0.1:{overlay.server['ports'][1]['containerPort']}"


def test_a_probe_has_time_to_report_its_reason(overlay: Built) -> None:
    probes = [part[name] for part in (overlay.server, overlay.openai) for name in PROBES if name in part]
    assert len(probes) == 5
    for probe in probes:
        assert _option(probe["exec"]["command"], "--timeout") + PROBE_MARGIN_S <= probe["timeoutSeconds"]


def test_a_rollout_keeps_a_pod_until_its_successor_is_ready(overlay: Built) -> None:
    startup, deployment = overlay.server["startupProbe"], overlay.one("Deployment")["spec"]
    longest = startup["periodSeconds"] * startup["failureThreshold"]
    assert longest >= 1800
    # Twice: the checkpoint is prepared before the start.
    assert deployment["progressDeadlineSeconds"] >= 2 * longest
    assert deployment["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}


def test_memory_is_reserved_in_full(overlay: Built) -> None:
    for resources in (container["resources"] for container in overlay.containers):
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
        assert "cpu" not in resources["limits"]
    (shared,) = (volume["emptyDir"] for volume in overlay.pod["volumes"] if volume["name"] == "shm")
    assert shared["medium"] == "Memory"
    sizes = (shared["sizeLimit"], overlay.server["resources"]["limits"]["memory"])
    shm, memory = (int(size[:-2]) * {"Mi": 1, "Gi": 1024}[size[-2:]] for size in sizes)
    assert shm <= memory / 4
    # The model uses as many cores as are requested.
    assert environment(overlay.server)["OMP_NUM_THREADS"] == overlay.server["resources"]["requests"]["cpu"]


def test_the_autoscaler_scales_by_metrics_that_exist() -> None:
    one, config = built("overlays/autoscaling"), read_config("config")
    scaled = one.one("ScaledObject")["spec"]
    assert scaled["scaleTargetRef"]["name"] == one.one("Deployment")["metadata"]["name"]
    assert scaled["minReplicaCount"] == built("base").one("Deployment")["spec"]["replicas"]
    queries = " ".join(trigger["metadata"]["query"] for trigger in scaled["triggers"])
    queried = set(re.findall(r"\b((?:nv|llama)_\w+)\{", queries))
    assert len(queried) == 3
    assert queried <= {metric.name for metric in METRICS} | {"nv_inference_pending_request_count"}
    assert set(re.findall(r'namespace="([^"]+)"', queries)) == {one.one("Namespace")["metadata"]["name"]}
    thresholds = {trigger["name"]: int(trigger["metadata"]["threshold"]) for trigger in scaled["triggers"]}
    # The autoscaler divides the running rows by this and rounds up, so full pods stay and add none.
    assert thresholds["running"] == config.max_batch_size
    assert thresholds["waiting"] < config.dynamic_batching.default_queue_policy.max_queue_size
