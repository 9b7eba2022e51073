"""Tokenizer with its vocabulary as bytes, and stop checker."""
