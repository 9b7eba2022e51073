"""A stand-in for tritonserver in tests of its supervisor: it has model processes, answers, unloads and ends.

Run as a program, with tritonserver's options. The environment sets its behaviour:

    FAKE_EVENTS     file: gets a line for each event: loading, asked N, ready MODEL, unloading MODEL, unloaded MODEL
    FAKE_BUSY       file: while it exists, a request is running that unloading waits for, as the metrics show
    FAKE_REFUSES    unloading is refused with this message
    FAKE_WAITS      it doesn't end on SIGINT, as with an idle connection that Triton waits for
    FAKE_INSTANCES  number of model processes (1)
    FAKE_HOLDS      a model is never unloaded
    FAKE_ENDS       it ends with this code before it listens, or dies of SIGABRT if this is "abort"

As a real one, it has its model's processes some time before it says that the model is ready.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def note(event: str) -> None:
    """Write an event's line."""
    with Path(os.environ["FAKE_EVENTS"]).open("a") as events:
        print(event, file=events)


def is_busy() -> bool:
    return Path(os.environ.get("FAKE_BUSY", "/nowhere")).exists()


class FakeTriton(ThreadingHTTPServer):
    """The server, its models' states and the processes of `llama`."""

    def __init__(self, port: int, restricted: str, models: list[str]) -> None:
        self.header, _, self.key = restricted.partition(":")[2].partition("=")
        self.states = dict.fromkeys(models, "READY")
        # The supervisor takes it for a model's process by its name.
        stub = Path(os.environ["PATH"].partition(":")[0]) / "triton_python_backend_stub"
        stub.symlink_to("/bin/sleep")
        instances = int(os.environ.get("FAKE_INSTANCES", "1"))
        self.processes = [subprocess.Popen(["sleep", "600"], executable=stub) for _ in range(instances)]
        self.asked = 0
        # Listens last: a supervisor that is answered, if only that the model isn't ready, finds its processes.
        super().__init__(("127.0.0.1", port), Handler)

    def unload(self, model: str) -> None:
        """Unload a model once no request is running; end the processes of `llama`."""
        self.states[model] = "UNLOADING"
        note(f"unloading {model}")
        while is_busy():
            time.sleep(0.02)
        if "FAKE_HOLDS" in os.environ:
            return
        for process in self.processes if model == "llama" else []:
            process.kill()
            process.wait()
        note(f"unloaded {model}")
        self.states[model] = "UNAVAILABLE"


class Handler(BaseHTTPRequestHandler):
    server: FakeTriton

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._answer(200, text=f'llama_slots_in_use{{model="llama"}} {int(is_busy())}\n')
            return
        *_, models, model, ready = self.path.split("/")
        assert (models, ready) == ("models", "ready")
        self.server.asked += 1
        is_ready = self.server.states[model] == "READY" and self.server.asked > 2
        # Before the answer, so that what the supervisor does upon it has a later line.
        note(f"ready {model}" if is_ready else f"asked {self.server.asked}")
        self._answer(200 if is_ready else 400)

    def do_POST(self) -> None:
        if self.headers[self.server.header] != self.server.key:
            self._answer(403, {"error": "This API is restricted"})
        elif self.path == "/v2/repository/index":
            loaded = [{"name": model, "state": state} for model, state in self.server.states.items()]
            self._answer(200, [{"name": "other"}, *loaded])
        elif refusal := os.environ.get("FAKE_REFUSES"):
            self._answer(503, {"error": refusal})
        else:
            *_, models, model, unload = self.path.split("/")
            assert (models, unload) == ("models", "unload")
            threading.Thread(target=self.server.unload, args=[model]).start()
            self._answer(200)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def _answer(self, status: int, content: object = None, text: str = "") -> None:
        body = text.encode() if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    options = dict(word.split("=", 1) for word in sys.argv if "=" in word)
    note("loading")
    if end := os.environ.get("FAKE_ENDS"):
        os.abort() if end == "abort" else sys.exit(int(end))
    models = [word.partition("=")[2] for word in sys.argv if word.startswith("--load-model=")]
    triton = FakeTriton(int(options["--http-port"]), options["--http-restricted-api"], models)
    signal.signal(signal.SIGINT, signal.SIG_IGN if "FAKE_WAITS" in os.environ else lambda *_: os._exit(0))
    triton.serve_forever()


if __name__ == "__main__":
    main()
