"""The process of one worker, which __main__.py starts."""

from __future__ import annotations

import ctypes
import signal
import sys

from dynamo.common.backend.run import run

from triton_llama_dynamo import LOST
from triton_llama_dynamo.engine import TritonEngine

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until SIGTERM, or until Triton is lost."""
    # It dies with its parent.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    engines: list[TritonEngine] = []

    async def parsed(argv: list[str] | None) -> tuple[TritonEngine, object]:
        engine, config = await TritonEngine.from_args(argv)
        engines.append(engine)
        return engine, config

    run(TritonEngine, engine_factory=parsed)
    if engines[0].lost:
        sys.exit(LOST)


if __name__ == "__main__":
    main()
