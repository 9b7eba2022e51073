"""The command line, `python -m triton_llama_dynamo --triton HOST:8001`."""

from __future__ import annotations

import os
import sys

from dynamo.common.backend.run import run

from triton_llama_dynamo.engine import TritonEngine


def main() -> None:
    """Serve until SIGTERM. When Triton is lost, leave Dynamo and begin anew, which waits for Triton.

    A new process is a new worker to Dynamo's routers, which so forget the pages of the lost Triton.
    """
    engines: list[TritonEngine] = []

    async def parsed(argv: list[str] | None) -> tuple[TritonEngine, object]:
        engine, config = await TritonEngine.from_args(argv)
        engines.append(engine)
        return engine, config

    run(TritonEngine, engine_factory=parsed)
    if engines[0].lost:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    main()
