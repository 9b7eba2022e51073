"""Every folder of deploy/kubernetes builds, holds what its README says, and no file lies there unused."""

from __future__ import annotations

import pytest
import yaml
from contract.manifests import FOLDERS, KUBERNETES, built

SERVER = {
    ("Namespace", "triton-llama"),
    ("ServiceAccount", "triton-llama"),
    ("Deployment", "triton-llama"),
    ("Service", "triton-llama"),
    ("Service", "triton-llama-pods"),
    ("PodDisruptionBudget", "triton-llama"),
    ("NetworkPolicy", "triton-llama"),
}
PREPARED = {
    ("PersistentVolumeClaim", "checkpoints"),
    ("ConfigMap", "checkpoint"),
    ("NetworkPolicy", "triton-llama-download"),
    ("PodMonitor", "triton-llama"),
}
EXPECTED = {
    "base": SERVER | PREPARED,
    "overlays/cpu-demo": SERVER,
    "overlays/gpu": SERVER | PREPARED,
    "overlays/autoscaling": SERVER | PREPARED | {("ScaledObject", "triton-llama")},
}


def plain(name: str) -> str:
    """Without the hash that kustomize puts behind the names of generated objects."""
    return "checkpoint" if name.startswith("checkpoint-") else name


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_does_not_build_or_lacks_an_object(folder: str) -> None:
    objects = built(folder).objects
    assert {(one["kind"], plain(one["metadata"]["name"])) for one in objects} == EXPECTED[folder]
    assert len(objects) == len(EXPECTED[folder])


@pytest.mark.parametrize("folder", FOLDERS)
def test_an_object_is_outside_the_namespace(folder: str) -> None:
    objects = [one for one in built(folder).objects if one["kind"] != "Namespace"]
    assert {one["metadata"].get("namespace") for one in objects} == {"triton-llama"}


def test_a_file_is_used_by_no_kustomization() -> None:
    used = set()
    for file in KUBERNETES.rglob("kustomization.yaml"):
        parts = yaml.safe_load(file.read_text())
        names = [*parts["resources"], *(patch["path"] for patch in parts.get("patches", []) if "path" in patch)]
        used |= {file, *((file.parent / name).resolve() for name in names)}
    assert {file for file in KUBERNETES.rglob("*.yaml") if file not in used} == set()


def test_the_demo_changes_its_mind_about_a_volume() -> None:
    demo = built("overlays/cpu-demo")
    assert "initContainers" not in demo.pod["spec"]
    assert {volume["name"] for volume in demo.pod["spec"]["volumes"]} == {"shm", "tmp", "home"}
    assert {mount["mountPath"] for mount in demo.server["volumeMounts"]} == {
        "/dev/shm",
        "/tmp",
        "/var/cache/triton-llama",
    }


def test_a_pod_asks_for_no_gpu_or_the_demo_for_one() -> None:
    asked = {folder: built(folder).server["resources"]["limits"].get("nvidia.com/gpu") for folder in FOLDERS}
    assert asked == {"base": None, "overlays/cpu-demo": None, "overlays/gpu": "1", "overlays/autoscaling": "1"}


def test_applying_again_sets_back_the_number_of_pods_that_the_autoscaler_chose() -> None:
    assert "replicas" not in built("overlays/autoscaling").one("Deployment")["spec"]
    assert built("overlays/gpu").one("Deployment")["spec"]["replicas"] == 2
