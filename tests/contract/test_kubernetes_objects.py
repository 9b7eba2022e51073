"""Every folder of deploy/kubernetes builds, is valid for its Kubernetes versions, and runs with few rights.

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
from contract.manifests import FOLDERS, KUBERNETES, Built, built

# What is of a prepared checkpoint or of an operator; the demo has neither.
PREPARED = {
    ("PersistentVolumeClaim", "checkpoints"),
    ("ConfigMap", "checkpoint"),
    ("NetworkPolicy", "triton-llama-download"),
    ("PodMonitor", "triton-llama"),
}
SCHEMAS = {
    file.name.removesuffix(".schema.json"): json.loads(file.read_text())
    for file in (Path(__file__).parent / "custom_resources").glob("*.schema.json")
}
(OLDEST,) = re.findall(r"^For Kubernetes (1\.\d+) or newer", (KUBERNETES / "README.md").read_text(), re.MULTILINE)


def test_an_overlay_differs_from_the_base_by_what_it_is_for() -> None:
    base, demo, gpu, autoscaling = (built(folder) for folder in FOLDERS)
    # kustomize puts a hash behind the names of generated objects.
    names = [
        {(thing["kind"], re.sub(r"^checkpoint-.*", "checkpoint", thing["metadata"]["name"])) for thing in one.objects}
        for one in (base, demo, gpu, autoscaling)
    ]
    assert names[0] - names[1] == PREPARED
    assert names[1] <= names[0] == names[2]
    assert names[3] ^ names[2] == {("ScaledObject", "triton-llama")}
    assert "initContainers" not in demo.pod
    assert not [volume for volume in demo.pod["volumes"] if "persistentVolumeClaim" in volume]
    requested = [one.server["resources"]["limits"].get("nvidia.com/gpu") for one in (base, demo, gpu, autoscaling)]
    assert requested == [None, None, "1", "1"]
    # Applying it again keeps the number of pods that the autoscaler chose.
    assert "replicas" not in autoscaling.one("Deployment")["spec"]
    assert gpu.one("Deployment")["spec"]["replicas"] == 2


def test_every_object_is_in_a_restricted_namespace(overlay: Built) -> None:
    (namespace,) = overlay.all("Namespace")
    namespaces = {one["metadata"].get("namespace") for one in overlay.objects if one is not namespace}
    assert namespaces == {namespace["metadata"]["name"]}
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
def test_every_object_is_valid_for_kubernetes(version: str) -> None:
    # Each once, although overlays share most of them.
    objects = {json.dumps(one, sort_keys=True): one for folder in FOLDERS for one in built(folder).objects}
    checked = set()
    for one in objects.values():
        schema = SCHEMAS.get(one["kind"].lower())
        try:
            if schema is None:
                kubernetes_validate.validate(one, version, strict=True)
            else:
                jsonschema.Draft202012Validator(schema).validate(one)
        except (kubernetes_validate.ValidationError, jsonschema.ValidationError) as error:
            where = ".".join(map(str, error.path))
            pytest.fail(f"{one['kind']} {one['metadata']['name']}, Kubernetes {version}: {where}: {error.message}")
        checked.add(one["kind"].lower())
    assert checked > set(SCHEMAS)


def test_every_container_is_locked_down(overlay: Built) -> None:
    for container in overlay.containers:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        }, container["name"]
    context = overlay.pod["securityContext"]
    assert context["runAsNonRoot"] is True
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (1000, 1000, 1000)
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}


def test_a_pod_has_neither_the_nodes_namespaces_nor_a_cluster_token(overlay: Built) -> None:
    account = overlay.one("ServiceAccount")
    assert (account["automountServiceAccountToken"], overlay.pod["automountServiceAccountToken"]) == (False, False)
    assert overlay.pod["serviceAccountName"] == account["metadata"]["name"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & overlay.pod.keys()
    # Variables of a Service called "llama" would be unknown settings, with which the model doesn't load.
    assert overlay.pod["enableServiceLinks"] is False


def test_the_server_writes_to_limited_volumes_only(overlay: Built) -> None:
    volumes = {volume["name"]: volume for volume in overlay.pod["volumes"]}
    for name, volume in volumes.items():
        assert "persistentVolumeClaim" in volume or volume["emptyDir"]["sizeLimit"], name
    mounted = {mount["name"] for container in overlay.containers for mount in container["volumeMounts"]}
    assert mounted == volumes.keys()
    writable = {mount["mountPath"] for mount in overlay.server["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/tmp", "/dev/shm", "/var/cache/triton-llama"}


def test_the_server_downloads_nothing(overlay: Built) -> None:
    variables = {variable["name"]: variable for variable in overlay.server["env"]}
    assert variables["HF_HUB_OFFLINE"]["value"] == "1"
    assert "HF_TOKEN" not in variables
    policies = {one["metadata"]["name"]: one["spec"] for one in overlay.all("NetworkPolicy")}
    assert policies["triton-llama"]["policyTypes"] == ["Ingress", "Egress"]
    assert not policies["triton-llama"].get("egress")
    # Only with an init container that downloads.
    assert ("triton-llama-download" in policies) == ("initContainers" in overlay.pod)
    if opened := policies.get("triton-llama-download"):
        assert opened["policyTypes"] == ["Egress"]
        blocks = [to["ipBlock"] for rule in opened["egress"] for to in rule["to"] if "ipBlock" in to]
        assert all("169.254.0.0/16" in block["except"] for block in blocks if block["cidr"] == "0.0.0.0/0")
