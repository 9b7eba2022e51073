"""The supervisor with other constants: python quick_supervisor.py MODULE.CONSTANT=NUMBER ... -- OPTIONS."""

import sys
from importlib import import_module

from triton_supervisor.signals import block_signals

if __name__ == "__main__":
    block_signals()
    end = sys.argv.index("--")
    for setting in sys.argv[1:end]:
        name, _, value = setting.partition("=")
        module, _, constant = name.partition(".")
        setattr(import_module(f"triton_supervisor.{module}"), constant, float(value))
    sys.exit(import_module("triton_supervisor.supervisor").main(sys.argv[end + 1 :]))
