#!/usr/bin/env -S python3 -I -S
"""The image's `bin/health`: the probe of `triton_llama.health`, from the folder `python` beside `bin`.

Isolated, and without site-packages, because it is started every few seconds and needs neither.
"""

from __future__ import annotations

import sys

sys.path.insert(0, f"{__file__.rpartition('/bin/')[0]}/python")

from triton_llama.health.command import main

sys.exit(main())
