"""Tokenizer with its vocabulary as bytes, and the detokenizer, which cuts at stop strings."""
