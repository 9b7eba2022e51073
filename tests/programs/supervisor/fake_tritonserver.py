"""A stand-in for tritonserver in tests of its supervisor: it has model processes, answers, unloads and ends.

Run as a program, with tritonserver's options. The environment sets its behaviour:

    FAKE_LOADS      the model is loading forever, and the port is closed
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

# With the kernel's name of the real one: its first 15 characters.
MODEL_PROCESS = """
import time
with open("/proc/self/comm", "w") as name:
    name.write("triton_python_b")
print("loaded", flush=True)
time.sleep(600)
"""


def model_process() -> subprocess.Popen[bytes]:
    """Start a process that the supervisor takes for a model's."""
    process = subprocess.Popen([sys.executable, "-c", MODEL_PROCESS], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


class FakeTriton(ThreadingHTTPServer):
    """The server, its model's state and processes."""

    def __init__(self, port: int, restricted: str) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.header, _, self.key = restricted.partition(":")[2].partition("=")
        self.state = "READY"
        self.processes = [model_process() for _ in range(int(os.environ.get("FAKE_INSTANCES", "1")))]

    def unload(self) -> None:
        """End the model's processes once no request is running."""
        self.state = "UNLOADING"
        while Path(os.environ.get("FAKE_BUSY", "/nowhere")).exists():
            time.sleep(0.02)
        for process in self.processes:
            time.sleep(float(os.environ.get("FAKE_FINALIZES", "0")))
            process.kill()
            process.wait()
        self.state = "UNAVAILABLE"


class Handler(BaseHTTPRequestHandler):
    server: FakeTriton

    def do_GET(self) -> None:
        assert self.path == "/v2/models/llama/ready"
        self._answer(200 if self.server.state == "READY" else 400)

    def do_POST(self) -> None:
        if self.headers[self.server.header] != self.server.key:
            self._answer(403, {"error": "This API is restricted"})
        elif self.path == "/v2/repository/index":
            self._answer(200, [{"name": "other"}, {"name": "llama", "state": self.server.state}])
        elif refusal := os.environ.get("FAKE_REFUSES"):
            self._answer(503, {"error": refusal})
        else:
            assert self.path == "/v2/repository/models/llama/unload"
            threading.Thread(target=self.server.unload).start()
            self._answer(200)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def _answer(self, status: int, content: object = None) -> None:
        body = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    options = dict(word.split("=", 1) for word in sys.argv if "=" in word)
    if "--help" in sys.argv:
        print("  --model-repository <string>")
        return
    if "FAKE_LOADS" in os.environ:
        time.sleep(600)
    triton = FakeTriton(int(options["--http-port"]), options["--http-restricted-api"])
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "FAKE_WAITS" in os.environ else lambda *_: os._exit(0))
    triton.serve_forever()


if __name__ == "__main__":
    main()
