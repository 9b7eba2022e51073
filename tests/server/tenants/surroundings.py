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
from server.tenants.canaries import Found, Phrases
from triton_local.server import LocalTriton
from triton_supervisor.process_table import children

from perf.metrics import series, text

_PATHS = (
    *("/v2", "/v2/health/ready", "/v2/models/stats"),
    *(f"/v2/models/{model}{page}" for model in ("llama", "llama_unary") for page in ("", "/config", "/stats")),
)


@dataclass
class Surroundings:
    """What is found while requests run, and afterwards: canaries and phrases, by where they are.

    url, endpoint, log: the address, process and log of the OpenAI endpoint.
    """

    server: LocalTriton
    phrases: Phrases
    url: str
    endpoint: subprocess.Popen[bytes]
    log: Path
    found: defaultdict[str, set[Found]] = field(default_factory=lambda: defaultdict(set))

    def __post_init__(self) -> None:
        self._labels = self._all_labels()

    def new_labels(self) -> set[object]:
        """Return the names and labels of Triton's metrics that requests have added."""
        return self._all_labels() - self._labels

    def look(self) -> None:
        """Look at all that shows what runs now."""
        pages = [f"http://{self.server.http_url}{path}" for path in _PATHS]
        pages += [f"http://{self.server.metrics_url}/metrics"]
        pages += [f"{self.url}{path}" for path in ("/metrics", "/health", "/health/live")]
        for page in pages:
            answer = HTTP.get(page)
            self._search(page, answer.content + str(answer.headers.raw).encode())
        self._search("/dev/shm", "\n".join(path.name for path in Path("/dev/shm").iterdir()).encode())
        for pid in (self.endpoint.pid, *_descendants(self.server.pid)):
            for name in ("cmdline", "comm"):
                # A process may end meanwhile.
                with contextlib.suppress(OSError):
                    self._search(f"/proc/PID/{name}", Path(f"/proc/{pid}/{name}").read_bytes())

    def search_logs(self) -> None:
        """Search the logs for all but ids, which belong there."""
        self._search("Triton's log", self.server.log_text().encode(), {"id"})
        self._search("the endpoint's log", self.log.read_bytes(), {"id"})

    def _all_labels(self) -> set[object]:
        return set(series(text(self.server.metrics_url)))

    def _search(self, where: str, data: bytes, allowed: Collection[str] = ()) -> None:
        if found := {one for one in self.phrases.found_in(data) if one[1] not in allowed}:
            self.found[where] |= found


@contextmanager
def surroundings(
    server: LocalTriton, phrases: Phrases, folder: Path, keys: list[str], template: str
) -> Iterator[Surroundings]:
    """Start the OpenAI endpoint by its command, with API keys, a chat template, and otherwise the defaults."""
    options: list[str] = []
    for name, content in (("api-keys-file", "\n".join(keys)), ("chat-template", template)):
        (folder / name).write_text(content)
        options += [f"--{name}", str(folder / name)]
    command = [sys.executable, "-m", "triton_llama_openai", "--port", "0", "--triton", server.grpc_url]
    log = folder / "endpoint.log"
    with log.open("wb") as file:
        process = subprocess.Popen([*command, "--tokenizer", str(EMBEDDED), *options], stdout=file, stderr=file)
    try:
        until(lambda: process.poll() is not None or b"listening on" in log.read_bytes(), log.read_text)
        (url,) = re.findall(r"listening on (http://\S+)/v1", log.read_text())
        yield Surroundings(server, phrases, url, process, log)
    finally:
        process.terminate()
        process.wait(30)


def _descendants(parent: int) -> Iterator[int]:
    yield parent
    for child in children(parent):
        yield from _descendants(child.pid)
