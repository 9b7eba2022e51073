"""`python -m triton_llama.health`: the probe where there is no `triton-llama` command, in the server's image, say."""

from __future__ import annotations

import sys

from triton_llama.health.command import main

sys.exit(main(prog="python -m triton_llama.health"))
