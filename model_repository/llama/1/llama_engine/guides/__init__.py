"""Guided decoding: guides, their checks, their matchers and the translation to grammars."""
