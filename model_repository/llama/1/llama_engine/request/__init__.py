"""Request parsing, bounds, and the checkpoint's defaults."""
