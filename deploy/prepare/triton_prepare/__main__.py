"""The command line, `python -m triton_prepare`: options, exit codes, and every failure as one line."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

_DESCRIPTION = "Quantize a checkpoint to INT8 once, or copy a quantized one, for servers that load the result."
_EPILOG = """
Exit code: 0 prepared, now or before; 1 failed; 2 usage; 130, 143 interrupted. The same command resumes.
Writes to OUT and beside it, and to HF_HOME. HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are Hugging Face's own.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare the checkpoint that the command line names; return the exit code, of which `--help` has the list."""
    from llama_engine.errors import EngineError

    from triton_prepare.prepare import prepare
    from triton_prepare.progress import PrepareError

    parser = argparse.ArgumentParser(prog="triton_prepare", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of a checkpoint in safetensors")
    parser.add_argument("--revision", help="of a hub id: a commit, a tag or a branch (its default branch)")
    parser.add_argument("--out", type=Path, help="folder to create (prepared/NAME-int8)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--force", action="store_true", help="replace an existing prepared checkpoint")
    chosen = parser.parse_args(arguments)
    if not chosen.model.strip():
        parser.error("MODEL is empty: a folder or a hub id is needed")
    out = chosen.out or Path("prepared") / f"{Path(chosen.model).expanduser().resolve().name}-int8"
    try:
        prepare(chosen.model, chosen.revision or None, out, chosen.device, chosen.force)  # "" is an unset variable.
    except (PrepareError, EngineError, OSError) as error:  # An OSError is about a file of the source.
        print(f"prepare: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("prepare: interrupted; the same command resumes", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    # Before main's imports, which take a while: in a container this is process 1, for which the kernel drops signals
    # without a handler. Ending at once also ends downloads in other threads; the same command resumes.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
    sys.exit(main())
