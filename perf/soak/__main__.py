"""`make soak MINUTES=30`, `python -m perf.soak`: see `soak.cli`."""

from __future__ import annotations

import sys

from perf.soak.cli import main

sys.exit(main())
