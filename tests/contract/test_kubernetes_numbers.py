"""Grace periods, probe timeouts, memory and cores agree between the pod, compose and the supervisor."""

from __future__ import annotations

import re

import pytest
import yaml
from contract.code_blocks import ROOT
from contract.configs import read_config
from contract.manifests import Built, Manifest, built, environment
from triton_supervisor.settings import DEFAULT_GRACE_S, STOP_MARGIN_S

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
HEALTH_MARGIN_S = 5
"""A probe takes at most its own --timeout and 2 s; the rest is for starting Python on a busy node."""
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def _option(command: list[str], name: str) -> float:
    """Return the number behind an option of a command line."""
    return float(command[command.index(name) + 1])


def _notice(container: Manifest) -> float:
    return _option(container["lifecycle"]["preStop"]["exec"]["command"], "--seconds")


def _bytes(quantity: str) -> int:
    """Convert a Kubernetes quantity with a binary unit."""
    number, unit = re.fullmatch(r"(\d+)([KMG]i)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


def test_a_pod_is_killed_only_after_notice_grace_and_margin(overlay: Built) -> None:
    variables = environment(overlay.server)
    assert variables["TRITON_GRACE_SECONDS"] == str(DEFAULT_GRACE_S)
    seconds = overlay.pod["spec"]["terminationGracePeriodSeconds"]
    assert seconds == _notice(overlay.server) + DEFAULT_GRACE_S + STOP_MARGIN_S
    # preStop gives the notice; the supervisor gives none of its own after an announcement.
    assert "TRITON_NOTICE_SECONDS" not in variables


@pytest.mark.parametrize("file", ["docker-compose.yml", "deploy/proxy/compose.proxy.yml"])
def test_compose_kills_a_server_only_after_notice_grace_and_margin(file: str) -> None:
    # compose.proxy.yml marks with !reset what it removes.
    text = (ROOT / file).read_text().replace("!reset", "")
    server = yaml.safe_load(text)["services"]["server"]
    variables = server["environment"]
    given = int(variables["TRITON_NOTICE_SECONDS"]) if isinstance(variables, dict) else 0
    assert server["stop_grace_period"] == f"{given + DEFAULT_GRACE_S + STOP_MARGIN_S}s"


@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_has_time_to_report_its_reason(overlay: Built, probe: str) -> None:
    definition = overlay.server[probe]
    assert _option(definition["exec"]["command"], "--timeout") + HEALTH_MARGIN_S <= definition["timeoutSeconds"]


def test_a_rollout_fails_only_after_a_pod_has_had_time_to_prepare_and_start(overlay: Built) -> None:
    startup = overlay.server["startupProbe"]
    longest = startup["periodSeconds"] * startup["failureThreshold"]
    assert longest >= 1800
    # Twice: the checkpoint is prepared before the start.
    assert overlay.one("Deployment")["spec"]["progressDeadlineSeconds"] >= 2 * longest


def test_a_stuck_pod_is_killed_sooner_than_a_busy_one(overlay: Built) -> None:
    short = overlay.server["livenessProbe"]["terminationGracePeriodSeconds"]
    least = _notice(overlay.server) + STOP_MARGIN_S
    assert least <= short < overlay.pod["spec"]["terminationGracePeriodSeconds"]


def test_memory_is_reserved_in_full_and_cores_are_not_limited(overlay: Built) -> None:
    for container in overlay.containers():
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
        assert "cpu" not in container["resources"]["limits"]
    (shared,) = (volume["emptyDir"] for volume in overlay.pod["spec"]["volumes"] if volume["name"] == "shm")
    assert shared["medium"] == "Memory"
    assert _bytes(shared["sizeLimit"]) <= _bytes(overlay.server["resources"]["limits"]["memory"]) / 4


def test_the_model_uses_as_many_cores_as_are_requested(overlay: Built) -> None:
    assert environment(overlay.server)["OMP_NUM_THREADS"] == overlay.server["resources"]["requests"]["cpu"]


def test_a_rollout_keeps_a_pod_until_its_successor_is_ready(overlay: Built) -> None:
    strategy = overlay.one("Deployment")["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}


def test_the_autoscalers_thresholds_are_within_a_pods_capacity() -> None:
    config = read_config("config")
    scaled = built("overlays/autoscaling").one("ScaledObject")["spec"]
    thresholds = {trigger["name"]: int(trigger["metadata"]["threshold"]) for trigger in scaled["triggers"]}
    # The autoscaler divides the running rows by this and rounds up, so full pods stay and add none.
    assert thresholds["running"] == config.max_batch_size
    assert thresholds["waiting"] < config.dynamic_batching.default_queue_policy.max_queue_size
    assert scaled["minReplicaCount"] == built("base").one("Deployment")["spec"]["replicas"]
