"""A stand-in for tritonserver in tests of its supervisor: it has model processes, answers, unloads and ends.

Run as a program, with tritonserver's options. The environment sets its behaviour:

    FAKE_LOADS      file: while it exists, the model is loading, and the port is closed
    FAKE_BUSY       file: while it exists, a request is running that unloading waits for
    FAKE_REFUSES    unloading is refused with this message
    FAKE_WAITS      it doesn't end on SIGTERM, as with an idle connection that Triton waits for
    FAKE_INSTANCES  number of model processes, which end one after the other (1)
    FAKE_FINALIZES  seconds that each of them takes to end (0)
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

POLL_S = 0.02
# With the kernel's name of the real one: its first 15 characters.
MODEL_PROCESS = """
import time
with open("/proc/self/comm", "w") as name:
    name.write("triton_python_b")
print("loaded", flush=True)
time.sleep(600)
"""


class Model:
    """The model and its processes."""

    def __init__(self) -> None:
        self.state = "READY"
        self._processes = [_model_process() for _ in range(int(os.environ.get("FAKE_INSTANCES", "1")))]

    def unload(self) -> None:
        self.state = "UNLOADING"
        threading.Thread(target=self._finish).start()

    def _finish(self) -> None:
        while _exists("FAKE_BUSY"):
            time.sleep(POLL_S)
        for process in self._processes:
            time.sleep(float(os.environ.get("FAKE_FINALIZES", "0")))
            process.kill()
            process.wait()
        self.state = "UNAVAILABLE"


def _model_process() -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", MODEL_PROCESS], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def _exists(variable: str) -> bool:
    return variable in os.environ and Path(os.environ[variable]).exists()


def _option(name: str) -> str:
    return next(word.removeprefix(f"{name}=") for word in sys.argv if word.startswith(f"{name}="))


def main() -> None:
    if "--help" in sys.argv:
        print("  --model-repository <string>")
        return
    while _exists("FAKE_LOADS"):
        time.sleep(POLL_S)
    header, _, key = _option("--http-restricted-api").partition(":")[2].partition("=")
    model = Model()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/v2/models/llama/ready"
            self._answer(200 if model.state == "READY" else 400, "")

        def do_POST(self) -> None:
            if self.headers[header] != key:
                self._answer(403, json.dumps({"error": "This API is restricted"}))
            elif self.path == "/v2/repository/index":
                self._answer(200, json.dumps([{"name": "other"}, {"name": "llama", "state": model.state}]))
            elif refusal := os.environ.get("FAKE_REFUSES"):
                self._answer(503, json.dumps({"error": refusal}))
            else:
                assert self.path == "/v2/repository/models/llama/unload"
                model.unload()
                self._answer(200, "")

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

        def _answer(self, status: int, body: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

    if "FAKE_WAITS" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    ThreadingHTTPServer(("127.0.0.1", int(_option("--http-port"))), Handler).serve_forever()


if __name__ == "__main__":
    main()
