"""The command line, `python -m triton_prepare`: options, exit codes, and every failure as one line."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

_DESCRIPTION = "Quantize a checkpoint to INT8 once, or copy a quantized one, for servers that load the result."
_EPILOG = """
Exit code: 0 prepared; 1 failed; 2 usage; 130, 143 interrupted. Writes OUT, and HF_HOME. HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE are Hugging Face's own.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare the checkpoint that the command line names; return the exit code, of which `--help` has the list."""
    parser = argparse.ArgumentParser(prog="triton_prepare", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of a checkpoint in safetensors")
    parser.add_argument("--revision", help="of a hub id: a commit, a tag or a branch (its default branch)")
    parser.add_argument("--adapter", help="folder or hub id (ID@REVISION) of a LoRA adapter to merge into the weights")
    parser.add_argument("--out", type=Path, help="folder to create (prepared/NAME-int8, or NAME-ADAPTER-int8)")
    parser.add_argument("--if-absent", action="store_true", help="exit with 0, and do nothing, if OUT is a checkpoint")
    chosen = parser.parse_args(arguments)
    if not chosen.model.strip():
        parser.error("MODEL is empty: a folder or a hub id is needed")
    # "" is an unset variable.
    adapter = chosen.adapter or None
    names = [Path(name).expanduser().resolve().name for name in (chosen.model, adapter) if name]
    out = chosen.out or Path("prepared") / f"{'-'.join(names)}-int8"
    if chosen.if_absent and (out.expanduser() / "config.json").exists():
        print(f"prepare: {out} exists", flush=True)
        return 0

    # Imported here because importing PyTorch takes seconds.
    from llama_engine.errors import EngineError

    from triton_prepare.prepare import prepare

    try:
        prepare(chosen.model, chosen.revision or None, out, adapter=adapter)
    except (EngineError, OSError) as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("prepare: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    # Before main's imports, which take a while: in a container this is process 1, for which the kernel drops signals
    # without a handler.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
