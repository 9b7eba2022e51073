"""The command line, `python -m triton_llama_dynamo --triton HOST:8001`."""

from __future__ import annotations

import signal
import subprocess
import sys

from triton_llama_dynamo import LOST


def main() -> None:
    """Run a worker until SIGTERM. When its Triton is lost, start another one, which waits for Triton.

    A new process is a new worker to Dynamo's routers, which so forget the pages of the lost Triton.
    """
    stopping = False
    worker: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: object) -> None:
        nonlocal stopping
        stopping = True
        if worker is not None:
            worker.terminate()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    exit_code = LOST
    while exit_code == LOST and not stopping:
        worker = subprocess.Popen([sys.executable, "-m", "triton_llama_dynamo.worker", *sys.argv[1:]])
        if stopping:
            # The signal came before `worker` was set.
            worker.terminate()
        exit_code = worker.wait()
    sys.exit(0 if stopping else exit_code)


if __name__ == "__main__":
    main()
