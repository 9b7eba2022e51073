"""Two replicas behind the example proxy: its certificate, the keys of its clients, and its address.

Knows deploy/proxy and how to ask it, nothing about what is asked.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from compose.commands import run
from compose.project import SERVICE, ComposeProject
from contract.code_blocks import ROOT, blocks

CLIENTS = ("steady", "greedy")
PROXY_PORT = 8443
ANSWER_S = 180
CHUNK_BYTES = 8192


@dataclass(frozen=True)
class Gate:
    """What the proxy is given, made by the commands of deploy/proxy/README.md, whose $HOME is `home`."""

    home: Path
    keys: Mapping[str, str]
    """Each client's."""

    @property
    def certificate(self) -> Path:
        """The certificate alone, for clients to trust."""
        return self.home / "triton-llama-gate" / "cert.pem"

    def variables(self) -> dict[str, str]:
        """What README.md writes into .env; and any free port."""
        lines = (self.home / ".env").read_text().splitlines()
        return {**dict(line.split("=", 1) for line in lines), "PROXY_PORT": "0"}

    def authorization(self, client: str) -> str:
        """The header by which the proxy knows a client; or doesn't, one that isn't among CLIENTS."""
        return f"Bearer {self.keys.get(client, 'made-up')}"


def readme_block(part: str) -> str:
    """The one fenced block of deploy/proxy/README.md that has `part` in it."""
    found = blocks((ROOT / "deploy" / "proxy" / "README.md").read_text())
    (text,) = (block.text for block in found if part in block.text)
    return text


def make_gate(home: Path) -> Gate:
    """Make certificate, keys and .env with the commands of deploy/proxy/README.md, in the folder `home`."""
    # So that nothing is readable unless they say so.
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

    def replicas(self) -> list[str]:
        """Ids of the servers' containers."""
        return self.project.compose("ps", "--all", "--quiet", SERVICE).stdout.split()

    def started_at(self, replica: str) -> str:
        """When a container was started last."""
        return self.project.engine.docker("inspect", "--format", "{{.State.StartedAt}}", replica).stdout.strip()


class Connection:
    """One HTTPS connection to the proxy that is kept open; a request fails if the proxy has closed it."""

    def __init__(self, proxied: Proxied, client: str | None) -> None:
        host, _, port = proxied.address.partition(":")
        context = ssl.create_default_context(cafile=str(proxied.gate.certificate))
        self._headers = {} if client is None else {"Authorization": proxied.gate.authorization(client)}
        self._http = http.client.HTTPSConnection(host, int(port), timeout=ANSWER_S, context=context)
        self._http.connect()
        # http.client would connect anew without a word.
        self._http.auto_open = 0

    def get(self, path: str) -> int:
        """Ask for a path; the status."""
        self._http.request("GET", path, headers=self._headers)
        return self._status()

    def head_of_body(self, path: str, body_bytes: int) -> int:
        """Say that a body of so many bytes will follow, and send none; the status."""
        self._http.putrequest("POST", path)
        for name, value in {**self._headers, "Content-Length": str(body_bytes)}.items():
            self._http.putheader(name, value)
        self._http.endheaders()
        return self._status()

    def chunked(self, path: str, headers: Mapping[str, str], body: bytes) -> int:
        """Send a body without saying how long it is; the status."""
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
            # It has answered, and reads no more.
            pass
        return self._status()

    def generate(self, request: dict[str, object]) -> str:
        """Ask for a text. Raises AssertionError for any other answer."""
        headers = {**self._headers, "Content-Type": "application/json"}
        self._http.request("POST", "/v2/models/llama/generate", json.dumps(request), headers)
        response = self._http.getresponse()
        body = response.read().decode()
        assert response.status == 200, f"HTTP {response.status}: {body}"
        return str(json.loads(body)["text_output"])

    def close(self) -> None:
        """Close it."""
        self._http.close()

    def _status(self) -> int:
        response = self._http.getresponse()
        response.read()
        return response.status
