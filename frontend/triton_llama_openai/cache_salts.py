"""Salts for the server's prefix cache: whose prompts may share cached prefixes."""

from __future__ import annotations

from hashlib import sha256


class CacheSalts:
    """Derives the salt of each request from its API key and its field `cache_salt`.

    All endpoints derive the same salts, so that a chat finds its prefix whichever endpoint its next turn takes.
    """

    def __init__(self, shared: bool) -> None:
        """shared: whether API keys share cached prefixes."""
        self._shared = shared

    def salt(self, key_digest: bytes, cache_salt: str | None) -> str | None:
        """Return a request's salt; None shares with all requests without a salt. key_digest: empty without a key."""
        scope = (b"" if self._shared else key_digest) + (cache_salt or "").encode()
        # Hashed once more: the digest itself, by which keys are compared, does not leave the endpoint.
        return sha256(b"cache salt " + scope).hexdigest()[:32] if scope else None
