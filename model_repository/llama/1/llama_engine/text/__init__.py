"""Tokenizer with its vocabulary as bytes, stop checker with its detokenizer, bad words."""
