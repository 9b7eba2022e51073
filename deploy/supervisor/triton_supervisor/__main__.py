"""Entry point of `python -m triton_supervisor`."""

import sys

from triton_supervisor.signals import block_signals

if __name__ == "__main__":
    # The kernel drops signals that process 1 doesn't handle. Blocked, a SIGTERM waits until everything is loaded.
    # `announce` is never process 1, and a signal ends it.
    if sys.argv[1:2] != ["announce"]:
        block_signals()

    from triton_supervisor.cli import main

    sys.exit(main(sys.argv[1:]))
