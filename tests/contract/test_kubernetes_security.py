"""Containers of the pod have the rights of level `restricted`, and less where they need less."""

from __future__ import annotations

from contract.manifests import Built

WRITABLE = {"/tmp", "/dev/shm", "/var/cache/triton-llama"}


def test_every_container_is_locked_down(overlay: Built) -> None:
    for container in overlay.containers():
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        }, container["name"]


def test_a_pod_runs_as_user_1000_with_the_runtimes_seccomp_profile(overlay: Built) -> None:
    context = overlay.pod["spec"]["securityContext"]
    assert context["runAsNonRoot"] is True
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (1000, 1000, 1000)
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}


def test_a_pod_has_neither_the_nodes_namespaces_nor_a_cluster_token(overlay: Built) -> None:
    spec = overlay.pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert overlay.one("ServiceAccount")["automountServiceAccountToken"] is False
    assert spec["serviceAccountName"] == overlay.one("ServiceAccount")["metadata"]["name"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    kinds = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
    assert kinds <= {"emptyDir", "persistentVolumeClaim"}


def test_every_writable_volume_has_a_size_limit(overlay: Built) -> None:
    for volume in overlay.pod["spec"]["volumes"]:
        assert "persistentVolumeClaim" in volume or "sizeLimit" in volume["emptyDir"], volume["name"]


def test_the_server_can_neither_write_nor_download_its_checkpoint(overlay: Built) -> None:
    server = overlay.server
    assert {mount["mountPath"] for mount in server["volumeMounts"] if not mount.get("readOnly")} == WRITABLE
    variables = {variable["name"]: variable for variable in server["env"]}
    assert variables["HF_HUB_OFFLINE"]["value"] == "1"
    assert "HF_TOKEN" not in variables


def test_the_namespace_enforces_the_level_restricted(overlay: Built) -> None:
    labels = overlay.one("Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_services_put_no_variables_into_the_pods_environment(overlay: Built) -> None:
    """LLAMA_SERVICE_HOST, from a Service called "llama", would be an unknown setting: the model would not load."""
    assert overlay.pod["spec"]["enableServiceLinks"] is False


def test_the_server_has_no_egress_but_the_download(overlay: Built) -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in overlay.all("NetworkPolicy")}
    assert policies["triton-llama"]["policyTypes"] == ["Ingress", "Egress"]
    assert not policies["triton-llama"].get("egress")
    opened = policies.get("triton-llama-download")
    # Only with an init container that downloads.
    assert (opened is not None) == ("initContainers" in overlay.pod["spec"])
    if opened is not None:
        assert opened["policyTypes"] == ["Egress"]
        blocks = [to["ipBlock"] for rule in opened["egress"] for to in rule["to"] if "ipBlock" in to]
        assert all("169.254.0.0/16" in block["except"] for block in blocks if block["cidr"] == "0.0.0.0/0")
