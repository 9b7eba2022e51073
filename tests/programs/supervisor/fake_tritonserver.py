"""A stand-in for tritonserver in tests of its supervisor: it has model processes, answers, unloads and ends.

Run as a program, with tritonserver's options. The environment sets its behaviour:

    FAKE_LOADS      file: if it exists at the start, the model is loading forever, and the port is closed
    FAKE_BUSY       file: while it exists, a request is running that unloading waits for
    FAKE_REFUSES    unloading is refused with this message
    FAKE_WAITS      it doesn't end on SIGINT, as with an idle connection that Triton waits for
    FAKE_INSTANCES  number of model processes, which end one after the other (1)
    FAKE_FINALIZES  seconds that each of them takes to end (0)
    FAKE_HOLDS      a model is never unloaded
    FAKE_METRICS_BUSY  file: while it exists, the metrics show a running request; default FAKE_BUSY
    FAKE_UNLOADED   file: gets a line with the name of each model when it is unloaded
    FAKE_STARTS     file: gets a line with the supervisor's count of restarts at each start
    FAKE_CRASHES    number of starts in FAKE_STARTS that die of SIGABRT before they listen (0)
    FAKE_FAILS      every start in FAKE_STARTS after this many ends with code 1 before it listens
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


def model_process(folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that the supervisor takes for a model's; folder: for a program of that name."""
    program = folder / "triton_python_backend_stub"
    if not program.exists():
        program.symlink_to("/bin/sleep")
    return subprocess.Popen(["sleep", "600"], executable=program)


class FakeTriton(ThreadingHTTPServer):
    """The server, its models' states and the processes of `llama`."""

    def __init__(self, port: int, restricted: str, models: list[str]) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.header, _, self.key = restricted.partition(":")[2].partition("=")
        self.states = dict.fromkeys(models, "READY")
        instances = int(os.environ.get("FAKE_INSTANCES", "1"))
        folder = Path(os.environ["PATH"].partition(":")[0])
        self.processes = [model_process(folder) for _ in range(instances)]

    def unload(self, model: str) -> None:
        """Unload a model once no request is running; end the processes of `llama`."""
        self.states[model] = "UNLOADING"
        while Path(os.environ.get("FAKE_BUSY", "/nowhere")).exists():
            time.sleep(0.02)
        if "FAKE_HOLDS" in os.environ:
            return
        for process in self.processes if model == "llama" else []:
            time.sleep(float(os.environ.get("FAKE_FINALIZES", "0")))
            process.kill()
            process.wait()
        if "FAKE_UNLOADED" in os.environ:
            with Path(os.environ["FAKE_UNLOADED"]).open("a") as unloaded:
                print(model, file=unloaded)
        self.states[model] = "UNAVAILABLE"


class Handler(BaseHTTPRequestHandler):
    server: FakeTriton

    def do_GET(self) -> None:
        if self.path == "/metrics":
            running = Path(os.environ.get("FAKE_METRICS_BUSY") or os.environ.get("FAKE_BUSY", "/nowhere")).exists()
            self._answer(200, text=f'llama_slots_in_use{{model="llama"}} {int(running)}\n')
            return
        *_, models, model, ready = self.path.split("/")
        assert (models, ready) == ("models", "ready")
        self._answer(200 if self.server.states[model] == "READY" else 400)

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


def fail_as_told() -> None:
    """Count this start; end it if FAKE_CRASHES or FAKE_FAILS covers it."""
    if "FAKE_STARTS" not in os.environ:
        return
    with Path(os.environ["FAKE_STARTS"]).open("a+") as starts:
        print(os.environ["TRITON_SERVER_RESTARTS"], file=starts, flush=True)
        starts.seek(0)
        number = len(starts.readlines())
    if number <= int(os.environ.get("FAKE_CRASHES", "0")):
        os.abort()
    if number > int(os.environ.get("FAKE_FAILS", "1000")):
        sys.exit(1)


def main() -> None:
    options = dict(word.split("=", 1) for word in sys.argv if "=" in word)
    fail_as_told()
    if Path(os.environ.get("FAKE_LOADS", "/nowhere")).exists():
        time.sleep(600)
    models = [word.partition("=")[2] for word in sys.argv if word.startswith("--load-model=")]
    triton = FakeTriton(int(options["--http-port"]), options["--http-restricted-api"], models)
    signal.signal(signal.SIGINT, signal.SIG_IGN if "FAKE_WAITS" in os.environ else lambda *_: os._exit(0))
    triton.serve_forever()


if __name__ == "__main__":
    main()
