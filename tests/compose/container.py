"""A container of the project's image, for `docker stop`: the supervisor is process 1, as in compose and Kubernetes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from compose.engine import BUILD_AND_START_S, GRPC, HTTP, METRICS, DockerEngine, compose_project
from compose.images import build_variables
from server.servers import ENVIRONMENT
from server.stops.hosts import GRACE_S
from server.stops.scene import Addresses, CellError
from server.stops.stops import Stop
from triton_llama.health import Address, NoAnswerError, exchange

_READY_S = 120.0
_ANSWER_S = 2.0
_POLL_S = 0.1
# The compose file's, for one container without compose.
_RUN = (
    "--read-only",
    "--tmpfs=/tmp:size=1g,mode=1777",
    "--tmpfs=/var/cache/triton-llama:uid=1000,gid=1000",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges:true",
    "--shm-size=1gb",
)


class Container:
    """A container, reached at its own address: no proxy of the engine stands between."""

    def __init__(self, engine: DockerEngine, image: str, config: str) -> None:
        self.engine = engine
        self.name = f"triton-llama-stop-{uuid4().hex[:8]}"
        self.addresses = Addresses("", "", "")
        self._image = image
        self._config = config

    async def start(self) -> None:
        environment = {
            **ENVIRONMENT,
            "TRITON_MODEL_CONFIG": self._config,
            "TRITON_GRACE_SECONDS": str(GRACE_S),
            # No probe's token among the counted requests.
            "TRITON_STUCK_SECONDS": "0",
        }
        options = [*_RUN, *(f"--env={name}={value}" for name, value in environment.items())]
        await self.docker("run", "--detach", f"--name={self.name}", *options, self._image)
        address = await self.inspect("{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}")
        self.addresses = Addresses(*(f"{address}:{port}" for port in (HTTP, GRPC, METRICS)))
        models = ("llama", "llama_unary") if self._config == "streaming" else ("llama",)
        for _ in range(int(_READY_S / _POLL_S)):
            # Triton opens the metrics' port last.
            paths = [*((HTTP, f"/v2/models/{model}/ready") for model in models), (METRICS, "/metrics")]
            if all([await asyncio.to_thread(self._answers, address, *path) for path in paths]):
                return
            await asyncio.sleep(_POLL_S)
        raise CellError(f"the container doesn't become ready: {self.log()[-300:]}")

    async def end(self) -> None:
        await asyncio.to_thread(self.engine.docker, "rm", "--force", self.name, check=False)

    def log(self) -> str:
        found = self.engine.docker("logs", "--tail", "200", self.name, check=False)
        lines = (found.stdout + found.stderr).splitlines()
        return "\n".join([line for line in lines if "request answered" not in line][-5:])

    async def docker(self, *arguments: str, timeout: float = 60.0) -> str:
        """Run a docker command; return its output."""
        return (await asyncio.to_thread(self.engine.docker, *arguments, timeout=timeout)).stdout

    async def inspect(self, template: str) -> str:
        """Return what Go's template makes of `docker inspect`."""
        return await asyncio.to_thread(self.engine.inspect, self.name, template)

    @staticmethod
    def _answers(host: str, port: int, path: str) -> bool:
        try:
            return exchange(Address(host, port), "GET", path, _ANSWER_S).status == 200
        except NoAnswerError:
            return False


async def _docker_stop(container: Container) -> int:
    bound = GRACE_S + 30
    await container.docker("stop", "--time", str(bound), container.name, timeout=bound + 10)
    return int(await container.inspect("{{.State.ExitCode}}"))


@contextmanager
def docker_stop(engine: DockerEngine) -> Iterator[Stop[Container]]:
    """Build the project's image, and yield the stop of a container of it."""
    with compose_project(engine, build_variables(engine)) as project:
        project.compose("build", "server", timeout=BUILD_AND_START_S)

        def container(config: str, folder: Path) -> Container:
            return Container(engine, f"{project.name}-server", config)

        yield Stop(container, _docker_stop, network_ends=True)
