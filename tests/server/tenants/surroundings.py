"""Everything beside responses where a request could show: logs, metrics, statistics, metadata, names of processes."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from server.servers import EMBEDDED, HTTP, until
from server.tenants.canaries import Found, Phrases, found_in
from triton_local.server import LocalTriton
from triton_supervisor.process_table import children

from perf.metrics import series, text

_PATHS = (
    *("/v2", "/v2/health/ready", "/v2/models/stats"),
    *(f"/v2/models/{model}{page}" for model in ("llama", "llama_unary") for page in ("", "/config", "/stats")),
)
_ENDPOINT_PATHS = ("/metrics", "/health", "/health/live")


@dataclass
class EndpointProcess:
    """The OpenAI endpoint as it is started by its command. log: standard output and error."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path


@contextmanager
def endpoint_process(server: LocalTriton, folder: Path, keys: list[str], template: str) -> Iterator[EndpointProcess]:
    """Serve with API keys, a chat template, and otherwise the defaults."""
    files = {"api-keys-file": "\n".join(keys), "chat-template": template}
    for name, content in files.items():
        (folder / name).write_text(content)
    options = [word for name in files for word in (f"--{name}", str(folder / name))]
    command = [sys.executable, "-m", "triton_llama_openai", "--port", "0", "--triton", server.grpc_url]
    log = folder / "endpoint.log"
    with log.open("wb") as file:
        process = subprocess.Popen([*command, "--tokenizer", str(EMBEDDED), *options], stdout=file, stderr=file)
    try:
        until(lambda: process.poll() is not None or b"listening on" in log.read_bytes(), log.read_text)
        (url,) = re.findall(r"listening on (http://\S+)/v1", log.read_text())
        yield EndpointProcess(url, process, log)
    finally:
        process.terminate()
        process.wait(30)


@dataclass
class Surroundings:
    """What is found there while requests run, and afterwards: canaries and phrases, by where they are."""

    server: LocalTriton
    endpoint: EndpointProcess
    phrases: Phrases
    found: defaultdict[str, set[Found]] = field(default_factory=lambda: defaultdict(set))
    looks: int = 0

    def __post_init__(self) -> None:
        self._labels = self.labels()

    def labels(self) -> set[object]:
        """Return the names and labels of Triton's metrics."""
        return set(series(text(self.server.metrics_url)))

    def new_labels(self) -> set[object]:
        """Return those that requests have added."""
        return self.labels() - self._labels

    def look(self) -> None:
        """Look at all that shows what runs now."""
        self.looks += 1
        pages = {path: f"http://{self.server.http_url}{path}" for path in _PATHS}
        pages["Triton's metrics"] = f"http://{self.server.metrics_url}/metrics"
        pages |= {f"the endpoint's {path}": f"{self.endpoint.url}{path}" for path in _ENDPOINT_PATHS}
        for name, url in pages.items():
            answer = HTTP.get(url)
            self._search(name, answer.content + str(answer.headers.raw).encode())
        self._search("/dev/shm", "\n".join(path.name for path in Path("/dev/shm").iterdir()).encode())
        for pid in (self.endpoint.process.pid, *_descendants(self.server.pid)):
            for name in ("cmdline", "comm"):
                # A process may end meanwhile.
                with contextlib.suppress(OSError):
                    self._search(f"/proc/PID/{name}", Path(f"/proc/{pid}/{name}").read_bytes())

    def search_logs(self) -> None:
        """Search the logs for all but ids, which belong there."""
        logs = {"Triton's log": self.server.log_text().encode(), "the endpoint's log": self.endpoint.log.read_bytes()}
        for name, log in logs.items():
            self._search(name, log, {"id"})

    def _search(self, where: str, data: bytes, allowed: Collection[str] = ()) -> None:
        found = {one for one in found_in(data) | self.phrases.found_in(data) if one[1] not in allowed}
        if found:
            self.found[where] |= found


def _descendants(parent: int) -> Iterator[int]:
    yield parent
    for child in children(parent):
        yield from _descendants(child.pid)
