"""No container of the pod may do more than it needs: the level `restricted`, and what that doesn't ask for, too."""

from __future__ import annotations

import pytest
from contract.manifests import FOLDERS, built

WRITABLE = {"/tmp", "/dev/shm", "/var/cache/triton-llama"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_container_can_do_more_than_it_needs(folder: str) -> None:
    for container in built(folder).containers():
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        }, container["name"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_pod_runs_as_root_or_without_a_seccomp_profile(folder: str) -> None:
    context = built(folder).pod["spec"]["securityContext"]
    assert context["runAsNonRoot"] is True
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (1000, 1000, 1000)
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_pod_sees_the_node_or_has_a_token_of_the_cluster(folder: str) -> None:
    one = built(folder)
    spec = one.pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert one.one("ServiceAccount")["automountServiceAccountToken"] is False
    assert spec["serviceAccountName"] == one.one("ServiceAccount")["metadata"]["name"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    kinds = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
    assert kinds <= {"emptyDir", "persistentVolumeClaim"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_is_written_has_no_bound(folder: str) -> None:
    for volume in built(folder).pod["spec"]["volumes"]:
        assert "persistentVolumeClaim" in volume or "sizeLimit" in volume["emptyDir"], volume["name"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_server_can_write_its_checkpoint_or_fetch_one(folder: str) -> None:
    server = built(folder).server
    assert {mount["mountPath"] for mount in server["volumeMounts"] if not mount.get("readOnly")} == WRITABLE
    variables = {variable["name"]: variable for variable in server["env"]}
    assert variables["HF_HUB_OFFLINE"]["value"] == "1"
    assert "HF_TOKEN" not in variables


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_namespace_admits_what_would_be_less_locked_up(folder: str) -> None:
    labels = built(folder).one("Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_variable_of_another_service_keeps_the_model_from_loading(folder: str) -> None:
    # A Service called "llama" would put LLAMA_SERVICE_HOST into the environment: an unknown setting.
    assert built(folder).pod["spec"]["enableServiceLinks"] is False


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_server_may_call_out(folder: str) -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in built(folder).all("NetworkPolicy")}
    assert policies["triton-llama"]["policyTypes"] == ["Ingress", "Egress"]
    assert not policies["triton-llama"].get("egress")
    opened = policies.get("triton-llama-download")
    # Only where there is an init container that downloads.
    assert (opened is not None) == ("initContainers" in built(folder).pod["spec"])
    if opened is not None:
        assert opened["policyTypes"] == ["Egress"]
        blocks = [to["ipBlock"] for rule in opened["egress"] for to in rule["to"] if "ipBlock" in to]
        assert all("169.254.0.0/16" in block["except"] for block in blocks if block["cidr"] == "0.0.0.0/0")
