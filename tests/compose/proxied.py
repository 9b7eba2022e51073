"""Two replicas behind the example proxy: its certificate, its clients' keys, its address, and connections to it."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from compose.commands import run
from compose.engine import SERVICE, ComposeProject
from contract.code_blocks import ROOT, blocks

CLIENTS = ("steady", "greedy")
PROXY_PORT = 8443
REQUESTS_A_MINUTE = 4000
RESPONSE_S = 180


def readme_block(part: str) -> str:
    """Return the only fenced block of deploy/proxy/README.md that contains `part`."""
    (text,) = (block.text for block in blocks(ROOT / "deploy" / "proxy" / "README.md") if part in block.text)
    return text


def make_gate(home: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Make certificate and keys with the commands of deploy/proxy/README.md, in the folder `home`.

    Returns each client's key, and the variables that the commands write into .env.
    """
    # Files are unreadable to others unless the commands change that.
    lines = ["umask 077", readme_block("openssl req")]
    for client in CLIENTS:
        lines += [readme_block("sha256sum").replace(' alice"', f' {client}"'), f'echo "$key" >{client}.key']
    script = "\n".join([*lines, readme_block("cat >>.env")])
    environment = {**os.environ, "HOME": str(home)}
    run(["bash", "-euo", "pipefail", "-c", script], timeout=30, environment=environment, directory=home)
    variables = dict(line.split("=", 1) for line in (home / ".env").read_text().splitlines())
    return {client: (home / f"{client}.key").read_text().strip() for client in CLIENTS}, variables


@dataclass(frozen=True)
class Proxied:
    """A project that is up, the proxy's certificate, and each client's key."""

    project: ComposeProject
    certificate: Path
    keys: Mapping[str, str]

    @property
    def address(self) -> str:
        """HOST:PORT of the proxy."""
        return self.project.address(PROXY_PORT, "proxy")

    def authorization(self, client: str) -> dict[str, str]:
        """Return a client's header; an invalid one for a client that is not in CLIENTS."""
        return {"Authorization": f"Bearer {self.keys.get(client, 'made-up')}"}

    def is_healthy(self) -> bool:
        """Return whether the proxy listens and has a replica."""
        try:
            with closing(Connection(self, {})) as connection:
                return connection.get("/healthy") == 200
        except OSError:
            return False

    def replicas(self) -> dict[str, str]:
        """Return when each of the servers' containers was last started, by its id."""
        ids = self.project.containers(SERVICE)
        return {id_: self.project.engine.inspect(id_, "{{.State.StartedAt}}") for id_ in ids}


class Connection:
    """One HTTPS connection to the proxy, kept open; a request fails if the proxy has closed it."""

    def __init__(self, proxied: Proxied, headers: Mapping[str, str]) -> None:
        """headers: sent with every request."""
        host, _, port = proxied.address.partition(":")
        context = ssl.create_default_context(cafile=str(proxied.certificate))
        self._headers = headers
        self._http = http.client.HTTPSConnection(host, int(port), timeout=RESPONSE_S, context=context)
        self._http.connect()
        # By default http.client reconnects silently.
        self._http.auto_open = 0

    def get(self, path: str) -> int:
        """Request a path; return the status."""
        self._http.request("GET", path, headers=self._headers)
        return self._response()[0]

    def post(self, path: str, headers: Mapping[str, str], chunks: Iterable[bytes] | None = None) -> int:
        """Send a body in chunks, for a Transfer-Encoding, or only declare it; return the status."""
        # The proxy may respond before it has read everything, and read no more.
        with suppress(BrokenPipeError, ConnectionResetError, ssl.SSLEOFError):
            self._http.request("POST", path, chunks, {**self._headers, **headers}, encode_chunked=True)
        return self._response()[0]

    def generate(self, request: dict[str, object]) -> str:
        """Return the text for a request. Raises AssertionError for any status but 200."""
        headers = {**self._headers, "Content-Type": "application/json"}
        self._http.request("POST", "/v2/models/llama/generate", json.dumps(request), headers)
        status, body = self._response()
        assert status == 200, f"HTTP {status}: {body}"
        return str(json.loads(body)["text_output"])

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _response(self) -> tuple[int, str]:
        response = self._http.getresponse()
        return response.status, response.read().decode()
