"""Entry point of `python -m triton_prepare`: puts the model's program on the path, wherever it was copied to."""

import importlib.util
import os
import signal
import sys
from pathlib import Path
from types import FrameType

ENGINE = Path("model_repository", "llama", "1")


def main() -> int:
    """Find `llama_engine` and run the command line."""
    # In a container this is process 1, for which the kernel drops a signal that nobody handles.
    signal.signal(signal.SIGTERM, _end)
    if importlib.util.find_spec("llama_engine") is None:
        # In the checkout and in the image, the model repository is beside a folder above this one.
        above = [folder / ENGINE for folder in Path(__file__).resolve().parents]
        found = [version for version in above if (version / "llama_engine").is_dir()]
        if not found:
            print(f"prepare: there is no {ENGINE} in any folder above {Path(__file__).parent}", file=sys.stderr)
            return 1
        sys.path.append(str(found[0]))
    from triton_prepare.cli import main as run

    return run()


def _end(number: int, frame: FrameType | None) -> None:
    """End at once, downloads in other threads included; the same command goes on."""
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
