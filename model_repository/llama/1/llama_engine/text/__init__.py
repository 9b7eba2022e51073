"""Text and tokens: tokenizer, vocabulary as bytes, stop checker, bad words."""
