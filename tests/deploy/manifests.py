"""The manifests of deploy/kubernetes as kustomize builds them, one `Overlay` for the base and each overlay."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml
from deploy.code_blocks import ROOT
from deploy.programs import programs_or_skip

KUBERNETES = ROOT / "deploy" / "kubernetes"
FOLDERS = ("base", *(f"overlays/{name}" for name in ("cpu-demo", "gpu", "autoscaling", "envoy", "gateway", "kserve")))
KSERVE_NAMES = {"kserve-container": "server", "transformer-container": "openai"}

Manifest = dict[str, Any]
NAME = "app.kubernetes.io/name"
PROBE_MARGIN_S = 5
"""A probe takes at most its own --timeout and 2 s; the rest is for starting Python on a busy node."""


@dataclass(frozen=True)
class Overlay:
    """The objects of one folder, in kustomize's order."""

    objects: tuple[Manifest, ...]

    def all(self, kind: str) -> list[Manifest]:
        """Return every object of a kind."""
        return [manifest for manifest in self.objects if manifest["kind"] == kind]

    def only(self, kind: str) -> Manifest:
        """Return the only object of a kind."""
        (manifest,) = self.all(kind)
        return manifest

    @property
    def pod(self) -> Manifest:
        """The specification of the servers' pods."""
        return self.pods["triton-llama"]

    @property
    def pods(self) -> dict[str, Manifest]:
        """The specification of each Deployment's pods, or an InferenceService's, by app.kubernetes.io/name."""
        if services := self.all("InferenceService"):
            return {"triton-llama": services[0]["spec"]["predictor"]}
        templates = [deployment["spec"]["template"] for deployment in self.all("Deployment")]
        return {template["metadata"]["labels"][NAME]: template["spec"] for template in templates}

    @property
    def containers(self) -> dict[str, Manifest]:
        """Every container of the pod by name, init containers included; KServe's names are replaced by ours."""
        parts = [*self.pod.get("initContainers", []), *self.pod["containers"]]
        return {KSERVE_NAMES.get(part["name"], part["name"]): part for part in parts}

    @property
    def server(self) -> Manifest:
        """Triton's container."""
        return self.containers["server"]

    @property
    def openai(self) -> Manifest:
        """The OpenAI endpoint's container."""
        return self.containers["openai"]


@cache
def build(folder: str) -> Overlay:
    """Build a folder of deploy/kubernetes; without kubectl the test is skipped, or fails in CI."""
    # Debian 12's package has an older kustomize than these files need.
    (kubectl,) = programs_or_skip("kubectl", ["kubectl"], "trixie")
    command = [str(kubectl), "kustomize", str(KUBERNETES / folder)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    # kustomize builds deprecated fields with a warning.
    assert (done.returncode, done.stderr) == (0, "")
    return Overlay(tuple(yaml.safe_load_all(done.stdout)))


def environment(container: Manifest) -> dict[str, str | None]:
    """Return the variables of a container; None for a value from elsewhere."""
    return {variable["name"]: variable.get("value") for variable in container.get("env", [])}


def seconds(duration: str) -> int:
    """Convert a duration in seconds, as compose and Envoy write it: 90s."""
    return int(duration.removesuffix("s"))


def mappings(value: object) -> Iterator[Manifest]:
    """Yield every mapping in `value`, at any depth."""
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from mappings(part)
