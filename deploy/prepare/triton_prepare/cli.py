"""The command line: options, exit codes, and every failure as one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from llama_engine.errors import EngineError

from triton_prepare.errors import PrepareError
from triton_prepare.hub import Hub
from triton_prepare.run import Order, prepare

DONE, FAILED, INTERRUPTED = 0, 1, 130

_EPILOG = """
Exit code: 0 done, or done before; 1 failed; 2 not understood. After a killed run, the same command goes on.
Writes to OUT and beside it, and to HF_HOME. HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are Hugging Face's own.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare what the command line says; return the exit code."""
    order = _order(arguments)
    try:
        prepare(order, Hub())
    except (PrepareError, EngineError) as error:
        return _failed(str(error))
    except OSError as error:
        # A file of the original, or the manifest; what else is written has its own explanation.
        return _failed(f"{error.filename or order.model}: {error.strerror or error}")
    except KeyboardInterrupt:
        print("prepare: interrupted; the same command goes on", file=sys.stderr)
        return INTERRUPTED
    return DONE


def _order(arguments: Sequence[str] | None) -> Order:
    parser = argparse.ArgumentParser(
        prog="triton_prepare",
        description="Quantize a Llama to INT8 once, for servers that start from the result.",
        epilog=_EPILOG,
    )
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of a Llama in safetensors")
    parser.add_argument("--revision", help="of a hub id: a commit, a tag or a branch (its default branch)")
    parser.add_argument("--out", type=Path, help="folder to be made (prepared/NAME-int8)")
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="what quantizes; auto is the GPU if there is one",
    )
    parser.add_argument("--force", action="store_true", help="prepare anew what is there")
    chosen = parser.parse_args(arguments)
    if not chosen.model.strip():
        parser.error("MODEL is empty: a folder or a hub id is needed")
    out = chosen.out or Path("prepared") / f"{Path(chosen.model).expanduser().resolve().name}-int8"
    # A variable that is set to nothing means the default.
    return Order(chosen.model, chosen.revision or None, out, chosen.device, chosen.force)


def _failed(reason: str) -> int:
    print(f"prepare: {reason}", file=sys.stderr)
    return FAILED
