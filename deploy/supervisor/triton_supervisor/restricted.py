"""Which of Triton's interfaces need a key, and tritonserver's options that say so.

Triton's control interfaces have no authentication: whoever reaches the port may unload the model, load another one from
the request itself (which is running code of one's choice), map the server's shared memory, or turn its logs off. Over
HTTP and gRPC alike they are closed here to everybody without a key. What clients, probes, metrics and benchmarks ask
for stays open; who may ask for that is a proxy's business.

The key keeps out who comes over the network. It is on tritonserver's command line, the only place Triton takes it from,
so whoever may look at the container's processes can read it. Starts nothing, and sends nothing.
"""

from __future__ import annotations

import re
import secrets

RESTRICTED = ("model-repository", "shared-memory", "trace", "logging")
"""Needs the key, in Triton's own words; every category there is and that isn't in OPEN."""

OPEN = ("health", "metadata", "inference", "model-config", "statistics")
"""Stays open: inference; health for probes; the others, which only tell, for `triton-llama status` and benchmarks."""

HTTP_HEADER = "triton-llama-key"
"""The header of an HTTP request that has the key as its value."""

GRPC_HEADER = f"triton-grpc-protocol-{HTTP_HEADER}"
"""The same in a gRPC call's metadata: Triton puts its own prefix before the name."""

_KEY = re.compile(r"[A-Za-z0-9_-]{32,}")


def new_key() -> str:
    """Return a key that can't be guessed; one for every start of a server."""
    return secrets.token_urlsafe(32)


def restricted_arguments(key: str) -> tuple[str, ...]:
    """Return tritonserver's options that close RESTRICTED over HTTP and gRPC to requests without the key.

    Raises ValueError for a key that is short enough to be guessed, or that tritonserver would take apart.
    """
    if not _KEY.fullmatch(key):
        # Not the key itself: what is wrong with it may be a typo in a real one.
        raise ValueError(f"the key has {len(key)} characters; it must be at least 32 of A-Z, a-z, 0-9, - and _")
    setting = f"{','.join(RESTRICTED)}:{HTTP_HEADER}={key}"
    return (f"--http-restricted-api={setting}", f"--grpc-restricted-protocol={setting}")
