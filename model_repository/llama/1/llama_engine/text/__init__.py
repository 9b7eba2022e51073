"""Tokenizer, vocabulary as bytes, incremental detokenizer, stop checker, bad words."""
