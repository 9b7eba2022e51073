"""One grace period everywhere: the pod's, compose's, the supervisor's; and probes, memory and cores that agree."""

from __future__ import annotations

import re

import pytest
import yaml
from contract.kubectl import ROOT
from contract.manifests import FOLDERS, Built, Manifest, built, environment
from triton_supervisor.settings import DEFAULT_GRACE_S, STOP_MARGIN_S

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
HEALTH_MARGIN_S = 5
"""A probe takes at most its own --timeout and 2 s; what is over is for starting Python on a busy node."""
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def option(command: list[str], name: str) -> float:
    """The number behind an option of a command line."""
    return float(command[command.index(name) + 1])


def notice(container: Manifest) -> float:
    return option(container["lifecycle"]["preStop"]["exec"]["command"], "--seconds")


def grace(container: Manifest) -> int:
    value = environment(container)["TRITON_GRACE_SECONDS"]
    assert value is not None
    return int(value)


def size(quantity: str) -> int:
    """Bytes, of a Kubernetes quantity with a binary unit."""
    number, unit = re.fullmatch(r"(\d+)([KMG]i)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_pod_is_killed_before_its_grace_is_over(folder: str) -> None:
    one = built(folder)
    seconds = one.pod["spec"]["terminationGracePeriodSeconds"]
    assert seconds == notice(one.server) + grace(one.server) + STOP_MARGIN_S
    assert grace(one.server) == DEFAULT_GRACE_S
    # preStop's notice is the notice; the supervisor gives none of its own to one that was announced.
    assert "TRITON_NOTICE_SECONDS" not in environment(one.server)


@pytest.mark.parametrize("file", ["docker-compose.yml", "deploy/proxy/compose.proxy.yml"])
def test_compose_kills_a_server_before_its_grace_is_over(file: str) -> None:
    # compose.proxy.yml marks with !reset what it takes away.
    text = (ROOT / file).read_text().replace("!reset", "")
    server = yaml.safe_load(text)["services"]["server"]
    variables = server["environment"]
    given = int(variables["TRITON_NOTICE_SECONDS"]) if isinstance(variables, dict) else 0
    assert server["stop_grace_period"] == f"{given + DEFAULT_GRACE_S + STOP_MARGIN_S}s"


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_probe_is_cut_off_before_it_can_say_why(folder: str, probe: str) -> None:
    definition = built(folder).server[probe]
    assert option(definition["exec"]["command"], "--timeout") + HEALTH_MARGIN_S <= definition["timeoutSeconds"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_rollout_is_called_failed_while_a_pod_may_still_start(folder: str) -> None:
    one = built(folder)
    startup = one.server["startupProbe"]
    longest = startup["periodSeconds"] * startup["failureThreshold"]
    assert longest >= 1800
    # Twice: preparing the checkpoint comes before it.
    assert one.one("Deployment")["spec"]["progressDeadlineSeconds"] >= 2 * longest


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_stuck_pod_is_waited_for_as_long_as_a_busy_one(folder: str) -> None:
    one = built(folder)
    short = one.server["livenessProbe"]["terminationGracePeriodSeconds"]
    assert notice(one.server) + STOP_MARGIN_S <= short < one.pod["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_container_gets_more_memory_than_is_kept_for_it(folder: str) -> None:
    one = built(folder)
    for container in one.containers():
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
        assert "cpu" not in container["resources"]["limits"]
    assert shared_memory(one) <= size(one.server["resources"]["limits"]["memory"]) / 4


def shared_memory(one: Built) -> int:
    (volume,) = (volume for volume in one.pod["spec"]["volumes"] if volume["name"] == "shm")
    assert volume["emptyDir"]["medium"] == "Memory"
    return size(volume["emptyDir"]["sizeLimit"])


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_model_uses_other_cores_than_are_requested(folder: str) -> None:
    server = built(folder).server
    assert environment(server)["OMP_NUM_THREADS"] == server["resources"]["requests"]["cpu"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_rollout_takes_a_pod_away_before_its_successor_is_ready(folder: str) -> None:
    strategy = built(folder).one("Deployment")["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}


def test_the_autoscaler_waits_for_more_than_a_pod_can_have() -> None:
    config = (ROOT / "model_repository" / "llama" / "config.pbtxt").read_text()
    slots = int(re.findall(r"^max_batch_size: (\d+)$", config, re.MULTILINE)[0])
    queue = int(re.findall(r"max_queue_size: (\d+)$", config, re.MULTILINE)[0])
    scaled = built("overlays/autoscaling").one("ScaledObject")["spec"]
    thresholds = {trigger["name"]: int(trigger["metadata"]["threshold"]) for trigger in scaled["triggers"]}
    # Full pods keep each other, and add none: the autoscaler divides the rows that run by this, and rounds up.
    assert thresholds["running"] == slots
    assert thresholds["waiting"] < queue
    assert scaled["minReplicaCount"] == built("base").one("Deployment")["spec"]["replicas"]
