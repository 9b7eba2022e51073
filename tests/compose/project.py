"""A compose project for tests: this repository's docker-compose.yml under a unique name, on free ports."""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from compose.commands import CommandFailedError
from compose.engine import DockerEngine

SERVICE = "server"
HTTP, GRPC, METRICS = 8000, 8001, 8002
BUILD_AND_START_S = 900
STOP_S = 200


@dataclass(frozen=True)
class ComposeProject:
    """A named project; `variables` is the file in place of the user's .env."""

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
        """Build, start and wait until healthy. Raises CommandFailedError, with the server's log, if that fails."""
        try:
            self.compose("up", "--build", "--detach", "--wait", timeout=BUILD_AND_START_S)
        except CommandFailedError as error:
            log = self.compose("logs", "--no-color", "--tail", "200", check=False)
            raise CommandFailedError(f"{error}\n--- log of the server\n{log.stdout}{log.stderr}") from None

    def address(self, port: int) -> str:
        """Return HOST:PORT on which the container's `port` is published."""
        return self.compose("port", SERVICE, str(port)).stdout.strip()

    def get(self, port: int, path: str) -> str:
        """Return the body of a GET request to a published port of the server."""
        host, _, published = self.address(port).partition(":")
        with closing(http.client.HTTPConnection(host, int(published), timeout=10)) as connection:
            connection.request("GET", path)
            return connection.getresponse().read().decode()

    def inside(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in the server's container, as its user."""
        return self.compose("exec", "-T", SERVICE, *command, check=check)

    def containers(self) -> list[str]:
        """Return the ids of all containers of the project, stopped ones included."""
        label = f"label=com.docker.compose.project={self.name}"
        return self.engine.docker("ps", "--all", "--quiet", "--no-trunc", "--filter", label).stdout.split()

    def inspect(self, template: str) -> object:
        """Return `docker inspect` of the only container at `template` (".State.Health")."""
        (container,) = self.containers()
        answer: object = json.loads(
            self.engine.docker("inspect", "--format", f"{{{{json {template}}}}}", container).stdout
        )
        return answer

    def remove(self) -> None:
        """Remove containers, network, volume and image; the layers stay for the next build."""
        self.compose("down", "--volumes", "--rmi", "local", "--timeout", "5", "--remove-orphans", timeout=STOP_S)


@contextmanager
def compose_project(engine: DockerEngine, repository: Path, variables: Mapping[str, str]) -> Iterator[ComposeProject]:
    """Yield a project that is not up yet; remove it at the end."""
    with TemporaryDirectory(prefix="triton-llama-compose-") as folder:
        file = Path(folder) / "env"
        # Port 0: the engine picks a free one, which `address` returns.
        ports = {f"TRITON_{service}_PORT": "0" for service in ("HTTP", "GRPC", "METRICS")}
        file.write_text("".join(f"{name}={value}\n" for name, value in {**ports, **variables}.items()))
        project = ComposeProject(engine, repository, f"triton-llama-test-{uuid4().hex[:8]}", file)
        try:
            yield project
        finally:
            project.remove()
