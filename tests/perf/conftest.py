"""The embedded checkpoint, as tests/engine loads it."""

from __future__ import annotations

from engine.checkpoints import fp32, tokenizer

__all__ = ["fp32", "tokenizer"]
