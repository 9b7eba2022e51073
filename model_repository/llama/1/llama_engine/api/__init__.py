"""What a client may ask for: request parsing and the checkpoint's defaults."""
