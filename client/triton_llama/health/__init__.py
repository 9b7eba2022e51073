"""Health that proves a forward pass: whether a server is healthy, alive or ready, and why.

    command     the command line, for people and for orchestrators' probes
    probes      the three questions
      state       what the server's supervisor says of it
      proof       whether the model computes
        pulse       its last steps, read off Triton's metrics
        one_token   a token, which costs a forward pass
          exchange    one HTTP exchange

Standard library only, not even click or tritonclient: a probe starts every few seconds, in the server's image.
"""

from __future__ import annotations

from triton_llama.health.address import Address
from triton_llama.health.limits import Limits
from triton_llama.health.probes import healthy, live, ready
from triton_llama.health.verdict import Verdict

__all__ = ["Address", "Limits", "Verdict", "healthy", "live", "ready"]
