"""Serve under supervision: python -m triton_supervisor [TRITONSERVER_OPTIONS ...].

The settings are the environment's (settings.py). Messages go to standard error, one line each.
"""

from __future__ import annotations

import sys

from triton_supervisor.signals import block_signals

if __name__ == "__main__":
    # The kernel drops signals that process 1 doesn't handle. Blocked, a SIGTERM waits until everything is loaded.
    block_signals()

    from triton_supervisor.supervisor import main

    sys.exit(main(sys.argv[1:]))
