"""What a cluster would get: each overlay of deploy/kubernetes as kustomize builds it. Judges nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml
from contract.kubectl import ROOT, kustomize

KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu-demo", "gpu", "autoscaling")
FOLDERS = ("base", *(f"overlays/{name}" for name in OVERLAYS))

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Built:
    """The objects of one folder, in kustomize's order."""

    objects: tuple[Manifest, ...]

    def all(self, kind: str) -> list[Manifest]:
        """Every object of a kind."""
        return [manifest for manifest in self.objects if manifest["kind"] == kind]

    def one(self, kind: str) -> Manifest:
        """The only object of a kind."""
        (manifest,) = self.all(kind)
        return manifest

    @property
    def pod(self) -> Manifest:
        """The pod that the one Deployment makes: metadata and spec."""
        pod: Manifest = self.one("Deployment")["spec"]["template"]
        return pod

    @property
    def server(self) -> Manifest:
        """The server's container."""
        (container,) = (one for one in self.pod["spec"]["containers"] if one["name"] == "server")
        found: Manifest = container
        return found

    def containers(self) -> list[Manifest]:
        """Every container of the pod, those that run before it included."""
        return [*self.pod["spec"].get("initContainers", []), *self.pod["spec"]["containers"]]


@cache
def built(folder: str) -> Built:
    """Build a folder of deploy/kubernetes. Raises AssertionError, with kustomize's words, when it can't be."""
    done = subprocess.run(
        [*kustomize(), KUBERNETES / folder],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Deprecated fields are built all the same, and said so.
    assert done.stderr == ""
    return Built(tuple(yaml.safe_load_all(done.stdout)))


def environment(container: Manifest) -> dict[str, str | None]:
    """The variables of a container; None for one that comes from elsewhere."""
    return {variable["name"]: variable.get("value") for variable in container.get("env", [])}


def inside(value: object) -> Iterator[object]:
    """Yield `value` and everything in it, at any depth."""
    yield value
    if isinstance(value, dict):
        for part in value.values():
            yield from inside(part)
    elif isinstance(value, list):
        for part in value:
            yield from inside(part)
