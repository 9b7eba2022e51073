"""Every folder of deploy/kubernetes builds, has the objects its README lists, and is valid for its Kubernetes versions.

Kinds of other projects (PodMonitor, ScaledObject) are checked against custom_resources/*.schema.json, which are their
definitions reduced to the fields that are used here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from contract.manifests import FOLDERS, KUBERNETES, Built, Manifest, built

SERVER = {
    ("Namespace", "triton-llama"),
    ("ServiceAccount", "triton-llama"),
    ("Deployment", "triton-llama"),
    ("Service", "triton-llama"),
    ("Service", "triton-llama-pods"),
    ("PodDisruptionBudget", "triton-llama"),
    ("NetworkPolicy", "triton-llama"),
}
PREPARED = SERVER | {
    ("PersistentVolumeClaim", "checkpoints"),
    ("ConfigMap", "checkpoint"),
    ("NetworkPolicy", "triton-llama-download"),
    ("PodMonitor", "triton-llama"),
}
EXPECTED = {
    "base": PREPARED,
    "overlays/cpu-demo": SERVER,
    "overlays/gpu": PREPARED,
    "overlays/autoscaling": PREPARED | {("ScaledObject", "triton-llama")},
}
SCHEMAS = {
    file.name.removesuffix(".schema.json"): json.loads(file.read_text())
    for file in (Path(__file__).parent / "custom_resources").glob("*.schema.json")
}
(OLDEST,) = re.findall(r"^For Kubernetes (1\.\d+) or newer", (KUBERNETES / "README.md").read_text(), re.MULTILINE)


def _different_objects() -> list[Manifest]:
    """Return each object once, although overlays share most of them."""
    by_content = {json.dumps(one, sort_keys=True): one for folder in FOLDERS for one in built(folder).objects}
    return list(by_content.values())


def test_a_folder_builds_with_its_objects_in_the_namespace(overlay: Built) -> None:
    # kustomize puts a hash behind the names of generated objects.
    names = [re.sub(r"^checkpoint-.*", "checkpoint", one["metadata"]["name"]) for one in overlay.objects]
    found = [(one["kind"], name) for one, name in zip(overlay.objects, names, strict=True)]
    assert sorted(found) == sorted(EXPECTED[overlay.folder])
    namespaces = {one["metadata"].get("namespace") for one in overlay.objects if one["kind"] != "Namespace"}
    assert namespaces == {"triton-llama"}


def test_every_file_is_used_by_a_kustomization() -> None:
    used = set()
    for file in KUBERNETES.rglob("kustomization.yaml"):
        parts = yaml.safe_load(file.read_text())
        names = [*parts["resources"], *(patch["path"] for patch in parts.get("patches", []) if "path" in patch)]
        used |= {file, *((file.parent / name).resolve() for name in names)}
    assert {file for file in KUBERNETES.rglob("*.yaml") if file not in used} == set()


def test_the_demo_has_no_checkpoint_volume() -> None:
    demo = built("overlays/cpu-demo")
    assert "initContainers" not in demo.pod["spec"]
    assert {volume["name"] for volume in demo.pod["spec"]["volumes"]} == {"shm", "tmp", "home"}
    mounts = {mount["mountPath"] for mount in demo.server["volumeMounts"]}
    assert mounts == {"/dev/shm", "/tmp", "/var/cache/triton-llama"}


def test_only_the_gpu_overlays_request_a_gpu() -> None:
    requested = [built(folder).server["resources"]["limits"].get("nvidia.com/gpu") for folder in FOLDERS]
    assert requested == [None, None, "1", "1"]


def test_applying_again_keeps_the_number_of_pods_that_the_autoscaler_chose() -> None:
    assert "replicas" not in built("overlays/autoscaling").one("Deployment")["spec"]
    assert built("overlays/gpu").one("Deployment")["spec"]["replicas"] == 2


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
def test_every_object_is_valid_for_the_oldest_and_the_newest_kubernetes(version: str) -> None:
    objects = [one for one in _different_objects() if one["kind"].lower() not in SCHEMAS]
    assert len(objects) > len(FOLDERS)
    for one in objects:
        try:
            kubernetes_validate.validate(one, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            where = ".".join(map(str, error.path))
            pytest.fail(f"{one['kind']} {one['metadata']['name']}, Kubernetes {version}: {where}: {error.message}")


def test_objects_of_other_projects_match_their_schemas() -> None:
    custom = [one for one in _different_objects() if one["kind"].lower() in SCHEMAS]
    assert {one["kind"].lower() for one in custom} == set(SCHEMAS)
    for one in custom:
        jsonschema.Draft202012Validator(SCHEMAS[one["kind"].lower()]).validate(one)


def test_validation_finds_a_misspelt_field() -> None:
    deployment = json.loads(json.dumps(built("base").one("Deployment")))
    deployment["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(deployment, OLDEST, strict=True)
