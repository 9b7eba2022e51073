"""Tokenizer with its vocabulary as bytes, and the output text with the conditions that end it."""
