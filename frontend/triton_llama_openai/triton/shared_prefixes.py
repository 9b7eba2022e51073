"""Whose prompts share pages: the salt of a request's cached prefixes, and the key by which proxies pick replicas."""

from __future__ import annotations

import hashlib

from triton_llama_openai.protocol.prompts import Prompt

REPLICA_HEADER = "x-llama-key"
"""The metadata that has the key."""
_TOKENS = 64
"""Tokens at a prompt's beginning that make its key."""
_CHARACTERS = 256
"""Characters that do so for a text."""


def replica_key(
    session: str, prompt_cache_key: str | None, prompt: Prompt, adapter: str, cache_salt: str | None
) -> str:
    """Return the key of a prompt: that of its session, else of its prompt_cache_key, else of its beginning.

    session, prompt_cache_key: the client's names for prompts that belong together; empty or None: it gives none. The
    key is hashed with the salt, so that clients with different salts have different keys, and none of their texts; and
    with the adapter's name, empty for none: adapters share no pages.
    """
    beginning = prompt[:_CHARACTERS] if isinstance(prompt, str) else prompt[:_TOKENS]
    prefix = session or prompt_cache_key or beginning
    return hashlib.sha256(repr((adapter, cache_salt, prefix)).encode()).hexdigest()[:32]


def cache_salt_of(key_digest: bytes, cache_salt: str | None) -> str | None:
    """Return the salt of a request's cached prefixes, which separates tenants; None is shared with all without a salt.

    key_digest: empty for one that shares with other keys. All endpoints derive the same salts, so that a chat finds its
    prefix whichever endpoint its next turn takes.
    """
    scope = key_digest + (cache_salt or "").encode()
    # Hashed once more: the digest itself, by which keys are compared, does not leave the endpoint.
    return hashlib.sha256(b"cache salt " + scope).hexdigest()[:32] if scope else None
