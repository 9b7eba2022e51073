"""The Docker engine of these tests, and projects on it: this repository's compose files under a unique name.

The engine is one that is already running, else a private one that a script starts, which is stopped afterwards. The
script is $DOCKER_ENGINE, by default ../shared/tools/docker-engine.sh beside the repository, with the commands `start`,
`env` and `stop`.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from deploy.code_blocks import ROOT
from deploy.programs import CommandFailedError, run

# Variables that steer compose, the build or the server; a test sets its own, and only those.
STEERING = ("COMPOSE_", "HF_", "LLAMA_", "PIP_", "TRITON_")
SERVICE = "server"
HTTP, GRPC, METRICS, OPENAI = 8000, 8001, 8002, 9000
START_ENGINE_S = 540
BUILD_AND_START_S = 900
STOP_S = 200


@dataclass(frozen=True)
class DockerEngine:
    """A running engine; `environment` is the docker command's."""

    environment: Mapping[str, str]

    def docker(
        self, *arguments: str | Path, timeout: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run `docker ARGUMENTS` in the repository; errors as for `programs.run`."""
        command = ["docker", *arguments]
        return run(command, timeout=timeout, environment=self.environment, directory=ROOT, check=check)

    def has_image(self, name: str) -> bool:
        """Return whether the engine has this image."""
        return self.docker("image", "inspect", name, check=False).returncode == 0

    def inspect(self, container: str, template: str) -> str:
        """Return what Go's template makes of `docker inspect`."""
        return self.docker("inspect", "--format", template, container).stdout.strip()

    def refusal(self) -> str | None:
        """Return why this engine is unusable, in one line; None if it responds and has compose."""
        try:
            self.docker("version")
            self.docker("compose", "version")
        except (OSError, CommandFailedError) as error:
            return " ".join(str(error).split())
        return None


@contextmanager
def docker_engine() -> Iterator[DockerEngine]:
    """Yield an engine. Raises AssertionError if none is running and none can be started."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(STEERING)}
    present = DockerEngine(plain)
    refusal = present.refusal()
    if refusal is None:
        yield present
        return
    script = Path(os.environ.get("DOCKER_ENGINE") or ROOT.parent / "shared/tools/docker-engine.sh")
    assert script.is_file(), (
        f"no Docker engine with compose responds ({refusal}), and there is no script {script} to start one: "
        "start Docker, or set DOCKER_HOST, or set DOCKER_ENGINE to such a script"
    )
    exports = shlex.split(run([script, "env"], timeout=30, environment=plain).stdout)
    private = DockerEngine({**plain, **dict(word.split("=", 1) for word in exports if "=" in word)})
    was_up = private.refusal() is None
    try:
        run([script, "start"], timeout=START_ENGINE_S, environment=plain)
        assert private.refusal() is None, f"{script} started an engine that is unusable: {private.refusal()}"
        yield private
    finally:
        if not was_up:
            run([script, "stop"], timeout=60, environment=plain)


@dataclass(frozen=True)
class ComposeProject:
    """A named project; `variables` is the file in place of the user's .env."""

    engine: DockerEngine
    name: str
    variables: Path

    def compose(self, *arguments: str, timeout: float = 60, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `docker compose ARGUMENTS` on the project."""
        project = ["--project-name", self.name, "--env-file", str(self.variables), "--progress", "plain"]
        return self.engine.docker("compose", *project, *arguments, timeout=timeout, check=check)

    def up(self) -> None:
        """Build, start and wait until healthy. Raises CommandFailedError, with the server's log, if that fails."""
        try:
            self.compose("up", "--build", "--detach", "--wait", timeout=BUILD_AND_START_S)
        except CommandFailedError as error:
            raise CommandFailedError(f"{error}\n--- log of the server\n{self.log()}") from None

    def log(self) -> str:
        """Return the last lines of the containers' logs."""
        return self.compose("logs", "--no-color", "--tail", "200", check=False).stdout

    def address(self, port: int, service: str = SERVICE) -> str:
        """Return HOST:PORT on which the container's `port` is published."""
        return self.compose("port", service, str(port)).stdout.strip()

    def inside(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in the server's container, as its user."""
        return self.compose("exec", "-T", SERVICE, *command, check=check)

    def containers(self, *service: str) -> list[str]:
        """Return the ids of all containers of the project, or of a service, stopped ones included."""
        return self.compose("ps", "--all", "--quiet", *service).stdout.split()

    def inspect(self, template: str, service: str = SERVICE) -> object:
        """Return a field of the server's only container, such as `.State.ExitCode`, or of another service's."""
        (container,) = self.containers(service)
        field: object = json.loads(self.engine.inspect(container, f"{{{{json {template}}}}}"))
        return field


@contextmanager
def compose_project(engine: DockerEngine, variables: Mapping[str, str]) -> Iterator[ComposeProject]:
    """Yield a project that is not up yet; remove it at the end, but for the layers, for the next build."""
    with TemporaryDirectory(prefix="triton-llama-compose-") as folder:
        file = Path(folder) / "env"
        # Port 0: the engine picks a free one, which `address` returns.
        ports = {f"TRITON_{service}_PORT": "0" for service in ("HTTP", "GRPC", "METRICS", "OPENAI")}
        file.write_text("".join(f"{name}={value}\n" for name, value in {**ports, **variables}.items()))
        project = ComposeProject(engine, f"triton-llama-test-{uuid4().hex[:8]}", file)
        try:
            yield project
        finally:
            removal = ("--volumes", "--rmi", "local", "--timeout", "0", "--remove-orphans")
            project.compose("down", *removal, timeout=STOP_S)
            # It has a name of its own, so it isn't "local".
            engine.docker("image", "rm", f"{project.name}-server", check=False)
