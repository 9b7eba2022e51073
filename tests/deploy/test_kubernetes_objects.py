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
from deploy.manifests import FOLDERS, KUBERNETES, Overlay, build

SCHEMAS = {
    file.name.removesuffix(".schema.json"): json.loads(file.read_text())
    for file in (Path(__file__).parent / "custom_resources").glob("*.schema.json")
}
(OLDEST,) = re.findall(r"^For Kubernetes (1\.\d+) or newer", (KUBERNETES / "README.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
def test_every_object_is_valid_for_kubernetes(version: str) -> None:
    # Each once, although overlays share most of them.
    objects = {json.dumps(manifest, sort_keys=True): manifest for name in FOLDERS for manifest in build(name).objects}
    kinds = set()
    for manifest in objects.values():
        kind = manifest["kind"].lower()
        kinds.add(kind)
        if kind in SCHEMAS:
            jsonschema.Draft202012Validator(SCHEMAS[kind]).validate(manifest)
        else:
            kubernetes_validate.validate(manifest, version, strict=True)
    assert kinds > set(SCHEMAS)


def test_every_object_is_in_a_restricted_namespace(overlay: Overlay) -> None:
    (namespace,) = overlay.all("Namespace")
    namespaces = {manifest["metadata"].get("namespace") for manifest in overlay.objects if manifest is not namespace}
    assert namespaces == {namespace["metadata"]["name"]}
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_every_container_is_locked_down(overlay: Overlay) -> None:
    for container in overlay.containers.values():
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        }, container["name"]
    assert overlay.pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


def test_a_pod_has_neither_the_nodes_namespaces_nor_a_cluster_token(overlay: Overlay) -> None:
    account = overlay.only("ServiceAccount")
    assert (account["automountServiceAccountToken"], overlay.pod["automountServiceAccountToken"]) == (False, False)
    assert not {"hostNetwork", "hostPID", "hostIPC"} & overlay.pod.keys()
    # Variables of a Service called "llama" would be unknown settings, with which the model doesn't load.
    assert overlay.pod["enableServiceLinks"] is False


def test_the_server_downloads_nothing(overlay: Overlay) -> None:
    variables = {variable["name"]: variable for variable in overlay.server["env"]}
    assert variables["HF_HUB_OFFLINE"]["value"] == "1"
    assert "HF_TOKEN" not in variables
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in overlay.all("NetworkPolicy")}
    assert policies["triton-llama"]["policyTypes"] == ["Ingress", "Egress"]
    assert not policies["triton-llama"].get("egress")
    # Only with an init container that downloads.
    assert ("triton-llama-download" in policies) == ("initContainers" in overlay.pod)
