"""`make soak MINUTES=30`, `python -m soak`: see `soak.cli`."""

from __future__ import annotations

import sys

from soak.cli import main

sys.exit(main())
