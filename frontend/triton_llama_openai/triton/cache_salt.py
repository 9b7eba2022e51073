"""The salt of a request's cached prefixes, which separates the tenants of a server."""

from __future__ import annotations

import hashlib


def cache_salt_of(key_digest: bytes, cache_salt: str | None) -> str | None:
    """Return the salt of a request's cached prefixes; None shares them with all requests without a salt.

    key_digest: empty for one that shares with other keys. All endpoints derive the same salts, so that a chat finds its
    prefix whichever endpoint its next turn takes.
    """
    scope = key_digest + (cache_salt or "").encode()
    # Hashed once more: the digest itself, by which keys are compared, does not leave the endpoint.
    return hashlib.sha256(b"cache salt " + scope).hexdigest()[:32] if scope else None
