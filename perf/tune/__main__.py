"""Entry point of `python -m tune`."""

import sys

from tune.cli import main

sys.exit(main())
