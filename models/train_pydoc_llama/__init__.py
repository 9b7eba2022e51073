"""Makes models/pydoc-llama: a small Llama trained from scratch on the text that ships with CPython."""
