"""Entry point of `python -m perf.tune`."""

import sys

from perf.tune.cli import main

sys.exit(main())
