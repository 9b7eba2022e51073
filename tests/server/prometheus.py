"""A real Prometheus with this project's configuration and shorter intervals, scraping a server of the tests."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml
from contract.debian_packages import Prometheus
from contract.monitoring_files import MONITORING
from server.servers import until

PAUSE = "500ms"
"""Between two scrapes, and between two evaluations of the rules."""

STOP_S = 30.0


class QueryFailedError(Exception):
    """Prometheus refuses an expression; the message is its own."""


class ScrapingPrometheus:
    """Runs inside a `with` block."""

    def __init__(self, program: Prometheus, folder: Path, target: str) -> None:
        """folder: an empty one. target: HOST:PORT of the metrics that it scrapes."""
        self._program = program
        self._folder = folder
        self._target = target
        self._address = f"127.0.0.1:{_free_port()}"

    def __enter__(self) -> ScrapingPrometheus:
        config = self._folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(self._config()))
        self._log = (self._folder / "log").open("w+")
        self._process = subprocess.Popen(
            [
                self._program.server,
                f"--config.file={config}",
                f"--storage.tsdb.path={self._folder / 'data'}",
                f"--web.listen-address={self._address}",
                "--log.level=warn",
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            # Two cores, and the server under test needs one.
            env={**os.environ, "GOMAXPROCS": "1"},
        )
        try:
            until(self._is_ready, lambda: f"Prometheus is ready: {self.log()}")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._end() == 0, "Prometheus did not end well"

    def log(self) -> str:
        """Return its warnings and errors."""
        return (self._folder / "log").read_text()

    def values(self, expression: str) -> list[float]:
        """Return the present values of an expression's series. Raises QueryFailedError."""
        answer = self._get(f"/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        return [float(series["value"][1]) for series in answer["result"]]

    def finite(self, expression: str) -> list[float]:
        """Return the finite ones: a division without data is NaN."""
        return [value for value in self.values(expression) if math.isfinite(value)]

    def rules(self) -> list[dict[str, Any]]:
        """Return the health and last error of every rule, and the state of alerts."""
        return [rule for group in self._get("/api/v1/rules")["groups"] for rule in group["rules"]]

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
        config["global"] |= {"scrape_interval": PAUSE, "evaluation_interval": PAUSE}
        config["rule_files"] = [str(MONITORING / pattern) for pattern in config["rule_files"]]
        (scraped,) = config["scrape_configs"]
        del scraped["dns_sd_configs"]
        scraped["static_configs"] = [{"targets": [self._target]}]
        return config

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self.log()
        try:
            with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=10) as response:
                return bool(response.status == 200)
        except OSError:
            # Not listening yet, or 503.
            return False

    def _get(self, path: str) -> Any:  # noqa: ANN401 - whatever the API has there
        try:
            with urllib.request.urlopen(f"http://{self._address}{path}", timeout=30) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                raise QueryFailedError(error.read().decode(errors="replace")) from None
        assert answer["status"] == "success", answer
        return answer["data"]

    def _end(self) -> int:
        self._process.terminate()
        try:
            return self._process.wait(STOP_S)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            self._log.close()


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])
