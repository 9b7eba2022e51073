"""How often tritonserver crashes in its own start: `make starts`.

Triton 2.51 can lose a race of its own before a model runs (boost::interprocess::lock_exception,
triton-inference-server/server issue 8882). A start here is the launcher's, as in `make serve`, until the model is
ready; then the server is killed. The model has no weights and imports NumPy alone, so that the part in question is most
of a start; `--product` starts the Llama instead. Ends in one JSON line. No crash in n starts means a rate below 3 / n,
with 95 % confidence.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from triton_local.errors import LauncherError
from triton_local.server import LocalTriton

from perf.command import count

CRASH = "boost::interprocess::lock_exception"
AT_ONCE = 2
RESTART = "; tritonserver is started again "

CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        return []
"""


def start(repository: Path | None) -> Counter[str]:
    """Start a server until it is ready, and kill it; return what happened. repository: None is the product's."""
    server = LocalTriton(model_repository=repository)
    happened = Counter(starts=1)
    try:
        server.start()
        server.kill()
        server.wait()
    except LauncherError as error:
        happened["failed"] = 1
        print(error, file=sys.stderr)
    lines = server.log_text().splitlines()
    server.stop()
    restarts = [line for line in lines if RESTART in line]
    print(*restarts, sep="\n", end="\n" if restarts else "", file=sys.stderr)
    happened["lock_exceptions"] = sum(f"instance of '{CRASH}'" in line for line in lines)
    happened["started_again"] = len(restarts)
    return happened


def main() -> None:
    """Start servers, two at a time; print what happened."""
    parser = argparse.ArgumentParser(prog="make starts", description=__doc__)
    parser.add_argument("--starts", type=count, default=300, help="(300)")
    parser.add_argument("--product", action="store_true", help="start the product's model")
    options = parser.parse_args()
    began = time.monotonic()
    happened = Counter(starts=0, failed=0, lock_exceptions=0, started_again=0)
    with TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        model = Path(folder, "llama")
        (model / "1").mkdir(parents=True)
        (model / "config.pbtxt").write_text(CONFIG)
        (model / "1" / "model.py").write_text(MODEL)
        try:
            for one in pool.map(start, [None if options.product else Path(folder)] * options.starts):
                happened.update(one)
        finally:
            # After Ctrl-C, begin no more.
            pool.shutdown(cancel_futures=True)
    which, seconds = "product" if options.product else "minimal", round(time.monotonic() - began, 1)
    print(json.dumps({"model": which, "at_once": AT_ONCE, **happened, "seconds": seconds}))


if __name__ == "__main__":
    main()
