"""Two replicas behind the example proxy: its certificate, its clients' keys, its address, and connections to it."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from compose.commands import run
from compose.project import SERVICE, ComposeProject
from contract.code_blocks import ROOT, blocks

CLIENTS = ("steady", "greedy")
PROXY_PORT = 8443
REQUESTS_A_MINUTE = 4000
RESPONSE_S = 180
CHUNK_BYTES = 8192


@dataclass(frozen=True)
class Gate:
    """The proxy's files, made with the commands of deploy/proxy/README.md, where $HOME is `home`; each client's key."""

    home: Path
    keys: Mapping[str, str]

    @property
    def certificate(self) -> Path:
        """The certificate alone, for clients to trust."""
        return self.home / "triton-llama-gate" / "cert.pem"

    def variables(self) -> dict[str, str]:
        """Return what README.md writes into .env, and any free port."""
        lines = (self.home / ".env").read_text().splitlines()
        return {**dict(line.split("=", 1) for line in lines), "PROXY_PORT": "0"}

    def authorization(self, client: str) -> str:
        """Return a client's Authorization header; an invalid one for a client that is not in CLIENTS."""
        return f"Bearer {self.keys.get(client, 'made-up')}"


def readme_block(part: str) -> str:
    """Return the only fenced block of deploy/proxy/README.md that contains `part`."""
    found = blocks(ROOT / "deploy" / "proxy" / "README.md")
    (text,) = (block.text for block in found if part in block.text)
    return text


def make_gate(home: Path) -> Gate:
    """Make certificate, keys and .env with the commands of deploy/proxy/README.md, in the folder `home`."""
    # Files are unreadable to others unless the commands change that.
    lines = ["umask 077", readme_block("openssl req")]
    for client in CLIENTS:
        lines += [readme_block("sha256sum").replace(' alice"', f' {client}"'), f'echo "$key" >{client}.key']
    script = "\n".join([*lines, readme_block("cat >>.env")])
    environment = {**os.environ, "HOME": str(home)}
    run(["bash", "-euo", "pipefail", "-c", script], timeout=30, environment=environment, directory=home)
    return Gate(home, {client: (home / f"{client}.key").read_text().strip() for client in CLIENTS})


@dataclass(frozen=True)
class Proxied:
    """A project that is up, and its gate."""

    project: ComposeProject
    gate: Gate

    @property
    def address(self) -> str:
        """HOST:PORT of the proxy."""
        return self.project.compose("port", "proxy", str(PROXY_PORT)).stdout.strip()

    def is_healthy(self) -> bool:
        """Return whether the proxy listens and has a replica."""
        try:
            with closing(Connection(self, None)) as connection:
                return connection.get("/healthy") == 200
        except OSError:
            return False

    def replicas(self) -> list[str]:
        """Return the ids of the servers' containers."""
        return self.project.compose("ps", "--all", "--quiet", SERVICE).stdout.split()

    def started_at(self, replica: str) -> str:
        """Return when a container was last started."""
        return self.project.engine.docker("inspect", "--format", "{{.State.StartedAt}}", replica).stdout.strip()


class Connection:
    """One HTTPS connection to the proxy, kept open; a request fails if the proxy has closed it."""

    def __init__(self, proxied: Proxied, client: str | None) -> None:
        host, _, port = proxied.address.partition(":")
        context = ssl.create_default_context(cafile=str(proxied.gate.certificate))
        self._headers = {} if client is None else {"Authorization": proxied.gate.authorization(client)}
        self._http = http.client.HTTPSConnection(host, int(port), timeout=RESPONSE_S, context=context)
        self._http.connect()
        # By default http.client reconnects silently.
        self._http.auto_open = 0

    def get(self, path: str) -> int:
        """Request a path; return the status."""
        self._http.request("GET", path, headers=self._headers)
        return self._status()

    def declare_body(self, path: str, body_bytes: int) -> int:
        """Declare a body of this length without sending it; return the status."""
        self._http.putrequest("POST", path)
        for name, value in {**self._headers, "Content-Length": str(body_bytes)}.items():
            self._http.putheader(name, value)
        self._http.endheaders()
        return self._status()

    def chunked(self, path: str, headers: Mapping[str, str], body: bytes) -> int:
        """Send a body of undeclared length; return the status."""
        self._http.putrequest("POST", path)
        for name, value in {**self._headers, **headers, "Transfer-Encoding": "chunked"}.items():
            self._http.putheader(name, value)
        self._http.endheaders()
        try:
            for start in range(0, len(body), CHUNK_BYTES):
                chunk = body[start : start + CHUNK_BYTES]
                self._http.send(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            self._http.send(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError, ssl.SSLEOFError):
            # The proxy has responded and reads no more.
            pass
        return self._status()

    def generate(self, request: dict[str, object]) -> str:
        """Return the text for a request. Raises AssertionError for any status but 200."""
        headers = {**self._headers, "Content-Type": "application/json"}
        self._http.request("POST", "/v2/models/llama/generate", json.dumps(request), headers)
        response = self._http.getresponse()
        body = response.read().decode()
        assert response.status == 200, f"HTTP {response.status}: {body}"
        return str(json.loads(body)["text_output"])

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _status(self) -> int:
        response = self._http.getresponse()
        response.read()
        return response.status
