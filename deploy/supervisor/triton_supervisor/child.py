"""Run a command that the kernel kills with its parent: python child.py PARENT_PID COMMAND [ARGUMENTS ...].

It replaces itself by the command. 127 is the exit code of a command that can't be run, as in shells. SIGPIPE stays
ignored, as Python sets it: a log reader that leaves must not interrupt the drain.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit(1)  # it died before the prctl
    # Python would print a traceback of a SIGINT, so it has been blocked until here.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} can't be run: {error.strerror}\n".encode())
        os._exit(127)
