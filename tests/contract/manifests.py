"""The manifests of deploy/kubernetes as kustomize builds them, one `Built` for the base and each overlay."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml
from compose.commands import CommandFailedError
from contract.code_blocks import ROOT
from contract.debian_packages import skip_or_fail, unpacked

KUBERNETES = ROOT / "deploy" / "kubernetes"
FOLDERS = ("base", "overlays/cpu-demo", "overlays/gpu", "overlays/autoscaling")

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Built:
    """The objects of one folder, in kustomize's order."""

    folder: str
    objects: tuple[Manifest, ...]

    def all(self, kind: str) -> list[Manifest]:
        """Return every object of a kind."""
        return [manifest for manifest in self.objects if manifest["kind"] == kind]

    def one(self, kind: str) -> Manifest:
        """Return the only object of a kind."""
        (manifest,) = self.all(kind)
        return manifest

    @property
    def pod(self) -> Manifest:
        """The pod template of the one Deployment: metadata and spec."""
        pod: Manifest = self.one("Deployment")["spec"]["template"]
        return pod

    @property
    def server(self) -> Manifest:
        """The server's container."""
        found: Manifest
        (found,) = (one for one in self.pod["spec"]["containers"] if one["name"] == "server")
        return found

    def containers(self) -> list[Manifest]:
        """Return every container of the pod, init containers included."""
        return [*self.pod["spec"].get("initContainers", []), *self.pod["spec"]["containers"]]


@cache
def _kustomize() -> list[str] | str:
    """Return the command that, followed by a folder, builds it; a text if there is none and none can be downloaded."""
    for command in (["kubectl", "kustomize"], ["kustomize", "build"]):
        if shutil.which(command[0]):
            return command
    try:
        # Debian 12's package has an older kustomize than these files need.
        programs = unpacked("kubectl", ROOT / ".work" / "kubectl", "trixie") / "usr" / "bin"
    except (OSError, CommandFailedError) as error:
        return f"neither kubectl nor kustomize on PATH, nor Debian's package: {' '.join(str(error).split())}"
    return [str(programs / "kubectl"), "kustomize"]


@cache
def built(folder: str) -> Built:
    """Build a folder of deploy/kubernetes. Raises AssertionError with kustomize's output if that fails.

    Without kustomize the test is skipped, or fails in CI.
    """
    command = _kustomize()
    if isinstance(command, str):
        skip_or_fail(command)
    done = subprocess.run(
        [*command, KUBERNETES / folder],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # kustomize builds deprecated fields with a warning.
    assert done.stderr == ""
    return Built(folder, tuple(yaml.safe_load_all(done.stdout)))


def environment(container: Manifest) -> dict[str, str | None]:
    """Return the variables of a container; None for a value from elsewhere."""
    return {variable["name"]: variable.get("value") for variable in container.get("env", [])}


def inside(value: object) -> Iterator[object]:
    """Yield `value` and everything in it, at any depth."""
    yield value
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from inside(part)
