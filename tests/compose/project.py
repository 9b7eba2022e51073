"""One compose project of its own: this repository's docker-compose.yml under another name, on free ports.

Knows how to bring it up, ask what runs, and remove every trace of it. Knows nothing about what the server says.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from compose.commands import CommandFailedError
from compose.engine import DockerEngine

SERVICE = "server"
BUILD_AND_START_S = 900
STOP_S = 200


@dataclass(frozen=True)
class ComposeProject:
    """A named project; `variables` is the file that stands for the user's .env."""

    engine: DockerEngine
    repository: Path
    name: str
    variables: Path

    def compose(self, *arguments: str, timeout: float = 60, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `docker compose ARGUMENTS` on the project."""
        project = ["--project-name", self.name, "--env-file", str(self.variables), "--progress", "plain"]
        return self.engine.docker(
            "compose", *project, *arguments, timeout=timeout, directory=self.repository, check=check
        )

    def up(self) -> None:
        """Build, start and wait until healthy. Raises CommandFailedError, with the server's log, when it doesn't."""
        try:
            self.compose("up", "--build", "--detach", "--wait", timeout=BUILD_AND_START_S)
        except CommandFailedError as error:
            log = self.compose("logs", "--no-color", "--tail", "200", check=False)
            raise CommandFailedError(f"{error}\n--- log of the server\n{log.stdout}{log.stderr}") from None

    def address(self, port: int) -> str:
        """HOST:PORT under which the container's `port` is published."""
        return self.compose("port", SERVICE, str(port)).stdout.strip()

    def inside(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in the server's container, as its user."""
        return self.compose("exec", "-T", SERVICE, *command, check=check)

    def containers(self) -> list[str]:
        """Ids of all containers of the project, stopped ones included."""
        label = f"label=com.docker.compose.project={self.name}"
        return self.engine.docker("ps", "--all", "--quiet", "--no-trunc", "--filter", label).stdout.split()

    def inspect(self, template: str) -> object:
        """What `docker inspect` says about the one container, at the place `template` (".State.Health")."""
        (container,) = self.containers()
        answer: object = json.loads(
            self.engine.docker("inspect", "--format", f"{{{{json {template}}}}}", container).stdout
        )
        return answer

    def remove(self) -> None:
        """Remove containers, network, volume and image; not the layers, which the next build finds again."""
        self.compose("down", "--volumes", "--rmi", "local", "--timeout", "5", "--remove-orphans", timeout=STOP_S)


@contextmanager
def compose_project(engine: DockerEngine, repository: Path, variables: Mapping[str, str]) -> Iterator[ComposeProject]:
    """A project that isn't up yet; removed at the end, whatever happened."""
    with TemporaryDirectory(prefix="triton-llama-compose-") as folder:
        file = Path(folder) / "env"
        # Port 0: the engine picks a free one; `address` tells which.
        ports = {f"TRITON_{service}_PORT": "0" for service in ("HTTP", "GRPC", "METRICS")}
        file.write_text("".join(f"{name}={value}\n" for name, value in {**ports, **variables}.items()))
        project = ComposeProject(engine, repository, f"triton-llama-test-{uuid4().hex[:8]}", file)
        try:
            yield project
        finally:
            project.remove()
